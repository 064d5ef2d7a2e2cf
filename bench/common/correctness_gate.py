"""The correctness gate of the benchmarks: an implementation is timed only if it agrees with the torch one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from bench.common.references import attention_in_float64, grouped_linear_in_float64, linear_in_float64
from specdec_fast.ops import Op

BASELINE = "torch"  # the backend of the oracle, which runs anywhere
# For every op that is not exact: its definition in fp64, and the number of terms of its longest sum.
TRUTH: Mapping[str, Callable[..., Tensor]] = {
    "paged_attention": attention_in_float64,
    "linear": linear_in_float64,
    "grouped_linear": grouped_linear_in_float64,
}
LONGEST_SUM: Mapping[str, Callable[[dict[str, Any]], int]] = {
    "paged_attention": lambda args: args["batch"].max_seqlen_k,
    "linear": lambda args: args["rows"].shape[1],
    "grouped_linear": lambda args: args["rows"].shape[2],
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
    if not same_bits(args, baseline_args):
        return "its arguments, changed in place, differ from those of the baseline"
    if op.exact:
        return None if same_bits(got, baseline) else "its results differ from those of the baseline"
    return too_far(errors(op, got, baseline, baseline_args), op, baseline_args)


def too_far(found: Errors, op: Op, args: dict[str, Any]) -> str | None:
    """Return how an op's errors exceed what ``disagreement`` allows for these arguments, or None."""
    allowed = found.allowed(math.sqrt(LONGEST_SUM[op.name](args)) * torch.finfo(torch.float32).eps)
    return None if found.error <= allowed else f"its largest error is {found.error:.3g}; {allowed:.3g} are allowed"


def errors(op: Op, got: Tensor, baseline: Tensor, args: dict[str, Any]) -> Errors:
    """Compare a result and the baseline with the definition of the op in fp64."""
    truth = TRUTH[op.name](**args)
    distances = (_largest(x.to(truth.device).double() - truth) for x in (got, baseline))
    return Errors(*distances, _largest(truth), torch.finfo(baseline.dtype).eps)


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
