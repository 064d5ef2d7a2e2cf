"""Forwards that run out of memory: how they are recognised, and how many rows the next ones may have."""

from __future__ import annotations

from collections.abc import Collection

from specdec_fast.errors import RequestMemoryError
from specdec_fast.freed_memory import is_out_of_memory
from specdec_fast.request.sequence import Sequence

_STEPS = 64  # after which twice as many rows are tried


def memory_error(error: BaseException) -> RequestMemoryError:
    """Return the error of a request that ran out of memory alone."""
    reason = RequestMemoryError(
        f"there is not enough memory to serve this request, even alone and one row at a time: {error}; free memory, "
        "lower kv_cache_tokens, or lower the request's max_new_tokens."
    )
    # Without its traceback, whose frames keep the tensors of the failed forward.
    reason.__cause__ = error.with_traceback(None)
    return reason


class RowLimit:
    """The largest number of rows of a forward: no limit, until one has run out of memory.

    Each failure halves the number of rows. After some steps without a failure it is doubled, until it reaches the
    number with which the first forward failed. Bits do not depend on the number of rows, so no output does.

    Attributes:
        most: the limit; None if there is none.
        num_rows: of the present forward.

    """

    def __init__(self) -> None:
        self.most: int | None = None
        self.num_rows = 0
        self._failed_rows = self._num_steps = 0

    def recover(self, error: Exception, batch: Collection[Sequence]) -> bool:
        """Let the next forward have half of the rows of one that ran out of memory.

        KV entries beyond the committed tokens are rewritten (I4), but a drafter may have counted tokens that were not
        verified, or not all that were committed, so the caller withdraws the sequences from it.

        Args:
            error: the exception of the forward.
            batch: its sequences; empty if the exception came from elsewhere.

        Returns:
            False if the forward had one row.

        Raises:
            Exception: ``error``, if it says something else.

        """
        if not batch or not is_out_of_memory(error):
            raise error
        if self.num_rows <= 1:
            return False
        self._failed_rows = max(self._failed_rows, self.num_rows)
        self.most = self.num_rows // 2
        self._num_steps = 0
        return True

    def passed(self) -> None:
        """Count a step that did not run out of memory."""
        if self.most is None:
            return
        self._num_steps += 1
        if self._num_steps == _STEPS:
            self.most = 2 * self.most
            self._num_steps = 0
            if self.most >= self._failed_rows:
                self.most = None
                self._failed_rows = 0

    def fit(self, batch: list[Sequence], limits: list[int]) -> tuple[list[Sequence], list[int]]:
        """Return the first sequences of a step by their turns, and their numbers of draft tokens, within the limit.

        The scheduler counts a sequence that is left out as served, so under a limit a sequence may be passed over more
        than ``max_wait_steps`` times in a row: until the limit is raised, or the sequences before it have ended.
        """
        if self.most is None:
            return batch, limits
        left = self.most
        kept = {}
        for sequence, limit in sorted(zip(batch, limits, strict=True), key=lambda pair: pair[0].turn):
            if left:
                kept[sequence] = min(limit, left - 1)
                left -= kept[sequence] + 1
        return list(kept), list(kept.values())
