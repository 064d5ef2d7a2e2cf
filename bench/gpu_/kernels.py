"""Task "kernels" of ``bench.gpu``: every op on every backend of the device against the oracle, and rows alone.

The oracle runs on the CPU, so that no GPU code checks itself. Outputs are initialised with NaN and absurd integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.common.attention_shapes import AttentionShape, part_of, repeated
from bench.common.correctness_gate import (
    BASELINE,
    Errors,
    errors,
    exact_part,
    rounded_part,
    same_bits,
    too_far,
)
from bench.common.device import full_precision, poisoned, synchronize
from bench.gpu_.isolated_tasks import Progress, Settings, described
from bench.op_cases import OP_CASES, Case, with_tensors
from specdec_fast.errors import BackendError
from specdec_fast.ops import BACKENDS, Op, all_ops
from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.quantization.rounding import ROUNDINGS, rounded

CPU = torch.device("cpu")
INDEPENDENT = (
    "cpp",
    "triton",
)  # backends of paged_attention that promise that a row's bits depend on its context alone


@dataclass(frozen=True)
class Sizes:
    """The sizes of the checks.

    Attributes:
        dtypes: all dtypes that the kernels serve, or some.
        seeds: seeds of every case.
        cases_per_op: number of cases per op; None: all.
        verify: rows of a verification, over contexts of several pieces.
        prefill: rows of prompts.
        copies: number of copies of the same sequences in a batch, so that it has enough tiles not to be split.
        runs: number of repetitions of one call, which must have the same bits.
        linear: features and outputs of a matrix.

    """

    dtypes: tuple[torch.dtype, ...]
    seeds: int
    cases_per_op: int | None
    verify: AttentionShape
    prefill: AttentionShape
    copies: int
    runs: int
    linear: tuple[int, int]


FULL = Sizes(
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
    seeds=3,
    cases_per_op=None,
    verify=AttentionShape(
        (517, 1300, 512, 2049, 9), (6,) * 5
    ),  # pieces of 512, whose ends lie within the rows or at the end of a context
    prefill=AttentionShape((1300, 70), (1300, 70)),
    copies=16,
    runs=10,
    linear=(4096, 6144),
)
SMOKE = Sizes(
    dtypes=(torch.float32,),
    seeds=1,
    cases_per_op=2,
    verify=AttentionShape((514, 20), (3, 3), heads=2, kv_heads=1, head_dim=16),
    prefill=AttentionShape((60, 5), (9, 5), heads=2, kv_heads=1, head_dim=16),
    copies=2,
    runs=2,
    linear=(80, 33),
)


def run(settings: Settings, progress: Progress) -> None:
    """Check all cases of the registry, then attention and linear on parts of a batch."""
    full_precision()
    device, sizes = torch.device(settings.device), SMOKE if settings.smoke else FULL
    for op in all_ops().values():
        for backend in backends_on(op, device):
            reason = op.why_unavailable(backend)
            if reason is not None:
                progress.row(op=op.name, backend=backend, not_served=reason)
                if not BACKENDS[backend].partial:  # the engine would have used a backend that has all ops
                    progress.fail(f"{op.name} on {backend}", reason)
                continue
            for dtype in sizes.dtypes:
                what = f"{op.name} on {backend} in {name_of(dtype)}"
                progress.attempt(what, partial(_sweep, op, backend, dtype, device, sizes, progress))
    attention = all_ops()["paged_attention"]
    for backend in (b for b in serving(attention, device) if b in INDEPENDENT):
        for dtype in sizes.dtypes:
            if not _misinterprets(attention, backend, dtype):
                what = f"independent rows on {backend} in {name_of(dtype)}"
                progress.attempt(what, partial(_check_rows, attention, backend, dtype, device, sizes, progress))
    linear = all_ops()["linear"]
    for backend in serving(linear, device):
        for dtype in sizes.dtypes:
            if not _misinterprets(linear, backend, dtype):
                what = f"linear on {backend} in {name_of(dtype)}"
                progress.attempt(what, partial(_check_linear, linear, backend, dtype, device, sizes, progress))
                if backend == "triton":
                    joint = partial(_check_linears, dtype, device, sizes, progress)
                    progress.attempt(f"linears on triton in {name_of(dtype)}", joint)
    _check_all_quantized(device, sizes, progress)


def _check_all_quantized(device: torch.device, sizes: Sizes, progress: Progress) -> None:
    op = all_ops()["quantized_linear"]
    for backend in serving(op, device):
        for dtype in sizes.dtypes:
            if not _misinterprets(op, backend, dtype):
                for kind in ("int4", "int8-a8"):
                    what = f"quantized_linear of {kind} on {backend} in {name_of(dtype)}"
                    check = partial(_check_quantized, op, backend, kind, dtype, device, sizes, progress)
                    progress.attempt(what, check)


def backends_on(op: Op, device: torch.device) -> Iterator[str]:
    """Yield the backends of an op for ``device``, except the oracle's own."""
    for backend in op.implementations:
        if backend != BASELINE and device.type in BACKENDS[backend].device_types:
            yield backend


def serving(op: Op, device: torch.device) -> list[str]:
    """Return those of ``backends_on`` that can run here."""
    return [backend for backend in backends_on(op, device) if op.why_unavailable(backend) is None]


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _misinterprets(op: Op, backend: str, dtype: torch.dtype) -> bool:
    """Return whether Triton's interpreter would be wrong: it multiplies bf16 matrices wrongly."""
    return INTERPRETING and backend == "triton" and not op.exact and dtype == torch.bfloat16


def _sweep(op: Op, backend: str, dtype: torch.dtype, device: torch.device, sizes: Sizes, progress: Progress) -> None:
    """Compare all cases of one op, backend and dtype; record one row, and a failure for every wrong case."""
    not_served: dict[str, str] = {}
    num_checks, num_wrong, closest = 0, 0, 0.0
    for case in OP_CASES[op.name].cases[: sizes.cases_per_op]:
        for seed in range(sizes.seeds):
            try:
                if _misinterprets(op, backend, dtype):
                    raise BackendError("Triton's interpreter multiplies bf16 matrices wrongly")
                wrong, found = compare(op, backend, partial(make_case, case, dtype, seed), device)
            except BackendError as error:  # a limit that the backend itself reports
                not_served[case.name] = str(error)
                break
            except Exception as error:
                wrong, found = described(error), None
            num_checks += 1
            num_wrong += wrong is not None
            if found is not None and found.allowed() > 0:
                closest = max(closest, found.error / found.allowed())
            if wrong is not None:
                what = f"{op.name} {case.name} on {backend} in {name_of(dtype)}, seed {seed}"
                progress.fail(what, wrong, **({} if found is None else vars(found)))
    progress.row(
        op=op.name,
        backend=backend,
        dtype=name_of(dtype),
        checks=num_checks,
        wrong=num_wrong,
        largest_error_over_allowed=None if op.exact else closest,
        not_served=not_served,
    )


def make_case(case: Case, dtype: torch.dtype, seed: int, device: torch.device) -> dict[str, Any]:
    """Make a case's arguments; the same ones for the same seed, on any device."""
    return case.make(torch.Generator().manual_seed(seed), dtype, device)


def compare(
    op: Op, backend: str, make: Callable[[torch.device], dict[str, Any]], device: torch.device
) -> tuple[str | None, Errors | None]:
    """Run a backend on ``device`` and the oracle on the CPU, on equal arguments.

    Returns:
        How they differ, or None; and the errors of an op that is not exact. These may be twice the oracle's own against
        fp64, plus one rounding of the result. That is stricter than the gate of timings, whose contexts are far longer.

    """
    args, oracle_args = make(device), make(CPU)
    implementation = op.load(backend)
    with poisoned():
        got = implementation(**args)
        synchronize(device)
    oracle = op.load(BASELINE)(**oracle_args)
    if not same_bits(exact_part(op, oracle_args), exact_part(op, args)):
        return "its arguments, changed in place, differ from those of the oracle", None
    if op.exact:
        return (None if same_bits(oracle, got) else "its results differ from those of the oracle"), None
    if (got.dtype, got.shape) != (oracle.dtype, oracle.shape):
        return f"it returns {got.dtype} {list(got.shape)}; expected {oracle.dtype} {list(oracle.shape)}", None
    results = rounded_part(op, got, args), rounded_part(op, oracle, oracle_args)
    found = errors(op, *results, make(CPU) if op.rounded else oracle_args)
    if found.error <= found.allowed():  # False for a NaN
        return None, found
    return f"its largest error is {found.error:.3g}; {found.allowed():.3g} are allowed", found


def _check_rows(
    op: Op, backend: str, dtype: torch.dtype, device: torch.device, sizes: Sizes, progress: Progress
) -> None:
    """Check the values of long contexts, and that calls on parts and on repetitions of a batch change no bit."""
    attention = op.load(backend)
    for name, shape in (("verify", sizes.verify), ("prefill", sizes.prefill)):
        try:
            args = shape.make(dtype, device)
            whole = attention(**args)
            wrong = too_far(errors(op, (whole,), (op.load(BASELINE)(**args),), args), op, args)
            checks = {
                "run_to_run": [same_bits(attention(**args), whole) for _ in range(sizes.runs)],
                "parts": [same_bits(attention(**part), whole[rows]) for part, rows in parts_of(args, shape)],
                "in_larger_batch": _same_when_repeated(attention, args, whole, sizes.copies),
            }
        except Exception as error:
            progress.fail(f"independent rows, {name} on {backend} in {name_of(dtype)}", described(error))
            continue
        if wrong is not None:
            progress.fail(f"values of {name} over long contexts on {backend} in {name_of(dtype)}", wrong)
        for check, same in checks.items():
            what = f"{check} of {name} on {backend} in {name_of(dtype)}"
            progress.row(check=what, checks=len(same), wrong=same.count(False))
            if not all(same):
                progress.fail(what, f"{same.count(False)} of {len(same)} calls have other bits")


def _check_linear(
    op: Op, backend: str, dtype: torch.dtype, device: torch.device, sizes: Sizes, progress: Progress
) -> None:
    """Count calls on some rows, from either end, whose outputs have other bits than the call on all rows."""
    generator, (in_features, out_features) = torch.Generator().manual_seed(0), sizes.linear
    rows = torch.randn(600, in_features, generator=generator).to(dtype).to(device)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype).to(device)
    counts = (1, 3, 8, 15, 16, 17, 32, 33, 48, 64, 65, 128, 129, 512)  # tiles of all sizes
    _compare_counts(f"rows of linear on {backend} in {name_of(dtype)}", op, backend, rows, weight, counts, progress)


def _check_quantized(
    op: Op, backend: str, kind: str, dtype: torch.dtype, device: torch.device, sizes: Sizes, progress: Progress
) -> None:
    """As ``_check_linear``, of a rounded weight."""
    generator, (in_features, out_features) = torch.Generator().manual_seed(0), sizes.linear
    rows = torch.randn(70, in_features, generator=generator).to(dtype).to(device)
    packed = rounded(torch.randn(out_features, in_features, generator=generator), ROUNDINGS[kind])
    weight = with_tensors(packed, lambda _, tensor: tensor.to(device))
    what = f"rows of quantized_linear of {kind} on {backend} in {name_of(dtype)}"
    _compare_counts(what, op, backend, rows, weight, (1, 8, 9, 17, 64), progress)


def _compare_counts(
    what: str, op: Op, backend: str, rows: Tensor, weight: Any, counts: tuple[int, ...], progress: Progress
) -> None:
    try:
        linear = op.load(backend)
        whole, same = linear(rows, weight), []
        for count in counts:
            same += [same_bits(linear(rows[:count], weight), whole[:count])]
            same += [same_bits(linear(rows[-count:], weight), whole[-count:])]
    except Exception as error:
        progress.fail(what, described(error))
        return
    progress.row(check=what, checks=len(same), wrong=same.count(False))
    if not all(same):
        progress.fail(what, f"{same.count(False)} of {len(same)} calls have other bits")


def parts_of_weight(weight: Tensor) -> tuple[Tensor, ...]:
    """Return three matrices, as those of queries, keys and values; one has more rows than the others."""
    few = len(weight) // 6
    return weight.split([len(weight) - 2 * few, few, few])


def _check_linears(dtype: torch.dtype, device: torch.device, sizes: Sizes, progress: Progress) -> None:
    """Compare three matrices in one launch with a launch for each of them, at several numbers of rows."""
    from specdec_fast.triton_kernels.linear import linear, linears

    generator, (in_features, out_features) = torch.Generator().manual_seed(0), sizes.linear
    rows = torch.randn(65, in_features, generator=generator).to(dtype).to(device)
    whole = torch.randn(out_features, in_features, generator=generator).to(dtype).to(device)
    parts = parts_of_weight(whole)
    what = f"linears on triton in {name_of(dtype)}"
    same = [
        all(same_bits(out, linear(rows[:n], part)) for out, part in zip(linears(rows[:n], parts), parts, strict=True))
        for n in (1, 16, 17, 64, 65)
    ]
    progress.row(check=what, checks=len(same), wrong=same.count(False))
    if not all(same):
        progress.fail(what, f"{same.count(False)} of {len(same)} calls have other bits than a launch for each matrix")


def parts_of(args: dict[str, Any], shape: AttentionShape) -> Iterator[tuple[dict[str, Any], slice]]:
    """Yield every sequence alone: the whole sequence, and parts whose ends are likely places of an error.

    Plain decoding computes single rows; a verification or a prefill computes the whole.
    """
    for sequence, (context, count) in enumerate(zip(shape.contexts, shape.rows, strict=True)):
        yield part_of(args, sequence, 0, count)
        at_edges = {edge - (context - count) + by for edge in range(0, context + 1, 256) for by in (-1, 0, 1)}
        firsts = sorted(first for first in {*range(6), *at_edges, count - 1} if 0 <= first < count)
        for first in firsts:
            yield part_of(args, sequence, first, 1)
        for first in firsts[::4]:
            yield part_of(args, sequence, first, 6)
            yield part_of(args, sequence, first, 256)


def _same_when_repeated(
    attention: Callable[..., Tensor], args: dict[str, Any], whole: Tensor, copies: int
) -> list[bool]:
    return [same_bits(part, whole) for part in attention(**repeated(args, copies)).split(len(whole))]
