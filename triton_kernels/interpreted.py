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
    if any(operand.data.dtype not in (np.float16, np.float32) for operand in (left, right)):
        return _OTHER_DOT(self, left, right, sums, *precision)
    if left.data.ndim == 3:  # a batch of products
        total = np.stack([_added(*each) for each in zip(left.data, right.data, sums.data, strict=True)])
    else:
        total = _added(left.data, right.data, sums.data)
    return TensorHandle(total, sums.dtype.scalar)


def _added(left: Any, right: Any, sums: Any) -> Any:
    # With contiguous operands and more than one column, einsum runs over the columns innermost, so that every output
    # is summed in the order of the products. Our tiles have 8 columns or more.
    rows, columns = (np.ascontiguousarray(operand, dtype=sums.dtype) for operand in (left, right))
    for k in range(0, rows.shape[1], _STEP):
        step = np.ascontiguousarray(rows[:, k : k + _STEP]), columns[k : k + _STEP]
        sums = np.einsum("mk,kn->mn", *step) + sums
    return sums
