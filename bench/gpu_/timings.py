"""Task "timings" of ``bench.gpu``: every op against the device's own copy, and attention against FlashAttention.

There are two times per call. *microseconds* is the device's time with no argument in its cache
(``device.cold_seconds``). It is that of a graph's replay, so that launches by the host are no part of it; *as_graph*
says whether the call could be recorded. *call_microseconds* is the time of one of many calls launched from Python in a
row on the same arguments, as in an engine that launches op by op. It is the longer one if launching takes longer than
the work. Wrong results are not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.common.attention_shapes import AttentionShape
from bench.common.correctness_gate import BASELINE, disagreement, errors, too_far
from bench.common.device import as_graph, cold_seconds, free_memory, full_precision
from bench.common.references import prepare_reference
from bench.common.timing import Call, Clock
from bench.gpu_.flash_references import FLASH_REFERENCES
from bench.gpu_.isolated_tasks import Progress, Settings, described
from bench.gpu_.kernels import make_case, name_of, serving
from bench.op_cases import OP_CASES
from specdec_fast.errors import BackendError
from specdec_fast.ops import Op, all_ops
from specdec_fast.ops.registry import INTERPRETING

SEED = 0
# Linears beside those that the op declares, in bf16: features, outputs, rows. They are the layers of Qwen3-8B and
# Qwen3-0.6B: gate and up, down, queries and o.
_MANY = (1, 8, 48, 192, 256, 1024)
LAYERS = (
    (4096, 12_288, (192,)),
    (12_288, 4096, _MANY),
    (4096, 4096, _MANY),
    (1024, 3072, (192,)),
    (3072, 1024, _MANY),
    (2048, 1024, _MANY),
)
HAS_PART = ("quantized_linear", "grouped_quantized_linear")  # ops that the part "quantized" times


@dataclass(frozen=True)
class Sizes:
    """The sizes of the timings.

    Attributes:
        copy_bytes: bytes that a copy reads, and writes, to measure the bandwidth.
        declared: whether to time the ops' own benchmarks.
        batch_sizes, contexts: sizes of the attention of a verification.
        prompts: tokens of a prompt whose attention is timed.
        page_sizes: positions per page, of each of these.
        rows: rows per sequence, K + 1.
        layer: heads, KV heads and head size.

    """

    copy_bytes: int
    declared: bool
    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    page_sizes: tuple[int, ...]
    rows: int
    layer: dict[str, int]


FULL = Sizes(
    copy_bytes=1 << 30,
    declared=True,
    batch_sizes=(8, 32),
    contexts=(1024, 4096, 16384),
    prompts=(512, 2048, 4096),
    page_sizes=(16, 64),
    rows=6,
    layer={"heads": 32, "kv_heads": 8, "head_dim": 128},
)
SMOKE = Sizes(1 << 20, False, (2,), (40,), (40,), (16,), 3, {"heads": 4, "kv_heads": 2, "head_dim": 16})


@dataclass(frozen=True)
class Subject:
    """One op on one set of arguments."""

    op: Op
    case: str
    dtype: torch.dtype
    make: Callable[[], dict[str, Any]]

    def __str__(self) -> str:
        return f"{self.op.name} {self.case} {name_of(self.dtype)}"


def run(settings: Settings, progress: Progress) -> None:
    """Measure the copy, then all ops relative to it."""
    full_precision()
    device, sizes = torch.device(settings.device), SMOKE if settings.smoke else FULL
    with torch.inference_mode():
        bandwidth = copy_bandwidth(sizes.copy_bytes, device)
        progress.note(copy_gigabytes_per_second=bandwidth / 1e9)
        for subject in subjects(sizes, device):
            progress.attempt(str(subject), partial(_time_all, subject, device, bandwidth, progress))
            free_memory(device)


def copy_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Return bytes read and written per second by a plain copy of random numbers."""
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return 2 * num_bytes / cold_seconds(lambda: destination.copy_(source), device)


def subjects(sizes: Sizes, device: torch.device) -> Iterator[Subject]:
    """Yield attention as in serving, then the ops' own benchmarks: in bf16, and in fp32 if they are not exact."""
    for name, contexts, rows in _attention_sizes(sizes):
        for page_size in sizes.page_sizes:
            shape = AttentionShape(contexts, rows, page_size=page_size, **sizes.layer)
            make = partial(shape.make, torch.bfloat16, device, SEED)
            yield Subject(all_ops()["paged_attention"], f"{name}_page{page_size}", torch.bfloat16, make)
    for op in all_ops().values() if sizes.declared else ():
        if op.name in HAS_PART:
            continue
        for case in OP_CASES[op.name].benchmarks:
            for dtype in (torch.bfloat16,) if op.exact else (torch.bfloat16, torch.float32):
                yield Subject(op, case.name, dtype, partial(make_case, case, dtype, SEED, device))
    for in_features, out_features, counts in LAYERS if sizes.declared else ():
        for count in counts:
            name = f"linear_{in_features}x{out_features}_{count}"
            make = partial(_layer, count, in_features, out_features, device)
            yield Subject(all_ops()["linear"], name, torch.bfloat16, make)


def _layer(num_rows: int, in_features: int, out_features: int, device: torch.device) -> dict[str, Any]:
    """Draw rows and weights on the device, which is faster than to copy them there."""
    generator = torch.Generator(device).manual_seed(SEED)
    draw = partial(torch.randn, generator=generator, dtype=torch.bfloat16, device=device)
    return {"rows": draw(num_rows, in_features), "weight": draw(out_features, in_features) / in_features**0.5}


def _attention_sizes(sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield names, contexts and rows of verifications and of whole prompts."""
    for batch_size in sizes.batch_sizes:
        for context in sizes.contexts:
            yield f"verify_{batch_size}x{context}", (context,) * batch_size, (sizes.rows,) * batch_size
    for tokens in sizes.prompts:
        yield f"prompt_{tokens}", (tokens,), (tokens,)


def _time_all(subject: Subject, device: torch.device, bandwidth: float, progress: Progress) -> None:
    """Check and time the oracle, every backend and every reference; one row each, whatever the result."""
    subject = replace(
        subject, make=partial(deepcopy, subject.make())
    )  # making random arguments takes longer than all the rest
    for backend in (BASELINE, *serving(subject.op, device)):
        if INTERPRETING and backend == "triton":
            continue  # the speed of an interpreter means nothing
        make_call = partial(backend_call, subject, backend)
        time_one(subject, backend, make_call, device, bandwidth, progress)
    for name, make_call in _references(subject).items():
        time_one(subject, name, make_call, device, bandwidth, progress, is_reference=True)


def backend_call(subject: Subject, backend: str) -> tuple[Call, str | None]:
    """Return the call of a backend, and how its result is wrong, or None."""
    wrong = disagreement(subject.op, backend, subject.make) if backend != BASELINE else None
    return partial(subject.op.load(backend, check=False), **subject.make()), wrong


def _references(subject: Subject) -> dict[str, Callable[[], tuple[Call, str | None]]]:
    """Return the references by name: the plain PyTorch of ``bench.ops``, and FlashAttention for attention."""
    plain = list(prepare_reference(subject.op.name, subject.make()))
    makers: dict[str, Callable[[], tuple[Call, str | None]]] = {}
    for name in plain:  # tests show that these do the same work; here they return other layouts
        makers[name] = lambda name=name: (prepare_reference(subject.op.name, subject.make())[name], None)
    if subject.op.name == "paged_attention":
        makers |= {name: partial(_flash_call, subject, name) for name in FLASH_REFERENCES}
    return makers


def _flash_call(subject: Subject, name: str) -> tuple[Call, str | None]:
    args = subject.make()
    call = FLASH_REFERENCES[name](**args)
    result: Tensor = call()
    baseline = subject.op.load(BASELINE)(**args)
    return call, too_far(errors(subject.op, (result,), (baseline,), args), subject.op, args)


def time_one(
    subject: Subject,
    method: str,
    make_call: Callable[[], tuple[Call, str | None]],
    device: torch.device,
    bandwidth: float,
    progress: Progress,
    *,
    is_reference: bool = False,
) -> None:
    """Add a row, without a time if the result is wrong or the call fails, which is a failure for own backends only."""
    row = {"op": subject.op.name, "case": subject.case, "dtype": name_of(subject.dtype), "method": method}
    try:
        call, wrong = make_call()
        if wrong is None:
            row |= _figures(call, subject, device, bandwidth)
    except Exception as error:
        if is_reference or isinstance(error, BackendError):
            progress.row(**row, not_served=described(error))
            return
        wrong = described(error)
    if wrong is not None and not is_reference:
        progress.fail(f"{subject} on {method}", f"{wrong}; it is not timed")
    progress.row(**row, **({} if wrong is None else {"wrong": wrong}))


def _figures(call: Call, subject: Subject, device: torch.device, bandwidth: float) -> dict[str, Any]:
    replay = as_graph(call, device)
    seconds = cold_seconds(replay or call, device)
    clock = Clock(device)
    in_a_row = clock.seconds(call, clock.calls_per_sample(call))
    num_bytes = OP_CASES[subject.op.name].bytes_moved(**subject.make())
    return {
        "microseconds": 1e6 * seconds,
        "as_graph": replay is not None,
        "call_microseconds": 1e6 * in_a_row,
        "bytes_moved": num_bytes,
        "gigabytes_per_second": num_bytes / seconds / 1e9,
        "share_of_copy": num_bytes / seconds / bandwidth,
    }
