"""The instructions for complex numbers, with which some rotary embeddings turn pairs: their parts are neighbours."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_fast.program.record import lower_math, lower_views
from specdec_fast.program.record.lowering_table import Handler, Lowerings
from specdec_fast.program.record.row_views import NotLowerableError, RowView
from specdec_fast.program.record.tape import Tape
from specdec_fast.program.record.tape_values import Complex

LOWERED = Lowerings()


@LOWERED.entry("view_as_complex.default")
def _view_as_complex(tape: Tape, result: Tensor, source: Tensor) -> None:
    tape.bind(result, Complex(tape.row_view(source)))


@LOWERED.entry("view_as_real.default")
def _view_as_real(tape: Tape, result: Tensor, source: Tensor) -> None:
    tape.bind(result, _parts(tape, source))


@LOWERED.entry("polar.default")
def _polar(tape: Tape, result: Tensor, radius: Tensor, angle: Tensor) -> None:
    radii = tape.row_view(radius)
    angles = tape.row_view(angle)
    out = _fresh(tape, result, angles)
    for part, code in enumerate(("cos", "sin")):
        unit = tape.fresh(angles.domain, angles.axis, angles.sizes, torch.float32)
        tape.row_op(code, [angles], unit)
        tape.row_op("mul", [radii, unit], out.without(-1, part))
    tape.bind(result, Complex(out))


def _product(tape: Tape, result: Tensor, left: Any, right: Any, *, otherwise: Handler) -> None:
    """Lower a product if a factor is complex: ``(a c - b d, a d + b c)``, every product and sum rounded."""
    factors = [each for each in (left, right) if isinstance(tape.value(each), Complex)]
    if not factors:
        otherwise(tape, result, left, right)
        return
    parts = _parts(tape, factors[0])
    out = _fresh(tape, result, parts.without(-1, 0))
    if len(factors) == 1:
        other = right if factors[0] is left else left
        if isinstance(other, (Tensor, complex)):
            raise NotLowerableError("a complex number times a tensor of others")
        tape.row_op("mul", [parts, float(other)], out)
    else:
        a, b, c, d = (view.without(-1, part) for view in (parts, _parts(tape, right)) for part in (0, 1))
        products = [(a, c), (b, d), (a, d), (b, c)]
        whole = out.without(-1, 0)
        each = [tape.fresh(whole.domain, whole.axis, whole.sizes, torch.float32) for _ in products]
        for pair, product in zip(products, each, strict=True):
            tape.row_op("mul", list(pair), product)
        tape.row_op("sub", [each[0], each[1]], out.without(-1, 0))
        tape.row_op("add", [each[2], each[3]], out.without(-1, 1))
    tape.bind(result, Complex(out))


LOWERED |= {name: partial(_product, otherwise=lower_math.LOWERED[name]) for name in ("mul.Tensor", "mul.Scalar")}


def _shaped(tape: Tape, result: Tensor, source: Tensor, *args: Any, otherwise: Handler, **kwargs: Any) -> Any:
    value = tape.value(source)
    if isinstance(value, Complex):
        tape.bind(result, Complex(tape.reshaped(value.parts, (*result.shape, 2))))
        return result
    return otherwise(tape, result, source, *args, **kwargs)


LOWERED |= {
    name: partial(_shaped, otherwise=lower_views.LOWERED[name])
    for name in ("view.default", "reshape.default", "unsqueeze.default", "squeeze.dim", "flatten.using_ints")
}


def _parts(tape: Tape, tensor: Tensor) -> RowView:
    value = tape.value(tensor)
    if not isinstance(value, Complex):
        raise NotLowerableError("complex numbers that are no rows")
    return value.parts


def _fresh(tape: Tape, result: Tensor, source: RowView) -> RowView:
    """Return a view of a new buffer for the parts of complex numbers, in the shape of ``result`` and one axis more."""
    if result.dtype != torch.complex64:
        raise NotLowerableError(f"numbers of {result.dtype}")
    axis = source.axis + result.dim() - len(source.sizes)
    sizes = tuple(1 if d == axis else size for d, size in enumerate(result.shape))
    return tape.fresh(source.domain, axis, (*sizes, 2), torch.float32)
