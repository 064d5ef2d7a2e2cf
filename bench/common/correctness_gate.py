"""The correctness gate of the benchmarks: an implementation is timed only if it agrees with the torch one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from bench.common import recurrences
from bench.common.references import (
    attention_in_float64,
    grouped_linear_in_float64,
    grouped_quantized_linear_in_float64,
    linear_in_float64,
    quantized_linear_in_float64,
)
from specdec_fast.ops import Op

BASELINE = "torch"  # the backend of the oracle, which runs anywhere
# For every op that is not exact: its definition in fp64, and the number of terms of its longest sum.
# For an op that also changes arguments within rounding: its result, and these arguments afterwards.
TRUTH: Mapping[str, Callable[..., Any]] = {
    "paged_attention": attention_in_float64,
    "linear": linear_in_float64,
    "quantized_linear": quantized_linear_in_float64,
    "grouped_linear": grouped_linear_in_float64,
    "grouped_quantized_linear": grouped_quantized_linear_in_float64,
    "conv_rows_": recurrences.conv_in_float64,
    "linear_attention_rows_": recurrences.linear_attention_in_float64,
    "selective_scan_rows_": recurrences.scan_in_float64,
}
LONGEST_SUM: Mapping[str, Callable[[dict[str, Any]], int]] = {
    "paged_attention": lambda args: args["batch"].max_seqlen_k,
    "linear": lambda args: args["rows"].shape[1],
    "quantized_linear": lambda args: args["rows"].shape[1],
    "grouped_linear": lambda args: args["rows"].shape[2],
    "grouped_quantized_linear": lambda args: args["rows"].shape[2],
    "conv_rows_": recurrences.conv_terms,
    "linear_attention_rows_": recurrences.linear_attention_terms,
    "selective_scan_rows_": recurrences.scan_terms,
}


@dataclass(frozen=True)
class Errors:
    """The errors of a result and of the baseline against fp64.

    Attributes:
        error: largest error of the result.
        baseline: largest error of the baseline.
        largest: largest value in fp64.
        eps: rounding unit of the result's dtype.

    """

    error: float
    baseline: float
    largest: float
    eps: float

    def allowed(self, walk: float = 0.0) -> float:
        """Return the allowed error: twice the baseline's, plus one rounding and ``walk``, relative to ``largest``."""
        return 2 * self.baseline + (self.eps + walk) * self.largest


def disagreement(op: Op, backend: str, make: Callable[[], dict[str, Any]]) -> str | None:
    """Run ``backend`` and the baseline on equal arguments; return how they differ, or None.

    Exact ops must agree bit by bit. Other ops may have twice the baseline's error against fp64, plus rounding: once to
    the result's dtype, and ``sqrt(n)`` times in fp32 for a sum of ``n`` terms, the expected size of ``n`` random
    roundings. A backend that sums one term after the other, so that a row's bits depend on nothing else, needs that
    allowance; PyTorch's own blocked sums do not.

    Args:
        op: the op.
        backend: the backend to check.
        make: makes the arguments; equal ones each time.

    """
    args, baseline_args = make(), make()
    got, baseline = op.load(backend)(**args), op.load(BASELINE)(**baseline_args)
    if not same_bits(exact_part(op, args), exact_part(op, baseline_args)):
        return "its arguments, changed in place, differ from those of the baseline"
    if op.exact:
        return None if same_bits(got, baseline) else "its results differ from those of the baseline"
    truth_args = make() if op.rounded else baseline_args
    found = errors(op, rounded_part(op, got, args), rounded_part(op, baseline, baseline_args), truth_args)
    return too_far(found, op, truth_args)


def exact_part(op: Op, args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that must have the same bits after every implementation."""
    return {name: value for name, value in args.items() if name not in op.rounded}


def rounded_part(op: Op, result: Tensor, args: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return what may differ within rounding: the result of an op that is not exact, and arguments that it changed."""
    return (result, *_tensors([args[name] for name in op.rounded]))


def too_far(found: Errors, op: Op, args: dict[str, Any]) -> str | None:
    """Return how an op's errors exceed what ``disagreement`` allows for these arguments, or None."""
    allowed = found.allowed(math.sqrt(LONGEST_SUM[op.name](args)) * torch.finfo(torch.float32).eps)
    return None if found.error <= allowed else f"its largest error is {found.error:.3g}; {allowed:.3g} are allowed"


def errors(op: Op, got: tuple[Tensor, ...], baseline: tuple[Tensor, ...], args: dict[str, Any]) -> Errors:
    """Compare the ``rounded_part`` of an implementation and of the baseline with the definition of the op in fp64.

    Returns:
        The errors of the tensor that exceeds most what is allowed, or is nearest to it.

    """
    found = []
    for truth, *results in zip(_tensors(TRUTH[op.name](**args)), got, baseline, strict=True):
        distances = (_largest(x.to(truth.device).double() - truth) for x in results)
        found.append(Errors(*distances, _largest(truth), torch.finfo(results[1].dtype).eps))
    return max(found, key=lambda one: math.inf if math.isnan(one.error) else one.error - one.allowed())


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in fields(value)])


def same_bits(first: Any, second: Any) -> bool:
    """Compare all tensors, on any devices, as bytes: a NaN equals itself, and the signs of zeros count."""
    pairs = zip(_tensors(first), _tensors(second), strict=True)
    return all(
        (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(_bytes(a), _bytes(b, a.device)) for a, b in pairs
    )


def _bytes(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    # a clone, because contiguous() keeps the strides of an empty tensor, which view() then refuses
    return tensor.to(device).clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
