"""A drafter with KV entries of its own."""

from __future__ import annotations

from specdec_fast.batch.ragged_batch import RowPadding
from specdec_fast.drafters.base import Drafter
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool


class PooledDrafter(Drafter):
    """A drafter that keeps KV entries in a pool with as many pages as the target's; there is none before ``prepare``.

    ``row_padding`` has the row counts of its forwards; None: any.
    """

    def __init__(self, layout: KVLayout, row_padding: RowPadding | None = None) -> None:
        self._kv_layout = layout
        self._row_padding = row_padding
        self.pool: PagePool | None = None

    @property
    def bytes_per_token(self) -> int:
        return self._kv_layout.bytes_per_token

    def prepare(self, num_tokens: int, page_size: int) -> None:
        # Keep the present pool if it is large enough and no interrupted call left pages.
        if self.pool is None or not self.pool.is_vacant or self.pool.num_tokens < num_tokens:
            self.pool = None  # frees the old pool's memory before the new one is allocated
            self.pool = PagePool(self._kv_layout, num_tokens, page_size, self._row_padding)

    def grow(self, num_tokens: int) -> None:
        if self._pool().num_tokens < num_tokens:
            self.pool = self._pool().grown(num_tokens)

    def _pool(self) -> PagePool:
        if self.pool is None:
            raise RuntimeError("prepare() has not been called.")
        return self.pool
