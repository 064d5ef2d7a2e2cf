"""The pages of a KV cache, and the pages and reservation of each owner.

A page holds ``page_size`` positions of every layer, whatever the layers' shapes. Page 0 is the scratch page: padding
rows may write to it, and no row reads it. Rejecting draft tokens does not change the pool: the length of the owner
falls, and later rows overwrite the stale entries (invariant I4).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RowPadding
from specdec_fast.errors import KVCacheAllocationError, KVCacheTooSmallError
from specdec_fast.kv_cache.layer_layout import KVLayout


class KVPages(NamedTuple):
    """The memory of a pool's pages, as a program takes it.

    Attributes:
        addresses: ``[num_layers, 2]`` int64 on the CPU, the addresses of every layer's keys and values.
        num_pages: number of pages, with the scratch page.
        page_size: positions per page.
        memory: the tensors behind the addresses; the references keep them alive.

    """

    addresses: Tensor
    num_pages: int
    page_size: int
    memory: tuple[Tensor, ...]


class PagePool:
    """Pages of one model's KV cache, allocated on demand and freed when their owner ends.

    An owner reserves pages for its largest length before it gets its first page, so a running sequence never finds
    the pool empty. A request that does not fit waits; a request that can never fit is refused.

    Attributes:
        layers: keys and values of every layer, each ``[num_pages + 1, page_size, num_kv_heads, its head size]``.
        tensors: the allocations that ``layers`` are views of, see ``KVLayout.allocate``. ``compact_kv_`` takes an
            allocation with two planes; a model of uniform layers has one such allocation.
        pages: the same memory, for a program.
        tables: ``[places, pages]`` int32 on the host, the block table of every owner. A place is the row of one owner
            in ``tables`` and ``slots``; place 0 has no owner, and all its pages are the scratch page.
        slots: ``[places, pages * page_size]`` int32 on the host, the slot of every position of every owner.

    """

    def __init__(
        self, layout: KVLayout, num_tokens: int, page_size: int, row_padding: RowPadding | None = None
    ) -> None:
        self.layout, self.row_padding = layout, row_padding or RowPadding()
        self.page_size = page_size
        self.num_pages = -(-num_tokens // page_size)  # without the scratch page
        try:
            self.tensors, self.layers = layout.allocate(self.num_pages + 1, page_size)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            needed = (self.num_pages + 1) * page_size * layout.bytes_per_token
            raise KVCacheAllocationError(
                f"a KV cache of {num_tokens} positions needs {needed / 2**30:.1f} GiB on {layout.device}, which cannot "
                "be allocated; set kv_cache_tokens, or lower max_new_tokens, max_batch_size or window_size."
            ) from error
        addresses = [[tensor.data_ptr() for tensor in pair] for pair in self.layers]
        on_host = torch.tensor(addresses, dtype=torch.int64, device="cpu").view(-1, 2)
        self.pages = KVPages(on_host, self.num_pages + 1, page_size, self.tensors)
        self._free = list(range(self.num_pages, 0, -1))
        self._pages_of: dict[Hashable, list[int]] = {}
        self._reserved: dict[Hashable, int] = {}
        self._num_reserved = 0
        # The layout of a forward indexes arrays that have one row, a place, per owner.
        self._places: dict[Hashable, int] = {}
        self._free_places: list[int] = []
        self._in_page = np.arange(page_size, dtype=np.int32)
        self.tables = np.zeros((1, 1), np.int32)
        self.slots = np.zeros((1, page_size), np.int32)
        self._make_place(1)

    @property
    def num_tokens(self) -> int:
        """The number of positions of all pages, without the scratch page."""
        return self.num_pages * self.page_size

    @property
    def num_free_pages(self) -> int:
        """The number of pages that no owner holds."""
        return len(self._free)

    @property
    def is_vacant(self) -> bool:
        """Whether no page or place is held or reserved. An interrupt may leave records that say otherwise."""
        is_free = not self._pages_of and not self._num_reserved and len(self._free) == self.num_pages
        return is_free and len(self._free_places) == len(self.tables) - 1  # place 0 has no owner

    def block_table(self, owner: Hashable) -> list[int]:
        """Return the pages of ``owner``, in order of position."""
        return self._pages_of[owner]

    def fits(self, num_tokens: int) -> bool:
        """Return whether a new owner can reserve pages for ``num_tokens`` positions now."""
        return self._num_reserved + self.num_pages_for(num_tokens) <= self.num_pages

    def reserve(self, owner: Hashable, num_tokens: int) -> None:
        """Reserve pages for up to ``num_tokens`` positions of a new owner, without allocating any.

        Raises:
            KVCacheTooSmallError: too few pages are unreserved; call ``fits`` first.

        """
        if owner in self._pages_of:
            raise ValueError(f"{owner!r} already holds pages; free it first.")
        pages = self.num_pages_for(num_tokens)
        if not self.fits(num_tokens):
            raise KVCacheTooSmallError(
                f"{num_tokens} KV positions need {pages} pages; {self.num_pages - self._num_reserved} of "
                f"{self.num_pages} are unreserved. Raise kv_cache_tokens, or lower max_new_tokens."
            )
        self._reserved[owner] = pages
        self._num_reserved += pages
        self._pages_of[owner] = []
        self._make_place(pages)
        self._places[owner] = place = self._free_places.pop()
        self.tables[place] = 0

    def free(self, owner: Hashable) -> None:
        """Free every page and the reservation of ``owner``."""
        self._free.extend(reversed(self._pages_of.pop(owner)))
        self._num_reserved -= self._reserved.pop(owner)
        self._free_places.append(self._places.pop(owner))

    def grown(self, num_tokens: int) -> PagePool:
        """Return a pool of ``num_tokens`` positions in which every owner holds the same pages, with their entries.

        The caller must not use this pool afterwards. Both pools need memory until the entries are copied.

        Raises:
            KVCacheAllocationError: there is no memory for the larger pool; this pool is unchanged.

        """
        pool = PagePool(self.layout, num_tokens, self.page_size, self.row_padding)
        for smaller, larger in zip(self.tensors, pool.tensors, strict=True):
            larger[:, :, : self.num_pages + 1] = smaller
        pool._free = [*range(pool.num_pages, self.num_pages, -1), *self._free]
        pool._pages_of, pool._reserved, pool._num_reserved = self._pages_of, self._reserved, self._num_reserved
        pool._places, pool._free_places = self._places, self._free_places
        pool.tables, pool.slots = self.tables, self.slots
        return pool

    def place(self, owner: Hashable) -> int:
        """Return the owner's row in ``tables`` and ``slots``."""
        return self._places[owner]

    def num_pages_for(self, num_tokens: int) -> int:
        """Return the number of pages for ``num_tokens`` positions."""
        return -(-num_tokens // self.page_size)

    def allocate(self, owner: Hashable, num_tokens: int) -> None:
        """Allocate the pages that ``owner`` lacks for its first ``num_tokens`` positions.

        Raises:
            KVCacheTooSmallError: the owner has reserved fewer pages.

        """
        pages = self._pages_of[owner]
        if num_tokens <= len(pages) * self.page_size:
            return
        needed, place = self.num_pages_for(num_tokens), self._places[owner]
        if needed > self._reserved[owner]:
            raise KVCacheTooSmallError(
                f"position {num_tokens - 1} lies beyond the {self._reserved[owner]} pages reserved."
            )
        while len(pages) < needed:
            page, start = self._free.pop(), len(pages) * self.page_size
            self.tables[place, len(pages)] = page
            self.slots[place, start : start + self.page_size] = page * self.page_size + self._in_page
            pages.append(page)

    def _make_place(self, num_pages: int) -> None:
        """Grow ``tables`` and ``slots`` until a place is free and every place holds ``num_pages``."""
        places, width = self.tables.shape
        more = 0 if self._free_places else max(8, places)
        wider = max(0, num_pages - width)
        self._free_places += range(places, places + more)
        if more or wider:
            self.tables = np.pad(self.tables, ((0, more), (0, wider)))
            self.slots = np.pad(self.slots, ((0, more), (0, wider * self.page_size)))
            self.slots[0] = np.arange(self.slots.shape[1]) % self.page_size
