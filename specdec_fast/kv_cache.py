"""The paged KV cache: a pool of pages, block tables, and how the rows of a forward are laid out on them.

A page holds ``page_size`` positions of every layer, whatever the layers' shapes. Page 0 is scratch: padding rows may
write there and nobody reads it. Rejecting draft tokens never touches the pool: the owner of the pages just counts fewer
positions as its own, and the stale entries are overwritten (invariant I4).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specdec_fast.errors import KVCacheAllocationError, KVCacheTooSmallError
from specdec_fast.kv_layout import KVLayout
from specdec_fast.rows import KVPages, RaggedBatch, RowRule, Rows, Spans, row_layout
from specdec_fast.transfers import to_device


class PagePool:
    """Pages of one model's KV cache, handed out on demand and taken back when their owner ends.

    An owner reserves what it may come to need before it gets its first page, so a running sequence never finds
    the pool empty: whoever does not fit waits, or is told that it never will.

    Attributes:
        layers: keys and values of every layer, each ``[num_pages + 1, page_size, num_kv_heads, its head size]``.
        tensors: the allocations of which they are views, see ``KVLayout.allocate``. One with two planes, as every
            model of uniform layers has it, is what ``compact_kv_`` takes.
        pages: the same for a program.

    """

    def __init__(self, layout: KVLayout, num_tokens: int, page_size: int, row_rule: RowRule | None = None) -> None:
        self.layout, self.row_rule = layout, row_rule or RowRule()
        self.page_size = page_size
        self.num_pages = -(-num_tokens // page_size)  # page 0, the scratch page, comes on top
        try:
            self.tensors, self.layers = layout.allocate(self.num_pages + 1, page_size)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            needed = (self.num_pages + 1) * page_size * layout.bytes_per_token
            raise KVCacheAllocationError(
                f"a KV cache of {num_tokens} positions needs {needed / 2**30:.1f} GiB on {layout.device}, which is not "
                "to be had; set kv_cache_tokens, or lower max_new_tokens, max_batch_size or window_size."
            ) from error
        addresses = [[tensor.data_ptr() for tensor in pair] for pair in self.layers]
        on_host = torch.tensor(addresses, dtype=torch.int64, device="cpu").view(-1, 2)
        self.pages = KVPages(on_host, self.num_pages + 1, page_size, self.tensors)
        self._free = list(range(self.num_pages, 0, -1))
        self._tables: dict[Hashable, list[int]] = {}
        self._reserved: dict[Hashable, int] = {}
        self._num_reserved = 0
        # The tables again, and the slot of every position, as arrays with one place per owner: a forward is laid out
        # by indexing them.
        self._places: dict[Hashable, int] = {}
        self._free_places: list[int] = []
        # Nobody's is place 0, all of whose pages are the scratch page.
        self._in_page = np.arange(page_size, dtype=np.int32)
        self._table_of = np.zeros((1, 1), np.int32)  # [places, pages]
        self._slot_of = np.zeros((1, page_size), np.int32)  # [places, pages * page_size]
        self._make_place(1)

    @property
    def num_free_pages(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def is_vacant(self) -> bool:
        """Whether nobody has anything of it, as after every call that was not interrupted while it kept these books."""
        is_free = not self._tables and not self._num_reserved and len(self._free) == self.num_pages
        return is_free and len(self._free_places) == len(self._table_of) - 1  # place 0 is nobody's

    def block_table(self, owner: Hashable) -> list[int]:
        """Return the pages ``owner`` holds, in order of position."""
        return self._tables[owner]

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Tell whether an empty pool could hold one owner of ``num_tokens`` positions."""
        return self._pages(num_tokens) <= self.num_pages

    def fits(self, num_tokens: int) -> bool:
        """Tell whether a new owner of up to ``num_tokens`` positions can be promised its pages now."""
        return self._num_reserved + self._pages(num_tokens) <= self.num_pages

    def open(self, owner: Hashable, num_tokens: int) -> None:
        """Reserve pages for up to ``num_tokens`` positions of a new owner; none is handed out yet.

        Raises:
            KVCacheTooSmallError: they are not to be had now; ask ``fits`` first.

        """
        if owner in self._tables:
            raise ValueError(f"{owner!r} already holds pages; close it first.")
        pages = self._pages(num_tokens)
        if not self.fits(num_tokens):
            raise KVCacheTooSmallError(
                f"{num_tokens} KV positions need {pages} pages; {self.num_pages - self._num_reserved} of "
                f"{self.num_pages} are unreserved. Raise kv_cache_tokens, or lower max_new_tokens."
            )
        self._reserved[owner] = pages
        self._num_reserved += pages
        self._tables[owner] = []
        self._make_place(pages)
        self._places[owner] = place = self._free_places.pop()
        self._table_of[place] = 0

    def close(self, owner: Hashable) -> None:
        """Take back every page and the reservation of ``owner``."""
        self._free.extend(reversed(self._tables.pop(owner)))
        self._num_reserved -= self._reserved.pop(owner)
        self._free_places.append(self._places.pop(owner))

    def spans(self, rows: Sequence[Rows], ahead: Sequence[int] | None = None) -> Spans:
        """Hand out the pages that one forward's new positions need, and leave the layout to a program.

        Args:
            rows: the spans of each sequence, in batch order.
            ahead: how many positions after each span get their pages as well; None: none.

        Raises:
            KVCacheTooSmallError: a span, or what comes after it, goes beyond what its owner has reserved.

        """
        found = []
        for i, (owner, start, count) in enumerate(rows):
            self._hand_out(owner, start + count + (ahead[i] if ahead else 0))
            found.append((self._places[owner], start, count))
        return Spans(found, torch.from_numpy(self._table_of), self.pages)  # the same memory

    def batch(self, rows: Sequence[Rows], token_ids: Tensor, ahead: int = 0) -> RaggedBatch:
        """Lay out one forward, handing out the pages that its new positions need.

        Args:
            rows: the spans of each sequence, in batch order.
            token_ids: ``[T]`` int64 on the layout's device, the spans' tokens one after the other.
            ahead: how many positions after each span get their pages, and their places in the block table, as well.

        Raises:
            KVCacheTooSmallError: a span, or what comes after it, goes beyond what its owner has reserved.

        """
        return self._laid_out(rows, ahead)[0](token_ids=token_ids)

    def successive(self, rows: Sequence[Rows], num_forwards: int) -> list[partial[RaggedBatch]]:
        """Lay out several forwards at once: the spans, then the position after each of them, then the next, ...

        What a forward computes is known before its tokens are, so a drafting loop need not stop to lay it out.

        Args:
            rows: the spans of the first forward, in batch order.
            num_forwards: how many; those after the first have one row per span.

        Returns:
            One call per forward, which makes the batch of its ``[T]`` ``token_ids``, a keyword.

        Raises:
            KVCacheTooSmallError: a span, or what comes after it, goes beyond what its owner has reserved.

        """
        later = num_forwards - 1
        first, place, end, table = self._laid_out(rows, later)
        return [first, *self._one_row_each(place, end, table, later)] if later else [first]

    def _laid_out(
        self, rows: Sequence[Rows], later: int
    ) -> tuple[partial[RaggedBatch], np.ndarray, np.ndarray, Tensor]:
        """Lay out one forward with ``later`` to follow; return it, each span's place and end, and the block table."""
        places, ends = [], []
        for owner, start, count in rows:
            ends.append(start + count)
            self._hand_out(owner, start + count + later)
            places.append(self._places[owner])
        place, end = np.array([places, ends], np.int64)
        longest = max(ends, default=0)
        table = self._to_device(self._table_of[:, : max(1, self._pages(longest + later))][place])
        layout = row_layout(tuple([count for _, _, count in rows]), self.layout.device)
        positions = end[layout.sequence] + layout.back
        first = partial(
            RaggedBatch,
            positions=self._to_device(positions),
            slot_mapping=self._to_device(self._slot_of[place[layout.sequence], positions]),
            seqused_k=self._to_device(end.astype(np.int32)),
            cu_seqlens_q=layout.cu_seqlens,
            cu_seqlens=layout.cu_seqlens,
            last_rows=layout.last_rows,
            most_rows=layout.most_rows,
            block_table=table,
            max_seqlen_q=layout.most_rows,
            max_seqlen_k=longest,
        )
        return first, place, end, table

    def _one_row_each(
        self, place: np.ndarray, end: np.ndarray, table: Tensor, num_forwards: int
    ) -> list[partial[RaggedBatch]]:
        """Lay out the forwards after the first: row j of forward i stands at position ``end[j] + i``."""
        layout = row_layout((1,) * len(end), self.layout.device)
        positions = end + np.arange(num_forwards)[:, None]  # [num_forwards, B]
        slots, used = self._slot_of[place, positions], (positions + 1).astype(np.int32)
        longest = int(end.max()) + 1
        per_forward = zip(*(self._to_device(array).unbind() for array in (positions, slots, used)), strict=True)
        return [
            partial(
                RaggedBatch,
                positions=positions,
                slot_mapping=slots,
                seqused_k=used,
                cu_seqlens_q=layout.cu_seqlens,
                cu_seqlens=layout.cu_seqlens,
                last_rows=layout.last_rows,
                most_rows=1,
                block_table=table,
                max_seqlen_q=1,
                max_seqlen_k=longest + i,
            )
            for i, (positions, slots, used) in enumerate(per_forward)
        ]

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _hand_out(self, owner: Hashable, num_tokens: int) -> None:
        pages = self._tables[owner]
        if num_tokens <= len(pages) * self.page_size:
            return
        needed, place = self._pages(num_tokens), self._places[owner]
        if needed > self._reserved[owner]:
            raise KVCacheTooSmallError(
                f"position {num_tokens - 1} lies beyond the {self._reserved[owner]} pages reserved."
            )
        while len(pages) < needed:
            page, start = self._free.pop(), len(pages) * self.page_size
            self._table_of[place, len(pages)] = page
            self._slot_of[place, start : start + self.page_size] = page * self.page_size + self._in_page
            pages.append(page)

    def _make_place(self, num_pages: int) -> None:
        """See to it that a place is free, and wide enough for ``num_pages``."""
        places, width = self._table_of.shape
        more = 0 if self._free_places else max(8, places)
        wider = max(0, num_pages - width)
        self._free_places += range(places, places + more)
        if more or wider:
            self._table_of = np.pad(self._table_of, ((0, more), (0, wider)))
            self._slot_of = np.pad(self._slot_of, ((0, more), (0, wider * self.page_size)))
            self._slot_of[0] = np.arange(self._slot_of.shape[1]) % self.page_size

    def _to_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.layout.device)
