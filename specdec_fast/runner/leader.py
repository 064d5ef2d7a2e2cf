"""Rank 0 of a target that ``tp_size`` shards: it sends the other ranks what it computes, so that they compute it too.

An engine has one process that schedules, drafts, accepts and serves. What reads or writes the target's weights or KV
entries passes through here: forwards, and what pools do with their memory. The processes of the other ranks
(``follower.py``) repeat it on their own parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, finalize

from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.errors import RankError, SpecDecError
from specdec_fast.kv_cache.layer_layout import PoolCopies
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ranks.exchange import ABORTED
from specdec_fast.ranks.messages import (
    ComputeForward,
    CopyPages,
    DropPools,
    MakePool,
    MoveEntries,
    Restart,
    packed,
)
from specdec_fast.ranks.workers import Workers
from specdec_fast.torch_threads import number_of_threads


class Leader(PoolCopies):
    """Repeats what rank 0 computes in the other ranks. One thread at a time may call.

    Args:
        workers: the processes of the other ranks, which have loaded the target.
        num_threads: of every rank's forwards.

    """

    def __init__(self, workers: Workers, num_threads: int) -> None:
        self.workers = workers
        self._num_threads = num_threads
        self._numbers: WeakKeyDictionary[PagePool, int] = WeakKeyDictionary()
        self._next_number = count()
        self._dropped: list[int] = []  # numbers of pools that have been freed; the collector may append at any time
        finalize(self, workers.close)

    def compute(
        self,
        forward: Callable[..., Tensor],
        batch: RaggedBatch,
        pool: PagePool,
        logit_rows: Tensor | None,
        hidden_states: Tensor | None,
    ) -> Tensor:
        """Compute a batch by ``forward`` here, and in the other ranks; the other arguments are those of ``forward``.

        Raises:
            RankError: another rank has ended.
            Exception: what failed in this rank or in another one. All ranks can compute the next forward then.

        """
        message = ComputeForward(
            pool=self._numbers[pool],
            rows=packed(batch, logit_rows),
            num_slots=0 if pool.states is None else pool.states.num_slots,
            num_growths=0 if pool.states is None else pool.states.num_growths,
            has_taps=hidden_states is not None,
        )
        result: Tensor = self.together(message, partial(forward, batch, pool, logit_rows, hidden_states))
        return result

    def together(self, message: Any, compute: Callable[[], Any]) -> Any:
        """Return what ``compute`` returns; it exchanges numbers with the other ranks, which do what a message says.

        Raises as ``compute`` does.
        """
        try:
            self._send(message)
            with number_of_threads(self._num_threads):
                return compute()
        except BaseException as error:
            failure = self._restarted(error)
            if failure is error:
                raise
            raise failure from error

    def allocate(self, pool: PagePool) -> None:
        number = next(self._next_number)
        message = MakePool(
            pool=number,
            num_tokens=pool.num_tokens,
            page_size=pool.page_size,
            row_padding=pool.row_padding,
            has_states=bool(pool.layout.states),
            most_draft_tokens=pool.layout.most_draft_tokens,
        )
        self._send(message)
        for rank, failure in enumerate(self.workers.answers(), start=1):
            if failure is not None:
                self._dropped.append(number)
                raise RuntimeError(f"rank {rank}: {failure.text}")
        self._numbers[pool] = number
        finalize(pool, self._dropped.append, number)

    def copy(self, source: PagePool, destination: PagePool) -> None:
        self._send(CopyPages(self._numbers[source], self._numbers[destination]))

    def compact(self, pool: PagePool, table: Tensor, moves: Sequence[Tensor]) -> None:
        self._send(MoveEntries(self._numbers[pool], table.cpu().numpy(), [move.cpu().numpy() for move in moves]))

    def _send(self, message: Any) -> None:
        if self._dropped:
            dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
            self.workers.send(DropPools(dropped))
        self.workers.send(message)

    def _restarted(self, error: BaseException) -> BaseException:
        """Let all ranks forget what has failed in one of them; return the error to raise."""
        ranks = self.workers.ranks
        if self.workers.failure is not None:
            return self.workers.failure
        if ranks is None or ranks.native is None:  # nothing interrupts ranks that wait for each other
            if isinstance(error, Exception):
                return self.workers.reason_of(error)
            self.workers.fail(RankError("a forward of the target was interrupted; make a new Engine."))
            return error
        try:
            self.workers.abort()
            self.workers.send(Restart())
            answers = self.workers.answers()
        except RankError as ended:
            return ended
        ranks.native.restart()
        is_own = isinstance(error, SpecDecError) and ABORTED not in str(error)  # of the model: the others raise it too
        can_follow = isinstance(error, Exception) and not is_own
        for rank, failure in enumerate(answers, start=1):
            if can_follow and failure is not None and not failure.was_aborted:
                return (MemoryError if failure.is_memory else RankError)(f"rank {rank} of the target: {failure.text}")
        return error
