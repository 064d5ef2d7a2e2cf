"""The kernel on tiles (AMX) adds in the order that is documented for TDPBF16PS, on portable arithmetic and on AMX."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from specdec_fast.ops import all_ops
from support.tile_arithmetic import by_the_manual, cancelling, one_chain

_C = pytest.importorskip("specdec_fast._C", reason="built without C++")
linear, grouped_linear = (all_ops()[name].load("cpp") for name in ("linear", "grouped_linear"))
PORTABLE = "amx-bf16-portable"
TILES = [version for version in (PORTABLE, "amx-bf16") if version in _C.linear_versions()]


@pytest.fixture(autouse=True, params=TILES)
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    _C.choose_linear_version(request.param)
    _C.choose_linear_transposed_version(request.param)
    yield
    _C.choose_linear_version(_C.linear_versions()[-1])
    _C.choose_linear_transposed_version(_C.linear_transposed_versions()[-1])


def linear_transposed(rows: Tensor, weight: Tensor) -> Tensor:
    """``linear`` with the weights stored as ``[in_features, out_features]``."""
    experts = torch.stack([weight.T, torch.full_like(weight.T, float("nan"))]).mT  # what lies behind must not be read
    return grouped_linear(rows[:, None], torch.zeros(len(rows), 1, dtype=torch.int64), experts, None)[:, 0]


# One row and one tile; tiles not full; two tiles of rows; several pairs of tiles. Slices of steps, between which sums
# wait in memory: long rows, two groups of outputs, the last not full; several blocks, and an odd last input. Many rows,
# so packed weights: in one group of steps, and in two.
@pytest.mark.parametrize(
    "shape",
    [
        (1, 32, 16),
        (3, 75, 5),
        (19, 64, 33),
        (40, 1100, 40),
        (3, 4128, 300),
        (150, 4101, 40),
        (257, 75, 40),
        (275, 2100, 33),
    ],
    ids=str,
)
def test_sums_are_those_of_the_manual(shape: tuple[int, int, int]) -> None:
    rows, weight = cancelling(*shape)
    expected = by_the_manual(rows, weight).bfloat16()
    assert torch.equal(linear(rows, weight), expected)
    assert not torch.equal(one_chain(rows, weight).bfloat16(), expected), "another order would not be noticed"


# One row; rows and outputs that fill no tile; several groups of outputs; two groups of steps, and an odd last input.
@pytest.mark.parametrize("shape", [(1, 32, 16), (3, 75, 5), (17, 96, 600), (40, 2101, 33)], ids=str)
def test_sums_of_transposed_weights_are_those_of_the_manual(shape: tuple[int, int, int]) -> None:
    rows, weight = cancelling(*shape)
    expected = by_the_manual(rows, weight).bfloat16()
    assert torch.equal(linear_transposed(rows, weight), expected)
    assert torch.equal(linear_transposed(rows, weight), linear(rows, weight)), "the layout of weights changes a bit"


@pytest.mark.parametrize("num_rows", [255, 257])
def test_more_threads_than_blocks_of_rows(num_rows: int) -> None:
    """A layer of few outputs gives every thread rows of its own; some threads then get none."""
    rows, weight = cancelling(num_rows, 64, 24)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = linear(rows, weight)
        torch.set_num_threads(24)
        assert torch.equal(linear(rows, weight), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("flushed", [lambda x: x * 2.0**-130, lambda x: x * 2.0**-70])
def test_subnormal_operands_and_results_are_zero(flushed: Callable[[Tensor], Tensor]) -> None:
    rows = flushed(torch.ones(2, 64)).bfloat16()
    weight = torch.full((3, 64), 1.0 if float(rows[0, 0]) < 2.0**-126 else 2.0**-70).bfloat16()
    assert float(rows[0, 0]) > 0
    assert (linear(rows, weight) == 0).all()


def test_portable_tiles_are_never_the_choice_of_a_machine() -> None:
    for versions in (_C.linear_versions(), _C.linear_transposed_versions()):
        assert PORTABLE in versions
        assert versions[-1] != PORTABLE
