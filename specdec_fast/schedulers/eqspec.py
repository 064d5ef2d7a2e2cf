"""eqspec: one fixed batch in lockstep."""

from __future__ import annotations

from specdec_fast.request.sequence import Sequence
from specdec_fast.schedulers.base import Scheduler


class EqspecScheduler(Scheduler):
    """Takes a batch, runs all of it in every step until all have ended, then takes the next.

    Finished sequences drop out at once, so late steps are smaller; nobody takes their place.
    """

    @property
    def max_resident(self) -> int:
        """One batch."""
        return self.max_batch_size

    def num_to_admit(self, num_resident: int) -> int:
        """Return a whole batch when the last one has ended, else 0."""
        return 0 if num_resident else self.max_batch_size

    def select(self, resident: list[Sequence]) -> list[Sequence]:
        """Choose everybody."""
        return list(resident)
