"""``tl.dot`` in Triton's interpreter adds in one order, whatever BLAS library NumPy uses."""

from __future__ import annotations

import pytest
import torch

from specdec_fast.ops.registry import INTERPRETING

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402 (after the check that there is a Triton)

from specdec_fast import triton_kernels  # noqa: E402, F401 (importing it chooses the order)

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="a GPU's tl.dot is its own")


@triton.jit
def _product(
    left, right, out, ROWS: tl.constexpr, LENGTH: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr
):
    rows, steps, columns = tl.arange(0, ROWS), tl.arange(0, LENGTH), tl.arange(0, COLUMNS)
    if TRANSPOSED:
        factors = tl.load(right + columns[:, None] * LENGTH + steps[None]).T
    else:
        factors = tl.load(right + steps[:, None] * COLUMNS + columns[None])
    found = tl.dot(tl.load(left + rows[:, None] * LENGTH + steps[None]), factors, input_precision="ieee")
    tl.store(out + rows[:, None] * COLUMNS + columns[None], found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "length", "columns"), [(16, 16, 16), (32, 64, 16), (16, 128, 64)])
def test_sums_of_16_products_are_added_one_by_one(rows, length, columns, transposed, dtype):
    generator = torch.Generator().manual_seed(rows + length + columns)
    left = torch.randn(rows, length, generator=generator).to(dtype)
    right = torch.randn(length, columns, generator=generator).to(dtype)
    out = torch.empty(rows, columns)
    stored = right.T.contiguous() if transposed else right
    _product[(1,)](left, stored, out, rows, length, columns, transposed)
    expected = torch.zeros(rows, columns)
    for first in range(0, length, 16):
        expected += sum(left[:, step, None].float() * right[step].float() for step in range(first, first + 16))
    assert torch.equal(out, expected)
