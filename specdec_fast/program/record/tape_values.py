"""What a tape knows of a tensor: where its numbers are, or which integers of the batch they are."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specdec_fast.program.record.row_views import RowView

if TYPE_CHECKING:
    from specdec_fast.program.record.expert_loops import ExpertLoop


@dataclass(frozen=True)
class Index:
    """A tensor of integers of the batch, whatever its shape: one per row, plus ``added``."""

    kind: str  # "token_ids", "positions" or "logit_rows"
    added: int = 0


@dataclass(frozen=True)
class Extent:
    """One integer computed from all rows of the batch, of which a program knows only the bounds.

    The largest position is one. Models ask whether a text is longer than some length. The answer is a constant if the
    bounds decide it.
    """

    least: int
    most: int

    def shifted(self, by: int) -> Extent:
        """Return the bounds of the sum with a number."""
        return replace(self, least=self.least + by, most=self.most + by)

    def is_decided(self, code: str, number: float) -> bool:
        """Return whether a comparison with a number (``"lt"``, ``"ge"``, ...) has one result within the bounds."""
        compare = getattr(operator, code)
        is_between = code in ("eq", "ne") and self.least < number < self.most
        return not is_between and compare(self.least, number) == compare(self.most, number)


@dataclass(frozen=True)
class Complex:
    """Complex numbers: ``parts`` has the real and the imaginary ones along one more axis, the last."""

    parts: RowView


@dataclass(frozen=True)
class Overwritten:
    """A tensor whose numbers were changed in place through another tensor of the same memory."""


@dataclass(frozen=True, eq=False)
class OfLoop:
    """A tensor by which a loop over experts finds the rows of each of them; see ``expert_loops.py``.

    Attributes:
        kind: "one_hot"; "counts" and "chosen", per expert; "mask" of an expert's rows; their "rows" and "choices"; or
            the "sums" of the experts visited so far.
        loop: the loop.
        axes: what the axes of "one_hot" and "mask" are: "rows", "choices", "experts".
        expert: that of a mask, rows and choices.
        target: the value to which the sums are added.

    """

    kind: str
    loop: ExpertLoop
    axes: tuple[str, ...] = ()
    expert: int = 0
    target: RowView | None = None

    def with_axes(self, axes: tuple[str, ...]) -> OfLoop:
        """Return the same with axes in another order."""
        return replace(self, axes=axes)


Value = RowView | Index | Extent | Complex | OfLoop | Overwritten
