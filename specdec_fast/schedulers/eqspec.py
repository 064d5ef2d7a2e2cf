"""eqspec: one fixed batch in lockstep."""

from __future__ import annotations

from specdec_fast.request.sequence import Sequence
from specdec_fast.schedulers.base import Scheduler


class EqspecScheduler(Scheduler):
    """Admits a batch, steps all its sequences until all have ended, then admits the next batch.

    A sequence leaves as soon as it ends, so late steps are smaller; no other sequence takes its place.
    """

    @property
    def max_resident(self) -> int:
        return self.max_batch_size

    def num_to_admit(self, num_resident: int) -> int:
        return 0 if num_resident else self.max_batch_size

    def select(self, resident: list[Sequence]) -> list[Sequence]:
        return list(resident)
