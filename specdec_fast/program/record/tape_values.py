"""What a tape knows of a tensor: where its numbers are, or which integers of the batch they are."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

from specdec_fast.program.record.row_views import RowView


@dataclass(frozen=True)
class Index:
    """A tensor of integers of the batch, whatever its shape: one per row, plus ``added``."""

    kind: str  # "token_ids", "positions" or "logit_rows"
    added: int = 0


@dataclass(frozen=True)
class Preceding:
    """Integers of the batch: each row's position minus its number among the rows of the forward, plus ``added``.

    A cache returns them to a model that adds the numbers of the rows to the length of the cache.
    """

    added: int


@dataclass(frozen=True)
class Extent:
    """One integer computed from all rows of the batch, such as the largest position; a program knows only its bounds.

    Models ask whether a text is longer than some length. The answer is a constant if the bounds decide it.
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
class OfAllRows:
    """A tensor of choices of all rows, which only a loop over experts can use; see ``expert_loops.py``."""


Value = RowView | Index | Preceding | Extent | Complex | OfAllRows | Overwritten
