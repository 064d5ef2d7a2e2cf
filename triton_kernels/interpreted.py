"""``tl.dot`` in Triton's interpreter, with one order of summation on every machine.

The interpreter multiplies tiles with ``numpy.matmul``, that is with a BLAS library. On some processors (an AMD EPYC
of the Zen 5 generation, for example) the kernels of that library give a row other bits when its place in the tile or
the number of rows changes. No GPU does that. A kernel whose rows are independent would then seem dependent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_OTHER_DOT = InterpreterBuilder.create_dot
_STEP = 16  # products; so a sum is the same in tiles of other widths, as on a GPU


def install() -> None:
    """Make the interpreter add sums of 16 products to every output, from the first to the last, as tensor cores do."""
    InterpreterBuilder.create_dot = _dot


def _dot(self: InterpreterBuilder, left: Any, right: Any, sums: Any, *precision: Any) -> TensorHandle:
    operands = (left.data, right.data)
    if any(operand.ndim != 2 or operand.dtype not in (np.float16, np.float32) for operand in operands):
        return _OTHER_DOT(self, left, right, sums, *precision)
    # With contiguous operands and more than one column, einsum runs over the columns innermost, so that every output
    # is summed in the order of the products. tl.dot has 16 columns or more.
    rows, columns = (np.ascontiguousarray(operand, dtype=sums.data.dtype) for operand in operands)
    total = sums.data
    for k in range(0, rows.shape[1], _STEP):
        step = np.ascontiguousarray(rows[:, k : k + _STEP]), columns[k : k + _STEP]
        total = np.einsum("mk,kn->mn", *step) + total
    return TensorHandle(total, sums.dtype.scalar)
