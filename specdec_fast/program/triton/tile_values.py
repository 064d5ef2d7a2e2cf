"""Triton code for numbers of several rows at once, within the kernel of a linear (``linear_kernel.py``).

The expressions are those of ``row_values.Values``. What is one number of a row there is ``[rows, 1]`` here, and a
vector is ``[rows, part]``: the kernel has a part of one axis, or the whole axis to sum over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec_fast.program.plan.ir import REDUCTIONS, Append, RowOp
from specdec_fast.program.triton.row_code import Expression, NotEmittableError, Pointers
from specdec_fast.program.triton.row_index import Axis, Place, padded
from specdec_fast.program.triton.row_values import FUNCTIONS, Values

ELEMENTWISE = frozenset(FUNCTIONS)
WITH_STATISTICS = ELEMENTWISE | {*REDUCTIONS, "softmax", "layer_norm"}
# Of the largest tiles a thread has 64 outputs, or 32 of each of two matrices. There polynomials need more registers
# than are left: tanh of 64 outputs, as in a soft cap, spills.
OF_OUTPUTS = ELEMENTWISE - {"tanh", "gelu_tanh", "sin", "cos", "log", "log1p", "expm1"}
OF_TWO_OUTPUTS = OF_OUTPUTS | {"tanh", "gelu_tanh"}


@dataclass(frozen=True)
class TileNames:
    """What the kernel calls the numbers of a tile."""

    row: str  # the rows, [rows, 1]
    row_mask: str  # which of them there are
    part: str  # the numbers of the axis, [1, part]
    part_mask: str  # which of them there are; empty: all


class TileValues(Values):
    """The code for numbers of a tile; ``steps``, ``pointers`` and ``row_sizes`` as those of ``RowCode``.

    ``axis`` is the only axis, ``names`` those of the tile. ``registers`` names what the kernel has computed, each
    ``[rows, part]``, by buffer and by their offset in its row.
    """

    def __init__(
        self,
        steps: Sequence[RowOp | Append],
        pointers: Pointers,
        row_sizes: dict[int, int],
        axis: Axis,
        names: TileNames,
        registers: Mapping[tuple[int, int], str] | None = None,
    ) -> None:
        super().__init__(steps, pointers, row_sizes)
        self.only_axis = axis
        self.names = names
        self._registers = registers or {}
        self.loaded: set[int] = set()  # buffers that the code reads from memory
        self.share(axis)

    def axis(self, axis: Axis, among: tuple[Axis, ...]) -> str:
        if axis is not self.only_axis:
            raise NotEmittableError(-1, "a number depends on an axis that the tile does not have")
        return self.names.part

    def load(self, source: int | Tensor, place: Place) -> Expression:
        """Return numbers in memory, or those that the kernel has computed, as fp32."""
        if isinstance(source, int) and any(source == buffer for buffer, _ in self._registers):
            name = self._registers.get((source, place.constant))
            if name is None or place.terms != ((self.only_axis, 1),):
                raise NotEmittableError(-1, "a linear's outputs are read in another order")
            return Expression(name, (self.only_axis,))
        if isinstance(source, int):
            self.loaded.add(source)
            return self.load_rows(source, place)
        return self.load_constant(source, place)

    def load_constant(self, source: Tensor, place: Place) -> Expression:
        """Return numbers of a constant."""
        index = self.index(place)
        mask = self.names.part_mask if index.axes else ""
        return self.masked(f"{self.pointers.name(source)} + ({index.text})", mask, index.axes)

    def load_rows(self, buffer: int, place: Place) -> Expression:
        """Return numbers of a buffer's rows."""
        index = self.index(place)
        mask = self.names.row_mask
        if index.axes and self.names.part_mask:
            mask = f"{mask} & {self.names.part_mask}"
        base = f"{self.pointers.name(buffer)} + {self.names.row} * {self.row_sizes[buffer]}"
        return self.masked(f"{base} + ({index.text})", mask, index.axes)

    def masked(self, address: str, mask: str, axes: tuple[Axis, ...]) -> Expression:
        """Add a line that loads numbers."""
        masked = f", mask={mask}, other=0.0" if mask else ""
        return self.line(f"tl.load({address}{masked}).to(tl.float32)", axes)


class WholeRows(TileValues):
    """The code for statistics of whole rows: each sum has the order that the row's own kernel gives it.

    ``pieces`` are the arguments ``SIZE`` to ``OF_THREADS`` of ``linear_parts.load_rows``.
    """

    prefix = "w"

    def __init__(
        self,
        steps: Sequence[RowOp | Append],
        pointers: Pointers,
        row_sizes: dict[int, int],
        axis: Axis,
        names: TileNames,
        pieces: tuple[int, int, int, int],
    ) -> None:
        super().__init__(steps, pointers, row_sizes, axis, names)
        self._pieces = ", ".join(map(str, pieces))

    def load_rows(self, buffer: int, place: Place) -> Expression:
        if not place.axes:
            return super().load_rows(buffer, place)
        if place.terms != ((self.only_axis, 1),):
            raise NotEmittableError(-1, "the numbers of a row do not lie next to each other")
        row_at = f"{self.names.row} * {self.row_sizes[buffer]}"
        pointer = f"{self.pointers.name(buffer)} + {place.constant}" if place.constant else self.pointers.name(buffer)
        return self.line(
            f"load_rows({pointer}, {row_at}, {self.names.row_mask}, {self._pieces}, WARP_SIZE)", (self.only_axis,)
        )

    def over(self, axis: Axis, how: str, value: Expression, axes: tuple[Axis, ...]) -> Expression:
        if value.axes != (self.only_axis,):
            raise NotEmittableError(-1, "a sum over numbers that repeat")
        text = value.text
        if axis.size % padded(axis):
            lowest = "0.0" if how == "sum" else 'float("-inf")'
            text = f"tl.where({self.names.part} < {axis.size}, {text}, {lowest})"
        return self.line(f"tl.{how}({text}, axis=1, keep_dims=True)")


class WithStatistics(TileValues):
    """The code for numbers of a tile that depend on statistics of their rows, which ``whole`` computes.

    ``collected`` is what ``whole`` calls each statistic, by the name that this code gives it.
    """

    prefix = "y"

    def __init__(self, whole: WholeRows, names: TileNames) -> None:
        super().__init__(whole.steps, whole.pointers, whole.row_sizes, whole.only_axis, names)
        self._whole = whole
        self.collected: dict[str, str] = {}

    def load_constant(self, source: Tensor, place: Place) -> Expression:
        """Load them for every row: of one row a thread would have two bytes at most, which no compiler loads ahead."""
        if not place.axes:
            return super().load_constant(source, place)
        index = self.index(place)
        address = f"tl.broadcast_to({self.pointers.name(source)} + ({index.text}), [BLOCK_ROWS, BLOCK_IN])"
        return self.masked(address, f"{self.names.row_mask} & {self.names.part_mask}", index.axes)

    def statistics(self, number: int, step: RowOp, outer: Sequence[Place]) -> list[Expression]:
        if any(place.axes for place in outer):
            raise NotEmittableError(number, "statistics of a part of a row")
        expressions = []
        for value in self._whole.statistics(number, step, outer):
            name = next((name for name, known in self.collected.items() if known == value.text), None)
            if name is None:
                name = f"s{len(self.collected)}"
                self.collected[name] = value.text
            expressions.append(Expression(name))
        self.loaded |= self._whole.loaded
        return expressions
