"""exspec: a sliding window of sequences, and batches of equal lengths."""

from __future__ import annotations

from collections import defaultdict

from specdec_fast.request.sequence import Sequence
from specdec_fast.schedulers.base import Scheduler


class ExspecScheduler(Scheduler):
    """Keeps a window of sequences resident, steps up to a batch of them, and refills the window when a sequence ends.

    Sequences of equal length are stepped together, so that the attention work of a batch is balanced. No sequence is
    passed over more than ``max_wait_steps`` times in a row.
    """

    @property
    def max_resident(self) -> int:
        return self.window_size

    def num_to_admit(self, num_resident: int) -> int:
        return self.window_size - num_resident

    def select(self, resident: list[Sequence]) -> list[Sequence]:
        """Choose the due sequences, then the largest groups of equal length; equal groups by their longest wait."""
        by_wait = sorted(resident, key=lambda sequence: -sequence.passed_over)  # stable: ties keep their order
        num_due = self._num_due(by_wait)
        chosen = by_wait[:num_due]
        rest = by_wait[num_due:]
        groups: dict[int, list[Sequence]] = defaultdict(list)
        for sequence in rest:
            groups[sequence.length].append(sequence)
        for group in sorted(groups.values(), key=lambda g: (-len(g), -g[0].passed_over)):
            chosen += group[: self.max_batch_size - len(chosen)]
        return chosen

    def _num_due(self, by_wait: list[Sequence]) -> int:
        """Return how many sequences, longest waiting first, must take part now so that none waits too long.

        The next j steps after this one can serve ``j * max_batch_size`` sequences. If more sequences than these may be
        passed over at most j more times, the excess is due now. The window has at most
        ``max_batch_size * (max_wait_steps + 1)`` sequences (EngineConfig), so at most a batch is due.
        """
        due = 0
        for rank, sequence in enumerate(by_wait, start=1):
            may_wait = self.max_wait_steps - sequence.passed_over
            due = max(due, rank - self.max_batch_size * may_wait)
        return due
