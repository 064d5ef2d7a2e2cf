"""Finds the compilations of Triton kernels that given calls of ops request, without a GPU and without compiling.

Launchers run on tensors of the CPU. A replacement for Triton's driver names the device to compile for, and the
arguments of Triton's own just-in-time compiler are recorded instead of compiled. So a compilation made from a record
has the same key in Triton's cache as a launch on the device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from bench.common.attention_shapes import AttentionShape
from bench.common.timing import Call
from bench.op_cases import OP_CASES
from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.ops import Op, all_ops
from specdec_fast.triton_kernels.variant import Variant

CPU = torch.device("cpu")
DIVISIBLE = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Asked:
    """One compilation.

    Attributes:
        module, kernel: module and name of the function.
        signature: Triton type of every argument; ``"constexpr"`` for compile-time arguments, including integers that
            Triton specialises because they are 1.
        constexprs: values of the compile-time arguments.
        divisible: arguments specialised as multiples of 16.
        options: the compiler options that launchers choose.

    """

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Any], ...]
    divisible: frozenset[str]
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.kernel}{dict(self.constexprs)}"


@dataclass(frozen=True)
class Note:
    """The arguments of Triton's compiler, in a form that can be sent to another process."""

    asked: Asked
    signature: dict[str, str]
    constexprs: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    def compile(self, target: GPUTarget) -> Any:
        """Compile, or find it compiled in Triton's cache."""
        kernel = getattr(importlib.import_module(self.asked.module), self.asked.kernel)
        source = ASTSource(kernel, self.signature, self.constexprs, self.attrs)
        return triton.compile(source, target=target, options=self.options)


class _NoDevice:
    """Replaces Triton's driver: it names a device to compile for, and cannot run anything."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def noted(target: GPUTarget) -> Iterator[list[Note]]:
    """Record launches instead of compiling and running them; the list grows by compilations that are new."""
    notes: list[Note] = []
    before, compiles, runs, seen = driver._active, JITFunction._do_compile, JITFunction.run, set()

    def note(
        kernel: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: bool
    ) -> None:
        names = kernel.arg_names
        given = dict(options.__dict__)
        asked = Asked(
            kernel.fn.__module__,
            kernel.fn.__name__,
            tuple(signature.items()),
            tuple((names[place[0]], value) for place, value in constexprs.items()),
            frozenset(names[place[0]] for place, value in attrs.items() if value == DIVISIBLE),
            tuple((name, given[name]) for name in ("num_warps", "num_stages", "maxnreg")),
        )
        if asked not in seen:
            seen.add(asked)
            notes.append(Note(asked, dict(signature), dict(constexprs), dict(attrs), given))

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel.device_caches.clear()  # it may have compilations for another target
        return runs(kernel, *args, grid=grid, warmup=True, **options)

    driver.set_active(_NoDevice(target))
    JITFunction._do_compile, JITFunction.run = note, run
    try:
        yield notes
    finally:
        driver._active = before  # None before the first launch, and always on a CPU
        JITFunction._do_compile, JITFunction.run = compiles, runs


def of_variant(variant: Variant) -> Asked:
    """Return the compilation that a variant of a kernel file describes."""
    names = variant.kernel.arg_names
    return Asked(
        variant.kernel.fn.__module__,
        variant.kernel.fn.__name__,
        tuple((name, variant.signature.get(name, "constexpr")) for name in names),
        tuple((name, variant.constexprs[name]) for name in names if name in variant.constexprs),
        frozenset(variant.divisible),
        (("num_warps", variant.num_warps), ("num_stages", variant.num_stages), ("maxnreg", variant.max_registers)),
    )


# What is launched


@dataclass(frozen=True)
class Heads:
    """The sizes of a published model that the ops see: its heads and its vocabulary."""

    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int


PUBLISHED = {
    "qwen3-8b": Heads(32, 8, 128, 151_936),
    "qwen3-0.6b": Heads(16, 8, 128, 151_936),
    "qwen2.5-0.5b": Heads(14, 2, 64, 151_936),
    "llama-3.1-8b": Heads(32, 8, 128, 128_256),
    "llama-2-7b": Heads(32, 32, 128, 32_000),
    "gemma-2-2b": Heads(8, 4, 256, 256_000),
    "phi-2": Heads(32, 32, 80, 51_200),
    "gpt2": Heads(12, 12, 64, 50_257),
}
PAGE_SIZE = 16


def triton_ops() -> dict[str, Op]:
    """Return the ops that have a kernel."""
    return {name: op for name, op in all_ops().items() if "triton" in op.implementations}


def launcher(op: str) -> Callable[..., Any]:
    """Return an op's Triton launcher, even if it cannot run here."""
    module, name = all_ops()[op].implementations["triton"].split(":")
    return getattr(importlib.import_module(module), name)


def calls_on(shape: Heads, dtype: torch.dtype, rows: tuple[int, ...]) -> Iterator[tuple[str, Call]]:
    """Yield the calls of a model of this shape for a batch of sequences with ``rows`` rows each, by name."""
    num_rows, batch_size = sum(rows), len(rows)
    new = torch.empty(2, num_rows, shape.kv_heads, shape.head_dim, dtype=dtype)
    caches = torch.empty(2, batch_size + 1, PAGE_SIZE, shape.kv_heads, shape.head_dim, dtype=dtype)
    yield "append", partial(launcher("append_kv_"), *caches, *new, torch.zeros(num_rows, dtype=torch.int32))
    for name, context in (("attention", max(rows)), ("long_attention", 700)):  # the second one in two pieces
        sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "page_size": PAGE_SIZE}
        args = AttentionShape((context,) * batch_size, rows, **sizes).make(dtype, CPU)
        yield name, partial(launcher("paged_attention"), **args)
    logits, fed = torch.empty(num_rows, shape.vocab_size, dtype=dtype), torch.zeros(num_rows, dtype=torch.int64)
    starts = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    yield "greedy", partial(launcher("verify_chain"), logits, fed, starts)
    yield "sampled", partial(launcher("verify_chain"), logits, fed, starts, _sampling(batch_size))


def _sampling(batch_size: int) -> Sampling:
    numbers = torch.ones(batch_size, dtype=torch.float64)
    integers = torch.zeros(batch_size, dtype=torch.int64)
    return Sampling(
        temperatures=numbers, top_k=integers.int(), top_p=numbers, min_p=numbers, repetition_penalties=numbers,
        seeds=integers, positions=integers, seen_ids=integers, cu_seen=torch.zeros(batch_size + 1, dtype=torch.int32),
    )  # fmt: skip


def calls_of_cases(
    dtypes: Iterable[torch.dtype], benchmarks: bool, without: Container[str] = ()
) -> Iterator[tuple[str, Call]]:
    """Yield every case of every op, but of those of ``without``, and its call."""
    for dtype in dtypes:
        for name in (name for name in triton_ops() if name not in without):
            op = OP_CASES[name]
            for case in (*op.cases, *(op.benchmarks if benchmarks else ())):
                args = case.make(torch.Generator().manual_seed(0), dtype, CPU)
                yield f"{name} {case.name}", partial(launcher(name), **args)


def notes_of(calls: Iterable[tuple[str, Call]], target: GPUTarget) -> list[Note]:
    """Return the compilations that the calls request, each once."""
    with noted(target) as notes:
        for _, call in calls:
            call()
    return notes
