"""Task "quantized" of ``bench.gpu``: linears and experts with quantised weights, against the device's own copy.

Every call is checked first, at its own size: it agrees with the oracle, a part of the rows has the bits that it has
among all, and a product of an expert those of ``quantized_linear``. A wrong one is not timed. Codes are drawn on the
device, because rounding weights of these sizes on a CPU takes longer than all the rest. "kernels" checks small cases
of these ops in all dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.common.correctness_gate import same_bits
from bench.common.device import free_memory, full_precision
from bench.common.packed_formats import FORMATS, drawn, unwritten
from bench.common.timing import Call
from bench.gpu_.isolated_tasks import Progress, Settings
from bench.gpu_.kernels import name_of, serving
from bench.gpu_.launches import launcher
from bench.gpu_.timings import Subject, backend_call, copy_bandwidth, time_one
from specdec_fast.ops import Op, all_ops
from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.quantization.packed_weight import PackedWeight, expert_of

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sizes:
    """The sizes of the task.

    Attributes:
        copy_bytes: bytes that a copy reads, and writes, to measure the bandwidth.
        dtype: of the rows.
        linear, experts: inputs and outputs.
        choices: experts of a row, and experts.
        rows: numbers of rows: plain decoding, a batch, a verification.
        kinds, kinds_of_experts: names of ``FORMATS``.

    """

    copy_bytes: int
    dtype: torch.dtype
    linear: tuple[int, int]
    experts: tuple[int, int]
    choices: tuple[int, int]
    rows: tuple[int, ...]
    kinds: tuple[str, ...]
    kinds_of_experts: tuple[str, ...]


# An MLP of Qwen3-8B; gate and up of a layer of Qwen3-30B-A3B.
FULL = Sizes(
    1 << 30, torch.bfloat16, (4096, 12_288), (2048, 1536), (8, 128), (1, 8, 48), tuple(FORMATS), ("int4", "int4-a8")
)
# Triton's interpreter multiplies bf16 matrices wrongly, so fp16.
SMOKE = Sizes(1 << 20, torch.float16, (64, 20), (32, 20), (2, 3), (1, 3), ("int4", "int8-a8"), ("int4",))


def run(settings: Settings, progress: Progress) -> None:
    """Measure the copy, then check and time all sizes relative to it."""
    full_precision()
    device = torch.device(settings.device)
    sizes = SMOKE if settings.smoke else FULL
    with torch.inference_mode():
        bandwidth = copy_bandwidth(sizes.copy_bytes, device)
        progress.note(copy_gigabytes_per_second=bandwidth / 1e9)
        for subject in subjects(sizes, device):
            progress.attempt(str(subject), partial(_check_and_time, subject, device, bandwidth, progress))
            free_memory(device)


def subjects(sizes: Sizes, device: torch.device) -> Iterator[Subject]:
    """Yield the ops on all kinds and numbers of rows, those of plain decoding first."""
    linear, grouped = (all_ops()[name] for name in ("quantized_linear", "grouped_quantized_linear"))
    for num_rows in sizes.rows:
        for kind in sizes.kinds:
            make = partial(_linear_args, sizes, kind, num_rows, device)
            yield Subject(linear, f"{kind}_{num_rows}", sizes.dtype, make)
        for kind in sizes.kinds_of_experts:
            make = partial(_expert_args, sizes, kind, num_rows, device)
            yield Subject(grouped, f"experts_{kind}_{num_rows}", sizes.dtype, make)


def calls() -> Iterator[tuple[str, Call]]:
    """Yield calls that launch all kernels of the task, on memory of a CPU that is not written."""
    for num_rows in FULL.rows:
        for kind in FULL.kinds:
            weight = unwritten(*FULL.linear, FORMATS[kind])
            rows = torch.empty(num_rows, FULL.linear[0], dtype=FULL.dtype)
            yield f"quantized_linear {kind}", partial(launcher("quantized_linear"), rows, weight)
        for kind in FULL.kinds_of_experts:
            weight = unwritten(*FULL.experts, FORMATS[kind], FULL.choices[1])
            rows = torch.empty(num_rows, 1, FULL.experts[0], dtype=FULL.dtype)
            ids = torch.zeros(num_rows, FULL.choices[0], dtype=torch.int64)
            yield f"grouped_quantized_linear {kind}", partial(launcher("grouped_quantized_linear"), rows, ids, weight)


def _linear_args(sizes: Sizes, kind: str, num_rows: int, device: torch.device) -> dict[str, Any]:
    weight = drawn(unwritten(*sizes.linear, FORMATS[kind]), device)
    return {"rows": _rows(num_rows, sizes.linear[0], sizes.dtype, device), "weight": weight, "bias": None}


def _expert_args(sizes: Sizes, kind: str, num_rows: int, device: torch.device) -> dict[str, Any]:
    num_choices, num_experts = sizes.choices
    weight = drawn(unwritten(*sizes.experts, FORMATS[kind], num_experts), device)
    scores = torch.rand(num_rows, num_experts, generator=torch.Generator().manual_seed(1))
    return {
        "rows": _rows(num_rows, sizes.experts[0], sizes.dtype, device)[:, None],
        "expert_ids": scores.topk(num_choices).indices.to(device),
        "weight": weight,
        "bias": None,
    }


def _rows(num_rows: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)


def _check_and_time(subject: Subject, device: torch.device, bandwidth: float, progress: Progress) -> None:
    args = subject.make()
    subject = Subject(subject.op, subject.case, subject.dtype, lambda: dict(args))  # the ops change no argument
    for backend in serving(subject.op, device):
        differences = _other_bits(subject.op, backend, args)
        if differences:
            progress.fail(f"{subject} on {backend}", f"{', '.join(differences)}; it is not timed")
            continue
        if INTERPRETING and backend == "triton":  # the speed of an interpreter means nothing
            _, wrong = backend_call(subject, backend)
            if wrong is not None:
                progress.fail(f"{subject} on {backend}", wrong)
            row = {"op": subject.op.name, "case": subject.case, "dtype": name_of(subject.dtype), "method": backend}
            progress.row(
                **row, **({"not_served": "an interpreter is not timed"} if wrong is None else {"wrong": wrong})
            )
            continue
        time_one(subject, backend, partial(backend_call, subject, backend), device, bandwidth, progress)


def _other_bits(op: Op, backend: str, args: dict[str, Any]) -> list[str]:
    """Return how rows computed in another way differ from those of the call."""
    function = op.load(backend)
    whole = function(**args)
    found = []
    per_row = {name: value for name, value in args.items() if name in ("rows", "expert_ids")}
    for name, part in (("the first row", slice(1)), ("the last half", slice(len(whole) // 2, None))):
        if not same_bits(function(**args | {name: value[part] for name, value in per_row.items()}), whole[part]):
            found.append(f"{name} has other bits alone")
    if "expert_ids" in args and not same_bits(_first_products(backend, **args), whole[0]):
        found.append("products have other bits than those of quantized_linear")
    return found


def _first_products(
    backend: str, rows: Tensor, expert_ids: Tensor, weight: PackedWeight, bias: Tensor | None
) -> Tensor:
    """Compute the products of the first row with a call for each of its experts."""
    linear: Callable[..., Tensor] = all_ops()["quantized_linear"].load(backend)
    return torch.cat([linear(rows[0], expert_of(weight, expert)) for expert in expert_ids[0].tolist()])
