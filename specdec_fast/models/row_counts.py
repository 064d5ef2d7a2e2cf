"""Row counts at which one of PyTorch's linears adds in the same order, whatever a row's place.

A library chooses another order of summation for another number of rows or threads, or another shape. So rows are
computed in chunks of a few sizes, which are the same in every engine. To find sizes with the same order, the code runs
exactly these sizes on numbers that expose the order. One row at a time always has one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# From few rows, below which padding costs too much, to so many that reading the weights costs nothing.
_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256)
_LARGE_WEIGHT = 1 << 25  # numbers of a weight that takes long to try on a CPU
_MOST_OF_LARGE = 64  # most rows tried with it
_EXPECTED = (1, 6, 8, 48, 512)  # rows of the forwards for which sizes are chosen
_CALL = 8  # rows that are computed in the time that reading the weights takes
_ALIGNMENT = 64  # bytes; libraries choose kernels by it
_DISTINCT = 256  # outputs with different weights; the others repeat them

Function = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _addmm(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)


# From rows [n, in], weight and bias to [n, out]. The weight is [out, in] for "linear" and [in, out] for "addmm".
FUNCTIONS: dict[str, Function] = {"linear": functional.linear, "addmm": _addmm}


class Kind(NamedTuple):
    """Everything on which an order of summation may depend, except the number of rows."""

    function: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # bytes from the last aligned address to the weight
    dtype: torch.dtype
    device: torch.device
    has_bias: bool
    threads: int


_found: dict[Kind, tuple[int, ...]] = {}


def kind_of(function: str, weight: Tensor, bias: Tensor | None) -> Kind:
    """Return the kind of a linear with this ``weight``, at the current number of threads."""
    return Kind(
        function=function,
        shape=weight.shape,
        stride=weight.stride(),
        offset=weight.data_ptr() % _ALIGNMENT,
        dtype=weight.dtype,
        device=weight.device,
        has_bias=bias is not None,
        threads=torch.get_num_threads(),
    )


def sizes_of(kind: Kind) -> tuple[int, ...]:
    """Return rising sizes of chunks in which a linear of this kind gives a row the same bits at every place.

    The first call for a kind tries sizes; the result is the same for all engines of the process.
    """
    if kind not in _found:
        _found[kind] = _sizes(kind)
    return _found[kind]


def is_aligned(rows: Tensor) -> bool:
    """Return whether the address of ``rows`` has the alignment of the rows that were tried."""
    return rows.data_ptr() % _ALIGNMENT == 0


@lru_cache(maxsize=4096)
def chunks(sizes: tuple[int, ...], num_rows: int) -> tuple[int, ...]:
    """Return the cheapest chunks of ``sizes`` for ``num_rows`` rows, larger ones first."""
    whole = max(0, num_rows // sizes[-1] - 1)
    left = num_rows - whole * sizes[-1]
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())]  # by number of rows: cost, chunks
    for count in range(1, left + 1):
        costs = (
            (best[max(0, count - size)][0] + size + _CALL, (*best[max(0, count - size)][1], size)) for size in sizes
        )
        best.append(min(costs))
    return (sizes[-1],) * whole + tuple(sorted(best[left][1], reverse=True))


@torch.inference_mode()
def _sizes(kind: Kind) -> tuple[int, ...]:
    function = FUNCTIONS[kind.function]
    counts = _counts(kind)
    inputs, weight, bias = revealing(kind, counts[-1])
    classes: list[tuple[Tensor, list[int]]] = []  # outputs of the largest size so far, and the sizes with the same bits
    for count in counts:
        rows = inputs[:count].clone()
        out = function(rows, weight, bias)
        # Every row, one place earlier: if all neighbouring places give the same bits, all places do.
        shifted = function(rows.roll(-1, 0), weight, bias).roll(1, 0)
        if not torch.equal(out, shifted):
            continue
        for i, (known, members) in enumerate(classes):
            if torch.equal(known, out[: len(known)]):
                classes[i] = (out, [*members, count])
                break
        else:
            classes.append((out, [count]))
    return min((tuple(members) for _, members in classes), key=_cost)


def _counts(kind: Kind) -> tuple[int, ...]:
    numbers = kind.shape[0] * kind.shape[1]
    is_slow = kind.device.type == "cpu" and numbers > _LARGE_WEIGHT
    return tuple(count for count in _COUNTS if not is_slow or count <= _MOST_OF_LARGE)


def _cost(sizes: Sequence[int]) -> float:
    held = ((chunks(tuple(sizes), count), count) for count in _EXPECTED)
    return sum((sum(parts) + _CALL * len(parts)) / (count + _CALL) for parts, count in held)


def revealing(kind: Kind, num_rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows ``[num_rows, in]``, a weight and a bias of ``kind`` whose products cancel in every output.

    Every product has its negative at another place, which differs between outputs, and magnitudes differ by factors of
    thousands. The exact sum is 0, so the result is the rounding errors of the partial sums, which depend on the order.
    """
    in_features, out_features = kind.shape[::-1] if kind.function == "linear" else kind.shape
    generator = torch.Generator(device="cpu").manual_seed(0)
    half = in_features // 2
    num_distinct = min(out_features, _DISTINCT)
    shape = (num_distinct, half)
    most = 8 if kind.dtype == torch.float16 else 16
    rows = torch.randn(num_rows, 1, generator=generator, device="cpu").to(kind.dtype).repeat(1, in_features)
    numbers = torch.randn(shape, generator=generator, device="cpu")
    numbers *= 2.0 ** torch.randint(-most // 2, most + 1, shape, generator=generator, device="cpu")
    order = torch.rand(num_distinct, 2 * half, generator=generator, device="cpu").argsort(dim=1)
    distinct = torch.cat([numbers, -numbers], dim=1).gather(1, order)
    distinct = functional.pad(distinct, (0, in_features - 2 * half)).to(kind.dtype)
    weights = distinct.repeat(-(-out_features // len(distinct)), 1)[:out_features]
    weight = _like(kind)
    weight.copy_(weights if kind.function == "linear" else weights.T)
    bias = torch.zeros(out_features, dtype=kind.dtype, device=kind.device) if kind.has_bias else None
    return rows.to(kind.device), weight, bias


def _like(kind: Kind) -> Tensor:
    size = 1 + sum((count - 1) * step for count, step in zip(kind.shape, kind.stride, strict=True))
    room = torch.empty(size + _ALIGNMENT // kind.dtype.itemsize, dtype=kind.dtype, device=kind.device)
    return room.as_strided(kind.shape, kind.stride, kind.offset // kind.dtype.itemsize)
