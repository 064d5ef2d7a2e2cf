"""The pages of a KV cache, and the pages of each owner.

A page holds ``page_size`` positions of every layer, whatever the layers' shapes. Page 0 is the scratch page: padding
rows may write to it, and no row reads it. Rejecting draft tokens does not change the pool: the length of the owner
falls, and later rows overwrite the stale entries (invariant I4).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RowPadding, Rows
from specdec_fast.errors import KVCacheAllocationError, KVCacheTooSmallError, RankError
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.prefix_pages import PrefixPages
from specdec_fast.kv_cache.state_pool import StateMemory, StatePool


class KVPages(NamedTuple):
    """The memory of a pool's pages, as a program takes it."""

    addresses: Tensor  # [num_layers, 2] int64 on the CPU, the addresses of every layer's keys and values
    num_pages: int  # number of pages, with the scratch page
    page_size: int  # positions per page
    memory: tuple[Tensor, ...]  # the tensors behind the addresses; the references keep them alive
    states: StateMemory | None = None  # None: the model has no recurrent layers


class Spans(NamedTuple):
    """The rows of a forward as a program takes them; the program lays them out itself."""

    # (row of ``tables``, first position, number of positions) of each sequence; for recurrent layers also the positions
    # that the stored state has seen, and the rows that advance it, replayed ones included
    spans: list[tuple[int, int, int, int, int]]
    tables: Tensor  # ``[places, max_pages]`` int32, the block table of every owner
    pages: KVPages  # the pages that the tables name
    # if the rows are trees, ``[rows - B]`` int32 on the host: of every row but a sequence's first, its parent, counted
    # as in ``Draft.parents``. None: chains.
    parents: Tensor | None = None


class PagePool:
    """Pages of one model's KV cache, allocated as their owners grow and freed when these leave.

    If the model has recurrent layers, every owner has a state slot too.

    After ``keep_prefixes`` owners may share pages whose entries are those of the same tokens (``share``, ``keep``).
    Such a page stays when its last owner leaves, until a page is needed and none is free. Nobody may write a page with
    a key; an owner that has to compute its positions anew calls ``own`` before.

    The pool promises an owner only the pages that it holds; ``engine/residents.py`` makes room before each step.
    Whatever allocates pages raises KVCacheTooSmallError if too few are free, and allocates none then.

    Attributes:
        layers: keys and values of every layer, each ``[num_pages + 1, page_size, num_kv_heads, its head size]``.
        tensors: the allocations that ``layers`` are views of, see ``KVLayout.allocate``.
        pages: the same memory, for a program.
        tables: ``[places, pages]`` int32 on the host, the block table of every owner. A place is the row of one owner
            in ``tables`` and ``slots``; place 0 has no owner, and all its pages are the scratch page.
        slots: ``[places, pages * page_size]`` int32 on the host, the slot of every position of every owner.
        states: the state slots of recurrent layers, one for every place; None if the model has no such layers.
        prefixes: the pages that are kept by what they hold; None if the pool keeps none.

    Args:
        layout: of the model.
        num_tokens: number of positions.
        page_size: positions per page.
        row_padding: how rows are computed; None: no padding.
        num_owners: for how many owners there are state slots at first; further ones grow with the owners.

    Raises:
        KVCacheAllocationError: there is no memory for so many positions or state slots.
        RankError: another rank of a target that ``tp_size`` shards has ended.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_tokens: int,
        page_size: int,
        row_padding: RowPadding | None = None,
        num_owners: int = 0,
    ) -> None:
        self.layout = layout
        self.row_padding = row_padding or RowPadding()
        self.page_size = page_size
        self.num_pages = -(-num_tokens // page_size)  # without the scratch page
        try:
            self.tensors, self.layers = layout.allocate(self.num_pages + 1, page_size)
            if layout.copies is not None:
                layout.copies.allocate(self)
        except RankError:
            raise
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            needed = (self.num_pages + 1) * page_size * layout.bytes_per_token
            where = " and ".join(map(str, layout.all_devices))
            raise KVCacheAllocationError(
                f"a KV cache of {num_tokens} positions needs {needed / 2**30:.1f} GiB on {where}, which cannot "
                "be allocated; set kv_cache_tokens, or lower max_new_tokens, max_batch_size or window_size."
            ) from error
        addresses = [[tensor.data_ptr() for tensor in pair] for pair in self.layers]
        on_host = torch.tensor(addresses, dtype=torch.int64, device="cpu").view(-1, 2)
        self.pages = KVPages(on_host, self.num_pages + 1, page_size, self.tensors)
        self._free = list(range(self.num_pages, 0, -1))
        self._pages_of: dict[Hashable, list[int]] = {}
        self.prefixes: PrefixPages | None = None
        # The layout of a forward indexes arrays that have one row, a place, per owner.
        self._places: dict[Hashable, int] = {}
        self._free_places: list[int] = []
        self._in_page = np.arange(page_size, dtype=np.int32)
        self.tables = np.zeros((1, 1), np.int32)
        self.slots = self._in_page[None].copy()
        self.states: StatePool | None = None
        if layout.states:
            num_places = 1 + max(1, num_owners)
            self.states = StatePool(
                layout.states, num_places, layout.most_draft_tokens, layout.state_devices or layout.device
            )
            self.pages = self.pages._replace(states=self.states.memory())
            self._widen_places(num_places)

    def keep_prefixes(self) -> None:
        """From now on let pages be kept, unless the model has recurrent layers, whose states are no pages."""
        if not self.layout.states:
            self.prefixes = PrefixPages(self.num_pages)

    def holds(self, num_tokens: int, num_owners: int) -> bool:
        """Return whether the pool has so many positions, and state slots for so many owners if it needs any."""
        has_slots = self.states is None or self.states.num_slots > num_owners
        return has_slots and self.num_tokens >= num_tokens

    @property
    def num_tokens(self) -> int:
        """The number of positions of all pages, without the scratch page."""
        return self.num_pages * self.page_size

    @property
    def num_free_pages(self) -> int:
        """The number of pages that no owner holds, kept ones among them."""
        return len(self._free) + self.num_idle_pages

    @property
    def num_held_pages(self) -> int:
        """The number of pages of all owners, those that several have counted for each."""
        return sum(map(len, self._pages_of.values()))

    @property
    def num_idle_pages(self) -> int:
        """The number of pages that are kept for later owners, and that no owner holds."""
        return 0 if self.prefixes is None else len(self.prefixes.idle)

    @property
    def is_vacant(self) -> bool:
        """Whether no page or place is held. An interrupt may leave records that say otherwise."""
        is_free = not self._pages_of and self.num_free_pages == self.num_pages
        return is_free and len(self._free_places) == len(self.tables) - 1  # place 0 has no owner

    def block_table(self, owner: Hashable) -> list[int]:
        """Return the pages of ``owner``, in order of position."""
        return self._pages_of[owner]

    def add(self, owner: Hashable) -> None:
        """Add an owner, which holds no page yet."""
        if owner in self._pages_of:
            raise ValueError(f"{owner!r} already holds pages; free it first.")
        if not self._free_places:
            self._add_places(max(8, len(self.tables)) if self.states is None else 1)
        self._pages_of[owner] = []
        if self.prefixes is not None:
            self.prefixes.num_kept[owner] = 0
        self._places[owner] = place = self._free_places.pop()
        self.tables[place] = 0
        if self.states is not None:
            self.states.forget(place)

    def free(self, owner: Hashable) -> None:
        """Free every page of ``owner`` that no other one has and that is not kept, and forget it."""
        pages = reversed(self._pages_of.pop(owner))
        prefixes = self.prefixes
        if prefixes is None:
            self._free.extend(pages)
        else:
            del prefixes.num_kept[owner]
            self._free.extend([page for page in pages if prefixes.leave(page)])
        self._free_places.append(self._places.pop(owner))

    def grown(self, num_tokens: int, num_owners: int = 0) -> PagePool:
        """Return a pool of ``num_tokens`` positions in which every owner holds the same pages, with their entries.

        The caller must not use this pool afterwards. Both pools need memory until the entries are copied. Raises
        KVCacheAllocationError if there is no memory for the larger pool, or for state slots of ``num_owners`` owners;
        this pool's owners keep what they have then.
        """
        self.have_slots(num_owners + 1)
        if num_tokens <= self.num_tokens:
            return self
        # without states: the larger pool takes this one's
        pool = PagePool(replace(self.layout, states=()), num_tokens, self.page_size, self.row_padding)
        pool.layout = self.layout
        pool.copy_pages(self)
        if self.layout.copies is not None:
            self.layout.copies.copy(self, pool)
        pool._free = [*range(pool.num_pages, self.num_pages, -1), *self._free]
        pool._pages_of = self._pages_of
        pool.prefixes = self.prefixes
        if self.prefixes is not None:
            self.prefixes.num_owners += [0] * (pool.num_pages - self.num_pages)
        pool._places = self._places
        pool._free_places = self._free_places
        pool.tables = self.tables
        pool.slots = self.slots
        pool.take_states(self)
        return pool

    def have_slots(self, num_slots: int) -> None:
        """Let there be so many state slots, if the model has recurrent layers."""
        if self.states is not None and self.states.num_slots < num_slots:
            self._add_places(num_slots - self.states.num_slots)

    def take_states(self, source: PagePool) -> None:
        """Take the state slots of a pool that is not used any more."""
        self.states = source.states
        self.pages = self.pages._replace(states=source.pages.states)

    def copy_pages(self, source: PagePool) -> None:
        """Copy the entries of all pages of a smaller pool into the same pages."""
        for smaller, larger in zip(source.tensors, self.tensors, strict=True):
            larger[:, :, : source.num_pages + 1] = smaller

    def place(self, owner: Hashable) -> int:
        """Return the owner's row in ``tables`` and ``slots``."""
        return self._places[owner]

    def num_pages_for(self, num_tokens: int) -> int:
        """Return the number of pages for ``num_tokens`` positions."""
        return -(-num_tokens // self.page_size)

    def num_missing(self, owner: Hashable, num_tokens: int) -> int:
        """Return the number of pages that ``owner`` lacks for its first ``num_tokens`` positions."""
        return max(0, self.num_pages_for(num_tokens) - len(self._pages_of[owner]))

    def allocate(self, owner: Hashable, num_tokens: int) -> None:
        """Allocate the pages that ``owner`` lacks for its first ``num_tokens`` positions."""
        pages = self._pages_of[owner]
        if num_tokens <= len(pages) * self.page_size:
            return
        needed = self.num_pages_for(num_tokens)
        place = self._places[owner]
        if needed - len(pages) > self.num_free_pages:
            raise KVCacheTooSmallError(
                f"{num_tokens} KV positions need {needed} pages; the owner holds {len(pages)}, and "
                f"{self.num_free_pages} of {self.num_pages} are free. Raise kv_cache_tokens, or lower max_new_tokens."
            )
        self.widen(needed)
        new = [self._new_page() for _ in range(needed - len(pages))]
        self._write_place(place, len(pages), new)
        pages += new

    def num_shared(self, keys: Sequence[Hashable]) -> int:
        """Return how many of the pages of these keys, the first ones, have an owner."""
        prefixes = self.prefixes
        num_pages = 0
        if prefixes is not None:
            for key in keys:
                page = prefixes.page_of.get(key)
                if page is None or not prefixes.num_owners[page]:
                    break
                num_pages += 1
        return num_pages

    def share(self, owner: Hashable, keys: Sequence[Hashable]) -> int:
        """Let an owner have the pages that are kept of its first keys, in place of pages of its own.

        Args:
            owner: what it has computed of these pages is given up.
            keys: of its first pages.

        Returns:
            The number of pages that it did not have before.
        """
        prefixes = self.prefixes
        if prefixes is None:
            return 0
        start = prefixes.num_kept[owner]
        found = []
        for key in keys[start:]:
            page = prefixes.page_of.get(key)
            if page is None:
                break
            found.append(page)
        if not found:
            return 0
        end = start + len(found)
        self.widen(end)
        for page in found:
            prefixes.take(page)
        pages = self._pages_of[owner]
        for page in pages[start:end]:
            self._give_up(page)
        pages[start:end] = found
        self._write_place(self._places[owner], start, found)
        prefixes.num_kept[owner] = end
        return len(found)

    def keep(self, owner: Hashable, keys: Sequence[Hashable]) -> None:
        """Keep an owner's first pages, whose entries are computed, for others with the same keys.

        Where another page has the key already, the owner gets it in place of its own, which holds the same bits.
        """
        prefixes = self.prefixes
        if prefixes is None:
            return
        pages = self._pages_of[owner]
        for i in range(prefixes.num_kept[owner], len(keys)):
            page = prefixes.name(pages[i], keys[i])
            if page != pages[i]:
                prefixes.take(page)
                self._give_up(pages[i])
                pages[i] = page
                self._write_place(self._places[owner], i, [page])
            prefixes.num_kept[owner] = i + 1

    def num_kept(self, owner: Hashable) -> int:
        """Return how many of an owner's first pages are kept, so that it may not write them."""
        return 0 if self.prefixes is None else self.prefixes.num_kept[owner]

    def own(self, owner: Hashable, first: int) -> None:
        """Let an owner write its pages from number ``first`` on: new ones replace those that others have as well.

        The pool must have room for the pages of all owners without sharing.
        """
        prefixes = self.prefixes
        if prefixes is None or prefixes.num_kept[owner] <= first:
            return
        pages = self._pages_of[owner]
        for i in reversed(range(first, prefixes.num_kept[owner])):
            if prefixes.num_owners[pages[i]] > 1:
                prefixes.leave(pages[i])
                pages[i] = self._new_page()
                self._write_place(self._places[owner], i, [pages[i]])
            else:
                prefixes.unname(pages[i])
            prefixes.num_kept[owner] = i

    def forget_prefixes(self) -> None:
        """Let no page have a key any more: owners have the pages that they had, and all others are free.

        What the pool notes is made anew, so an interrupt in the middle of a change leaves nothing wrong behind.
        """
        prefixes = self.prefixes
        if prefixes is None:
            return
        prefixes.forget()
        prefixes.num_owners = [0] * (self.num_pages + 1)
        for pages in self._pages_of.values():
            for page in pages:
                prefixes.num_owners[page] += 1
        self._free = [page for page in range(self.num_pages, 0, -1) if not prefixes.num_owners[page]]

    def _new_page(self) -> int:
        if self.prefixes is None:
            return self._free.pop()
        page = self._free.pop() if self._free else self.prefixes.evict()
        self.prefixes.num_owners[page] = 1
        return page

    def _give_up(self, page: int) -> None:
        assert self.prefixes is not None
        if self.prefixes.leave(page):
            self._free.append(page)

    def _write_place(self, place: int, first: int, pages: list[int]) -> None:
        """Note the pages with numbers from ``first`` on of the owner at ``place``."""
        size = self.page_size
        end = first + len(pages)
        self.tables[place, first:end] = pages
        slots = self.slots[place, first * size : end * size].reshape(len(pages), size)  # a view
        np.add(np.array(pages, np.int32)[:, None] * size, self._in_page, out=slots)

    def spans(self, rows: Iterable[Rows], ahead: Sequence[int] | None = None) -> Spans:
        """Allocate the pages that one forward's new positions need; a program will lay the rows out.

        ``rows`` has each sequence's span, in batch order. ``ahead`` is, per span, the number of positions after it that
        get pages as well; None: 0 for all.
        """
        rows = list(rows)
        for i, (owner, start, count, _) in enumerate(rows):
            self.allocate(owner, start + count + (ahead[i] if ahead else 0))
        places = [self._places[row.owner] for row in rows]
        lengths = stored = [0] * len(rows)
        if self.states is not None:
            of_states = self.states.advance(rows, np.array(places))
            lengths = of_states.state_lengths.tolist()
            stored = of_states.num_stored.tolist()
        starts = [row.start for row in rows]
        counts = [row.count for row in rows]
        spans = list(zip(places, starts, counts, lengths, stored, strict=True))
        return Spans(spans, torch.from_numpy(self.tables), self.pages)  # from_numpy shares the memory

    def _add_places(self, more: int) -> None:
        places = len(self.tables)
        if self.states is not None:
            try:
                self.states.grow(places + more)
            finally:  # if memory runs out, some of the tensors have been replaced
                self.pages = self.pages._replace(states=self.states.memory())
        self._widen_places(places + more)

    def _widen_places(self, num_places: int) -> None:
        places = len(self.tables)
        more = ((0, num_places - places), (0, 0))
        self.tables = np.pad(self.tables, more)
        self.slots = np.pad(self.slots, more)
        self._free_places += range(places, num_places)

    def widen(self, num_pages: int) -> None:
        """Let ``tables`` name ``num_pages`` of every place, or more, so that this is rare."""
        width = self.tables.shape[1]
        if num_pages > width:
            wider = max(num_pages, 2 * width) - width
            self.tables = np.pad(self.tables, ((0, 0), (0, wider)))
            self.slots = np.pad(self.slots, ((0, 0), (0, wider * self.page_size)))
            self.slots[0] = np.arange(self.slots.shape[1]) % self.page_size
