"""The kernel on tiles (AMX) adds in the order that is documented for TDPBF16PS, on portable arithmetic and on AMX."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from specdec_fast.ops import all_ops

_C = pytest.importorskip("specdec_fast._C", reason="built without C++")
linear = all_ops()["linear"].load("cpp")
PORTABLE = "amx-bf16-portable"
TILES = [version for version in (PORTABLE, "amx-bf16") if version in _C.linear_versions()]


@pytest.fixture(autouse=True, params=TILES)
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    _C.choose_linear_version(request.param)
    yield
    _C.choose_linear_version(_C.linear_versions()[-1])


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """One rounding to fp32: the product of two bf16 is exact in fp64."""
    return (a.double()[:, None] * b.double() + c.double()).float()


def by_the_manual(rows: Tensor, weight: Tensor) -> Tensor:
    """Chains of even and of odd inputs over 32 of them; their sum is added to the element."""
    total = torch.zeros(len(rows), len(weight))
    for first in range(0, rows.shape[1], 32):
        even, odd = torch.zeros_like(total), torch.zeros_like(total)
        for k in range(first, min(first + 32, rows.shape[1])):
            if k % 2 == 0:
                even = fma(rows[:, k], weight[:, k], even)
            else:
                odd = fma(rows[:, k], weight[:, k], odd)
        total = total + (even + odd)
    return total.bfloat16()


def one_chain(rows: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros(len(rows), len(weight))
    for k in range(rows.shape[1]):
        total = fma(rows[:, k], weight[:, k], total)
    return total.bfloat16()


def cancelling(num_rows: int, in_features: int, out_features: int) -> tuple[Tensor, Tensor]:
    """Rows and weights whose exact sums are zero, so that results are rounding, which depends on the order."""
    generator = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.randint(
        -8, 9, (num_rows, in_features), generator=generator
    )  # otherwise few sums would be rounded
    rows = (torch.randn(num_rows, in_features, generator=generator) * sizes).bfloat16()
    weight = torch.randn(out_features, in_features, generator=generator).bfloat16()
    half = in_features // 2
    order = torch.randperm(half, generator=generator)
    rows[:, half : 2 * half], weight[:, half : 2 * half] = rows[:, :half][:, order], -weight[:, :half][:, order]
    rows[:, 2 * half :] = 0
    return rows, weight


# One row and one tile; tiles not full; two tiles of rows; several pairs of tiles; many rows, so packed weights: in one
# group of steps, and in two, between which sums wait in memory.
@pytest.mark.parametrize(
    "shape", [(1, 32, 16), (3, 75, 5), (19, 64, 33), (40, 1100, 40), (257, 75, 40), (275, 2100, 33)], ids=str
)
def test_sums_are_those_of_the_manual(shape: tuple[int, int, int]) -> None:
    rows, weight = cancelling(*shape)
    expected = by_the_manual(rows, weight)
    assert torch.equal(linear(rows, weight), expected)
    assert not torch.equal(one_chain(rows, weight), expected), "another order would not be noticed"


@pytest.mark.parametrize("flushed", [lambda x: x * 2.0**-130, lambda x: x * 2.0**-70])
def test_subnormal_operands_and_results_are_zero(flushed: Callable[[Tensor], Tensor]) -> None:
    rows = flushed(torch.ones(2, 64)).bfloat16()
    weight = torch.full((3, 64), 1.0 if float(rows[0, 0]) < 2.0**-126 else 2.0**-70).bfloat16()
    assert float(rows[0, 0]) > 0
    assert (linear(rows, weight) == 0).all()


def test_portable_tiles_are_never_the_choice_of_a_machine() -> None:
    assert PORTABLE in _C.linear_versions()
    assert _C.linear_versions()[-1] != PORTABLE
