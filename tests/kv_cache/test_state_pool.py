"""State slots: what a forward replays and stores, rows one by one, growth, and what is refused."""

from __future__ import annotations

import pytest
import torch

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.batch.recurrent_batch import RecurrentBatch
from specdec_fast.errors import KVCacheAllocationError
from specdec_fast.kv_cache.forward_layout import decode_batches, lay_out
from specdec_fast.kv_cache.layer_layout import KVLayout, KVShape
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.kv_cache.state_pool import StatePool, StateShape

CPU = torch.device("cpu")
CONV = StateShape("conv_rows_", (3, 8), 0, torch.float16)
DELTA = StateShape("linear_attention_rows_", (2, 4, 4), 22)
K = 3


def pool_of(*owners, num_owners=0):
    layout = KVLayout((KVShape(1, 8, 8),), (0,), torch.float16, CPU, (3,), (CONV, DELTA), K)
    pool = PagePool(layout, 64, 4, num_owners=num_owners)
    for owner in owners:
        pool.add(owner)
    return pool


def arrays(batch):
    recurrent = batch.recurrent
    return [getattr(recurrent, name).tolist() for name in ("state_lengths", "num_replayed", "num_stored")]


def laid_out(pool, *rows):
    return lay_out(pool, list(rows), torch.zeros(sum(row.count for row in rows), dtype=torch.int64))


def test_a_prompt_a_verification_and_its_replay():
    pool = pool_of("a", "b")
    assert arrays(laid_out(pool, Rows("a", 0, 5), Rows("b", 0, 2))) == [[0, 0], [0, 0], [5, 2]]
    assert arrays(laid_out(pool, Rows("a", 5, 4, 3), Rows("b", 2, 3))) == [[5, 2], [0, 0], [1, 3]]
    # two of a's three draft tokens were accepted: they are replayed, and stored with the next committed one
    assert arrays(laid_out(pool, Rows("a", 8, 3, 2))) == [[6], [2], [3]]
    assert arrays(laid_out(pool, Rows("a", 9, 1))) == [[9], [0], [1]]
    assert laid_out(pool, Rows("b", 5, 1)).recurrent.slots.tolist() == [pool.place("b")]


def test_a_drafting_loop_stores_committed_rows_alone():
    pool = pool_of("a", "b")
    batches = decode_batches(pool, [Rows("a", 0, 4), Rows("b", 0, 2)], 3)
    tokens = [torch.zeros(n, dtype=torch.int64) for n in (6, 2, 2)]
    found = [arrays(batch(token_ids=ids)) for batch, ids in zip(batches, tokens, strict=True)]
    assert found == [[[0, 0], [0, 0], [4, 2]], [[4, 2], [0, 0], [0, 0]], [[4, 2], [1, 1], [0, 0]]]
    assert arrays(laid_out(pool, Rows("b", 4, 1, 1))) == [[2], [2], [0]]


@pytest.mark.parametrize(("replayed", "stored"), [(0, 3), (2, 3), (2, 5), (1, 0), (0, 1)])
def test_rows_one_by_one_do_what_they_do_together(replayed, stored):
    def tensor(*values):
        return torch.tensor(values, dtype=torch.int32)

    together = RecurrentBatch(
        cu_seqlens=tensor(0, 3),
        slots=tensor(2),
        state_lengths=tensor(7),
        num_replayed=tensor(replayed),
        num_stored=tensor(stored),
    )
    length = 7
    for i, each in enumerate(together.one_by_one(torch.zeros(3, dtype=torch.int64))):
        assert each.cu_seqlens.tolist() == [0, 1]
        assert each.slots.tolist() == [2]
        assert each.state_lengths.tolist() == [length]
        assert length + int(each.num_replayed) == 7 + replayed + i  # its position
        length += int(each.num_stored)
    assert length == 7 + stored


def test_an_owner_begins_at_position_0():
    pool = pool_of("a")
    laid_out(pool, Rows("a", 0, 5))
    pool.free("a")
    pool.add("b")
    assert arrays(laid_out(pool, Rows("b", 0, 1))) == [[0], [0], [1]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (Rows("a", 3, 1), "new rows come .-2. rows later; expected 0 to 3"),  # the forward before failed
        (Rows("a", 9, 1), "new rows come .4. rows later"),
        (Rows("a", 5, 5, 4), "4 draft tokens; the state slots have room for 3"),
    ],
)
def test_rows_that_a_slot_cannot_hold_are_refused(rows, message):
    pool = pool_of("a")
    laid_out(pool, Rows("a", 0, 5))
    with pytest.raises((RuntimeError, ValueError), match=message):
        laid_out(pool, rows)
    assert pool.states.lengths[pool.place("a")] == 5
    pool.states.forget(pool.place("a"))
    assert arrays(laid_out(pool, Rows("a", 0, 6))) == [[0], [0], [6]]


def test_growth_keeps_states_and_scratch():
    pool = pool_of("a", num_owners=1)
    for number, tensors in enumerate(pool.states.tensors):
        for tensor in tensors:
            tensor[1] = number + 1
    laid_out(pool, Rows("a", 0, 5))
    larger = pool.grown(pool.num_tokens, num_owners=3)
    larger.add("b")
    larger.add("c")
    assert larger.states.num_slots == 4
    assert {larger.place(owner) for owner in "abc"} == {1, 2, 3}
    assert arrays(laid_out(larger, Rows("a", 5, 1))) == [[5], [0], [1]]
    for number, tensors in enumerate(larger.states.tensors):
        assert all((tensor[1] == number + 1).all() for tensor in tensors)
    assert larger.pages.states.addresses.tolist() == [
        [tensors[0].data_ptr(), tensors[1].data_ptr() if len(tensors) > 1 else 0] for tensors in larger.states.tensors
    ]


def test_bytes_are_those_of_the_tensors():
    pool = pool_of(num_owners=2)
    tensors = [tensor for each in pool.states.tensors for tensor in each]
    assert sum(tensor.nbytes for tensor in tensors) == 3 * pool.layout.bytes_per_sequence
    assert [tuple(tensor.shape[1:]) for tensor in tensors] == [(3 + K, 8), (2, 4, 4), (2 * K + 1, 22)]


def test_memory_that_cannot_be_allocated_is_named():
    huge = StateShape("linear_attention_rows_", (2**14, 2**14, 2**10), 4)
    with pytest.raises(
        KVCacheAllocationError, match=r"recurrent states of 8 sequences need \d+.* lower max_batch_size"
    ):
        StatePool((huge,), 9, K, CPU)


def test_no_state_no_arrays():
    layout = KVLayout.uniform(1, 1, 8, torch.float16, CPU)
    pool = PagePool(layout, 64, 4)
    pool.add("a")
    assert pool.states is None
    assert laid_out(pool, Rows("a", 0, 5)).recurrent is None
    assert pool.spans([Rows("a", 5, 1)]).spans == [(pool.place("a"), 5, 1, 0, 0)]
