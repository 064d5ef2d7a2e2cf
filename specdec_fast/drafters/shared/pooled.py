"""What drafters with KV entries of their own share: a pool of pages beside the target's."""

from __future__ import annotations

from specdec_fast.batch.ragged_batch import RowPadding
from specdec_fast.drafters.base import Drafter
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.model_watch import Numbers


class PooledDrafter(Drafter):
    """A drafter that keeps KV entries in a pool with as many pages as the target's; there is none before ``prepare``.

    ``row_padding`` has the row counts of its forwards; None: any.
    """

    def __init__(self, layout: KVLayout, row_padding: RowPadding | None = None) -> None:
        self._kv_layout = layout
        self._row_padding = row_padding
        self._num_sequences = 0
        self._keeps_prefixes = False
        self._numbers: Numbers | None = None  # of the weights with which the kept entries were computed
        self.pool: PagePool | None = None

    @property
    def bytes_per_token(self) -> int:
        return self._kv_layout.bytes_per_token

    def bytes_per_sequence(self, most_draft_tokens: int) -> int:
        return self._kv_layout.bytes_per_sequence

    def expect_sequences(self, num_sequences: int) -> None:
        self._num_sequences = num_sequences

    def keep_prefixes(self) -> None:
        self._keeps_prefixes = True
        self.pool = None  # one that was made to measure times keeps none

    def forget_prefixes(self) -> None:
        if self.pool is not None:
            self.pool.forget_prefixes()

    def prepare(self, num_tokens: int, page_size: int) -> None:
        # Keep the present pool if it is large enough and no interrupted call left pages.
        pool = self.pool
        if pool is None or not pool.is_vacant or not pool.holds(num_tokens, self._num_sequences):
            pool = self.pool = None  # frees the old pool's memory before the new one is allocated
            self.pool = PagePool(self._kv_layout, num_tokens, page_size, self._row_padding, self._num_sequences)
            if self._keeps_prefixes:
                self.pool.keep_prefixes()
        if self._keeps_prefixes:
            numbers = Numbers(self.weights())
            if numbers != self._numbers:
                self.forget_prefixes()
            self._numbers = numbers

    def grow(self, num_tokens: int) -> None:
        if not self._pool().holds(num_tokens, self._num_sequences):
            self.pool = self._pool().grown(num_tokens, self._num_sequences)

    def _pool(self) -> PagePool:
        if self.pool is None:
            raise RuntimeError("prepare() has not been called.")
        return self.pool
