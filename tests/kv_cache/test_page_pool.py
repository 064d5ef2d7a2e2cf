"""The page pool: the pages of each owner, and the layout of one forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from specdec_fast.batch.ragged_batch import RaggedBatch, Rows
from specdec_fast.errors import KVCacheTooSmallError
from specdec_fast.kv_cache.forward_layout import decode_batches, lay_out
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from support.fuzzing import fuzz

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=3, head_dim=4, dtype=torch.float16, device=torch.device("cpu"))


def pages_for(num_tokens: int, page_size: int) -> int:
    return len(range(0, num_tokens, page_size))


def rows_of(*spans: tuple[str, int, int]) -> tuple[list[Rows], torch.Tensor]:
    rows = [Rows(*span) for span in spans]
    return rows, torch.arange(sum(span.count for span in rows))


def assert_pages_sound(pool: PagePool, reached: dict[object, int]) -> None:
    """Every page is free or held by one owner; no owner holds the scratch page, or more than it has reached."""
    held = [page for owner in reached for page in pool.block_table(owner)]
    assert len(set(held)) == len(held), "a page with two owners"
    assert all(1 <= page <= pool.num_pages for page in held), "the scratch page, or one that does not exist"
    assert pool.num_free_pages + len(held) == pool.num_pages, "a page was lost"
    for owner, num_tokens in reached.items():
        pages = pool.block_table(owner)
        assert len(pages) == pages_for(num_tokens, pool.page_size), "allocated on demand only"
        place, in_page = pool.place(owner), range(pool.page_size)
        assert pool.tables[place].tolist() == pages + [0] * (pool.tables.shape[1] - len(pages))
        slots = [page * pool.page_size + i for page in pages for i in in_page]
        assert pool.slots[place, : len(slots)].tolist() == slots
    assert not pool.tables[0].any(), "place 0 has the scratch page only"
    assert pool.slots[0].tolist() == list(range(pool.page_size)) * pool.tables.shape[1]


class PoolMachine(RuleBasedStateMachine):
    """Owners join, grow, roll back and leave in any order; page counts are compared after every step."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(LAYOUT, num_tokens=40, page_size=3)  # 14 pages, so that it is often full
        self.reached: dict[object, int] = {}

    @rule(target=owners)
    def join(self):
        owner = object()
        self.pool.add(owner)
        self.reached[owner] = 0
        return owner

    @rule(owner=owners, start=st.integers(0, 50), count=st.integers(1, 10))
    def compute(self, owner, start, count):
        start = min(start, self.reached[owner])  # below what it has reached: a rollback, which costs no page
        rows, token_ids = rows_of((owner, start, count))
        missing = max(0, pages_for(start + count, 3) - pages_for(self.reached[owner], 3))
        free = 14 - sum(pages_for(n, 3) for n in self.reached.values())
        assert (self.pool.num_missing(owner, start + count), self.pool.num_free_pages) == (missing, free)
        if missing > free:
            with pytest.raises(
                KVCacheTooSmallError, match=f"{start + count} KV positions need .*{free} of 14 are free"
            ):
                lay_out(self.pool, rows, token_ids)
            return
        before = list(self.pool.block_table(owner))
        lay_out(self.pool, rows, token_ids)
        self.reached[owner] = max(self.reached[owner], start + count)
        assert self.pool.block_table(owner)[: len(before)] == before, "pages change owner or place"

    @rule(owner=consumes(owners))
    def leave(self, owner):
        self.pool.free(owner)
        del self.reached[owner]

    @invariant()
    def pages_are_sound(self):
        assert_pages_sound(self.pool, self.reached)


PoolMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
test_pool_keeps_its_books = PoolMachine.TestCase


# Each is one way to corrupt a pool; the check above must see it.
@pytest.mark.parametrize("fault", ["scratch page", "page twice", "page lost", "page too early"])
def test_page_check_rejects(fault):
    pool = PagePool(LAYOUT, 20, page_size=4)
    pool.add("a")
    pool.add("b")
    lay_out(pool, *rows_of(("a", 0, 5), ("b", 0, 3)))
    reached = {"a": 5, "b": 3}
    assert_pages_sound(pool, reached)
    if fault == "scratch page":
        pool.block_table("b")[0] = 0
    elif fault == "page twice":
        pool.block_table("b")[0] = pool.block_table("a")[0]
    elif fault == "page lost":
        pool._free.pop()
    else:
        pool.block_table("b").append(pool._free.pop())
    with pytest.raises(AssertionError):
        assert_pages_sound(pool, reached)


def layout_by_hand(pool: PagePool, rows: list[Rows]) -> dict[str, list]:
    """Compute every field of RaggedBatch but the tokens by its definition, one number at a time."""
    positions, slots, cu_seqlens, used = [], [], [0], []
    for span in rows:
        for position in range(span.start, span.start + span.count):
            page = pool.block_table(span.owner)[position // pool.page_size]
            positions.append(position)
            slots.append(page * pool.page_size + position % pool.page_size)
        cu_seqlens.append(len(positions))
        used.append(span.start + span.count)
    width = max([1, *(pages_for(number, pool.page_size) for number in used)])
    table = [(pool.block_table(s.owner) + [0] * width)[:width] for s in rows]
    last_rows = [stop - 1 for stop in cu_seqlens[1:]]
    return {
        "positions": positions, "slot_mapping": slots, "cu_seqlens_q": cu_seqlens, "cu_seqlens": cu_seqlens,
        "seqused_k": used,        "block_table": table, "last_rows": last_rows,
    }  # fmt: skip


def assert_laid_out(batch: RaggedBatch, wanted: dict[str, list]) -> None:
    for name, values in wanted.items():
        tensor = getattr(batch, name)
        assert tensor.tolist() == values, name
        assert tensor.dtype == (torch.int64 if name in ("positions", "last_rows") else torch.int32), name
        assert tensor.is_contiguous(), name


spans = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), max_size=6)


@fuzz(200)
@given(page_size=st.integers(1, 9), forwards=st.lists(spans, min_size=1, max_size=3))
def test_batch_against_its_definition(page_size, forwards):
    pool = PagePool(LAYOUT, 6 * 40, page_size)
    for owner in range(6):
        pool.add(owner)
    for forward in forwards:  # the second finds pages handed out by the first, in whatever order
        rows, token_ids = rows_of(*((owner, *span) for owner, span in reversed(list(enumerate(forward)))))
        batch = lay_out(pool, rows, token_ids)
        assert_laid_out(batch, layout_by_hand(pool, rows))
        assert batch.token_ids is token_ids


@pytest.mark.parametrize("name", ["positions", "slot_mapping", "cu_seqlens_q", "seqused_k", "block_table", "last_rows"])
def test_definition_rejects_another_layout(name):
    pool = PagePool(LAYOUT, 40, page_size=4)
    for owner in "ab":
        pool.add(owner)
    rows, token_ids = rows_of(("a", 2, 5), ("b", 0, 9))
    batch = lay_out(pool, rows, token_ids)
    assert_laid_out(batch, layout_by_hand(pool, rows))
    moved = getattr(batch, name).clone()  # some are shared with the batches of other forwards
    moved[-1] += 1
    batch = replace(batch, **{name: moved})
    with pytest.raises(AssertionError):
        assert_laid_out(batch, layout_by_hand(pool, rows))


@fuzz(100)
@given(page_size=st.integers(1, 9), spans=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4)), min_size=1),
       num_forwards=st.integers(1, 6))  # fmt: skip
def test_decode_batches_are_the_batches_laid_out_one_by_one(page_size, spans, num_forwards):
    pool = PagePool(LAYOUT, len(spans) * 40, page_size)
    for owner in range(len(spans)):
        pool.add(owner)
    rows, token_ids = rows_of(*((owner, *span) for owner, span in enumerate(spans)))
    together = decode_batches(pool, rows, num_forwards)
    assert len(together) == num_forwards
    for batch_of in together:
        batch = batch_of(token_ids=token_ids)
        width = batch.block_table.shape[1]  # of the last forward, for all of them
        held = [(pool.block_table(span.owner) + [0] * width)[:width] for span in rows]
        assert_laid_out(batch, layout_by_hand(pool, rows) | {"block_table": held})
        assert batch.max_seqlen_q == max(span.count for span in rows)
        assert batch.max_seqlen_k == max(span.start + span.count for span in rows)
        rows, token_ids = rows_of(*((span.owner, span.start + span.count, 1) for span in rows))


def test_one_owner_twice_in_a_forward():
    # a prompt that is split over forwards may end and begin in the same one
    pool = PagePool(LAYOUT, 40, page_size=4)
    pool.add("a")
    rows, token_ids = rows_of(("a", 0, 6), ("a", 6, 7))
    assert_laid_out(lay_out(pool, rows, token_ids), layout_by_hand(pool, rows))


def test_empty_forward():
    batch = lay_out(PagePool(LAYOUT, 8, page_size=4), [], torch.empty(0, dtype=torch.int64))
    assert_laid_out(batch, {"positions": [], "slot_mapping": [], "cu_seqlens_q": [0], "seqused_k": []})
    assert batch.block_table.shape == (0, 1)


# A whole page, one position more, one less, and a page larger than all that is asked for.
@pytest.mark.parametrize(("num_tokens", "page_size", "num_pages"), [(8, 4, 2), (9, 4, 3), (7, 4, 2), (3, 16, 1)])
def test_size_of_the_pool(num_tokens, page_size, num_pages):
    pool = PagePool(LAYOUT, num_tokens, page_size)
    assert (pool.num_pages, pool.num_free_pages) == (num_pages, num_pages)
    assert pool.tensors[0].shape == (2, 2, num_pages + 1, page_size, 3, 4)  # with the scratch page
    assert pool.tensors[0].dtype == torch.float16
    assert not pool.tensors[0].any(), "a page that was never written must not hold a NaN"


def test_bytes_per_token():
    assert LAYOUT.bytes_per_token == 2 * 2 * 3 * 4 * 2  # layers, key and value, heads, head_dim, two bytes each


def test_full_pool_says_what_is_missing_and_what_to_do():
    pool = PagePool(LAYOUT, 20, page_size=4)
    for owner in "ab":
        pool.add(owner)
    pool.allocate("a", 9)
    pool.allocate("b", 4)
    message = r"12 KV positions need 3 pages; the owner holds 1, and 1 of 5 are free.*kv_cache_tokens"
    with pytest.raises(KVCacheTooSmallError, match=message):
        lay_out(pool, *rows_of(("b", 4, 8)))
    assert len(pool.block_table("b")) == 1, "a refusal allocates nothing"
    pool.free("a")
    lay_out(pool, *rows_of(("b", 4, 8)))


def test_an_owner_is_added_once():
    pool = PagePool(LAYOUT, 20, page_size=4)
    pool.add("a")
    with pytest.raises(ValueError, match="'a' already holds pages"):
        pool.add("a")


def test_unknown_owner_is_an_error():
    pool = PagePool(LAYOUT, 20, page_size=4)
    for call in (pool.free, pool.block_table, lambda owner: lay_out(pool, *rows_of((owner, 0, 1)))):
        with pytest.raises(KeyError):
            call("nobody")
