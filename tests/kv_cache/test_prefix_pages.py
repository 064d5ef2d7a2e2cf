"""Pages that are kept by what they hold: shared, idle, given up, and never written while they are kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from specdec_fast.errors import KVCacheTooSmallError
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.request.page_keys import PageKeys

LAYOUT = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"))
SIZE = 2


def pool_of(num_pages=8):
    pool = PagePool(LAYOUT, num_pages * SIZE, SIZE)
    pool.keep_prefixes()
    return pool


def keys_of(text):
    return PageKeys(SIZE, b"").first(text, len(text) // SIZE)


def written(pool, owner, text, start):
    """Write the entries of positions ``start`` on: a number that stands for all tokens up to the position."""
    for position in range(start, len(text)):
        page = pool.block_table(owner)[position // SIZE]
        pool.layers[0][0].view(-1)[page * SIZE + position % SIZE] = hash(tuple(text[: position + 1])) % 9973


def entries(pool, owner, num_positions):
    slots = [pool.block_table(owner)[i // SIZE] * SIZE + i % SIZE for i in range(num_positions)]
    return pool.layers[0][0].view(-1)[slots].tolist()


def joined(pool, owner, text):
    """Let an owner join, share, compute the rest and keep it, as the engine does; return how many pages were shared."""
    pool.add(owner)
    num_shared = pool.share(owner, keys_of(text))
    pool.allocate(owner, len(text))
    written(pool, owner, text, num_shared * SIZE)
    pool.keep(owner, keys_of(text))
    return num_shared


def assert_sound(pool):
    prefixes = pool.prefixes
    held = [page for owner in pool._pages_of for page in pool.block_table(owner)]
    assert prefixes.num_owners == [held.count(page) if page else 0 for page in range(pool.num_pages + 1)]
    assert {key: page for page, key in prefixes.key_of.items()} == prefixes.page_of
    assert {*prefixes.idle} == {*prefixes.key_of} - {*held}
    assert sorted([*{*held}, *prefixes.idle, *pool._free]) == list(range(1, pool.num_pages + 1)), "lost, or twice"
    assert pool.num_free_pages == pool.num_pages - len({*held})
    assert pool.num_held_pages == len(held)
    assert all(page in prefixes.key_of for page in held if held.count(page) > 1), "shared without a key"
    for owner, place in pool._places.items():
        pages = pool.block_table(owner)
        assert pool.tables[place][: len(pages)].tolist() == pages
        slots = [page * SIZE + i for page in pages for i in range(SIZE)]
        assert pool.slots[place][: len(slots)].tolist() == slots


class PrefixMachine(RuleBasedStateMachine):
    """Texts of two tokens join, grow, begin anew and leave; every owner always has the entries of its own text."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(9)
        self.texts: dict[object, list[int]] = {}
        self.num_shared = 0

    @rule(target=owners, text=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def join(self, text):
        owner = object()
        num_held = self.pool.num_shared(keys_of(text))
        if self.pool.num_pages_for(len(text)) - num_held > self.pool.num_free_pages:
            return None
        self.num_shared += joined(self.pool, owner, text)
        self.texts[owner] = list(text)
        return owner

    @rule(owner=owners, more=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, owner, more):
        if owner is None:
            return
        text = self.texts[owner]
        start = len(text)
        if self.pool.num_missing(owner, start + len(more)) > self.pool.num_free_pages:
            with pytest.raises(KVCacheTooSmallError):
                self.pool.allocate(owner, start + len(more))
            return
        text += more
        self.pool.allocate(owner, len(text))
        written(self.pool, owner, text, start)
        self.pool.keep(owner, keys_of(text))

    @rule(owner=owners, page=st.integers(0, 4))
    def begin_anew(self, owner, page):
        if owner is None or self.pool.num_held_pages > self.pool.num_pages:  # see PagePool.own
            return
        self.pool.own(owner, page)
        for later in self.pool.block_table(owner)[page:]:
            assert self.pool.prefixes.num_owners[later] == 1
            assert later not in self.pool.prefixes.key_of
            self.pool.layers[0][0][later] = torch.nan
        written(self.pool, owner, self.texts[owner], page * SIZE)
        self.pool.keep(owner, keys_of(self.texts[owner]))

    @rule(owner=consumes(owners))
    def leave(self, owner):
        if owner is not None:
            self.pool.free(owner)
            del self.texts[owner]

    @rule()
    def forget(self):
        self.pool.forget_prefixes()

    @rule()
    def enlarge(self):
        if self.pool.num_pages < 12:
            self.pool = self.pool.grown((self.pool.num_pages + 1) * SIZE)

    @invariant()
    def everyone_has_its_own_entries(self):
        for owner, text in self.texts.items():
            expected = pool_of(len(text))
            joined(expected, "alone", text)
            assert entries(self.pool, owner, len(text)) == entries(expected, "alone", len(text))

    @invariant()
    def books_are_sound(self):
        # After `forget` and growth, nameless pages stay with the owners that share them.
        if all(self.pool.num_kept(owner) == 0 or self._has_keys(owner) for owner in self.texts):
            assert_sound(self.pool)

    def _has_keys(self, owner):
        pages = self.pool.block_table(owner)[: self.pool.num_kept(owner)]
        return all(page in self.pool.prefixes.key_of for page in pages)


PrefixMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
test_pool_keeps_its_books = PrefixMachine.TestCase


def test_pages_are_shared_and_stay_when_their_owners_leave():
    pool = pool_of()
    assert joined(pool, "a", [1, 2, 3, 4, 5]) == 0
    assert joined(pool, "b", [1, 2, 3, 4, 6]) == 2
    assert pool.block_table("a")[:2] == pool.block_table("b")[:2]
    assert pool.block_table("a")[2] != pool.block_table("b")[2], "the first page that differs"
    assert (pool.num_free_pages, pool.num_idle_pages, pool.num_held_pages) == (4, 0, 6)
    pool.free("a")
    assert (pool.num_free_pages, pool.num_idle_pages) == (5, 0)
    pool.free("b")
    assert (pool.num_free_pages, pool.num_idle_pages) == (8, 2)
    assert pool.is_vacant
    assert joined(pool, "c", [1, 2, 9, 9, 9, 9]) == 1
    assert_sound(pool)


def test_idle_pages_are_given_up_last_used_first_and_longer_prefixes_before_shorter_ones():
    pool = pool_of(6)
    for owner, text in (("old", [1] * 4), ("new", [2] * 4)):
        joined(pool, owner, text)
        pool.free(owner)
    joined(pool, "again", [1] * 2)
    pool.free("again")
    found = []
    for num_pages in range(3, 7):  # two pages have never been kept
        pool.add("large")
        pool.allocate("large", num_pages * SIZE)
        found.append([sum(key in pool.prefixes.page_of for key in keys_of([token] * 4)) for token in (1, 2)])
        pool.free("large")
    assert found == [[1, 2], [1, 1], [1, 0], [0, 0]]


def test_equal_pages_that_two_owners_computed_become_one():
    pool = pool_of()
    text = [1, 2, 3, 4]
    for owner in "ab":  # both join before either has computed anything
        pool.add(owner)
        pool.allocate(owner, 4)
    for owner in "ab":
        written(pool, owner, text, 0)
        pool.keep(owner, keys_of(text))
    assert pool.block_table("a") == pool.block_table("b")
    assert pool.num_free_pages == 6
    assert_sound(pool)


def test_what_is_computed_meanwhile_replaces_pages_of_ones_own():
    pool = pool_of()
    pool.add("late")
    pool.allocate("late", 5)
    joined(pool, "early", [1, 2, 3, 4])
    assert pool.share("late", keys_of([1, 2, 3, 4])) == 2
    assert pool.block_table("late")[:2] == pool.block_table("early")
    assert pool.share("late", keys_of([1, 2, 3, 4])) == 0, "it has them"
    assert_sound(pool)


def test_pages_that_others_have_are_replaced_before_they_are_written():
    pool = pool_of()
    joined(pool, "a", [1, 2, 3, 4])
    joined(pool, "b", [1, 2, 3, 4])
    before = entries(pool, "a", 4)
    pool.own("b", 1)
    assert pool.block_table("a")[0] == pool.block_table("b")[0]
    assert pool.block_table("a")[1] != pool.block_table("b")[1]
    written(pool, "b", [1, 2, 7, 7], 2)
    assert entries(pool, "a", 4) == before
    pool.own("a", 0)
    assert pool.num_kept("a") == 0
    pool.free("a")
    assert pool.num_idle_pages == 0, "nobody may share what has been written"
    assert_sound(pool)


def test_nothing_is_found_after_forgetting():
    pool = pool_of()
    joined(pool, "a", [1, 2, 3, 4])
    joined(pool, "gone", [5, 6])
    pool.free("gone")
    pool.forget_prefixes()
    assert (pool.num_idle_pages, pool.num_free_pages) == (0, 6)
    pool.add("b")
    assert pool.share("b", keys_of([1, 2, 3, 4])) == 0
    assert entries(pool, "a", 4) == entries(pool, "a", 4)
    pool.free("a")
    pool.free("b")
    assert (pool.is_vacant, pool.num_idle_pages) == (True, 0)


def test_a_pool_keeps_nothing_unless_it_is_asked_to():
    pool = PagePool(LAYOUT, 8, SIZE)
    pool.add("a")
    pool.allocate("a", 4)
    pool.keep("a", keys_of([1, 2, 3, 4]))
    pool.forget_prefixes()
    assert pool.share("a", keys_of([1, 2, 3, 4])) == pool.num_shared(keys_of([1, 2])) == pool.num_kept("a") == 0
    pool.own("a", 0)
    pool.free("a")
    assert len(pool._free) == 4
