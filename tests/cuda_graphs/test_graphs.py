"""Graphs, replaced by repeated calls: their bits, when they are recorded, and for how long they are kept."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.batch.sampling_batch import Sampling, after
from specdec_fast.device_copy import to_host
from specdec_fast.drafters.draft_model.drafter import ModelDrafter
from specdec_fast.kv_cache.forward_layout import decode_batches, lay_out, lay_out_on_host
from specdec_fast.runner.drafting import chosen_tokens
from specdec_fast.runner.graphs import store
from specdec_fast.runner.graphs.capture import Captured
from specdec_fast.trees.rows import rows_of_trees
from support.graphs import LIMITS, OWNERS, Everything, batches, eagerly, opened_pool
from support.models import VOCAB_SIZE

counts_of_batches = st.lists(st.lists(st.integers(1, LIMITS.rows_each), min_size=1, max_size=5), min_size=1, max_size=6)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(counts_of=counts_of_batches, seed=st.integers(0, 2**31), page_size=st.sampled_from((1, 16)))
def test_logits_and_pages_have_the_bits_of_eager_forwards(model, counts_of, seed, page_size):
    pools = [opened_pool(model, page_size) for _ in range(2)]
    for eager, graphed in zip(*(batches(pool, counts_of, seed) for pool in pools), strict=True):
        expected = eagerly(model, eager, pools[0])
        assert torch.equal(model.forward(graphed, pools[1]), expected)
        wanted = eager.last_rows.flip(0)
        assert torch.equal(model.forward(graphed, pools[1], wanted), expected[wanted])
    assert torch.equal(pools[0].tensors[0][:, :, 1:], pools[1].tensors[0][:, :, 1:]), "page 0 is scratch"
    assert 0 < model.graphs.num_captured <= len(counts_of)


SAMPLING = {
    "temperatures": (np.float64, st.sampled_from((0.0, 0.7, 1.3))),
    "top_k": (np.int32, st.sampled_from((0, 1, 7))),
    "top_p": (np.float64, st.sampled_from((1.0, 0.6))),
    "min_p": (np.float64, st.sampled_from((0.0, 0.1))),
    "seeds": (np.int64, st.integers(0, 2**40)),
    "positions": (np.int64, st.integers(0, 99)),
}


@st.composite
def choices(draw, batch_size):
    """Draw columns of sampling, or none: then all sequences are greedy."""
    if draw(st.booleans()):
        return {}
    return {
        name: np.array([draw(values) for _ in range(batch_size)], dtype) for name, (dtype, values) in SAMPLING.items()
    }


def sampling_from(columns):
    if not columns:
        return None
    size = len(columns["seeds"])
    return Sampling(
        **{name: torch.from_numpy(column.copy()) for name, column in columns.items()},
        repetition_penalties=torch.ones(size, dtype=torch.float64),
        seen_ids=torch.zeros(0, dtype=torch.int64),
        cu_seen=torch.zeros(size + 1, dtype=torch.int32),
    )


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(counts=st.lists(st.integers(1, 2), min_size=1, max_size=5), start=st.integers(0, 20), data=st.data())
def test_a_drafting_loop_has_the_bits_of_eager_forwards(model, counts, start, data):
    pools, columns = filled_pools(model, start + 1), data.draw(choices(len(counts)))
    rows = [Rows(owner, start + 1, count) for owner, count in enumerate(counts)]
    tokens, sampling, expected = torch.arange(sum(counts)), sampling_from(columns), []
    for batch_of in decode_batches(pools[0], rows, LIMITS.num_forwards):
        batch = batch_of(token_ids=tokens)
        logits = eagerly(model, batch, pools[0], batch.last_rows)
        tokens = chosen_tokens(model.ops, logits, VOCAB_SIZE, sampling)
        sampling = sampling and after(sampling, tokens)
        expected.append(tokens)
    for _ in range(2):
        chosen = drafted_by_graph(model, pools[1], rows, columns=columns)
        assert torch.equal(chosen, torch.stack(expected, dim=1))
        assert torch.equal(pools[0].tensors[0][:, :, 1:], pools[1].tensors[0][:, :, 1:])
    assert drafted_by_graph(model, pools[1], rows, LIMITS.num_forwards - 1) is None


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=5), start=st.integers(0, 20), data=st.data())
def test_a_verification_has_the_bits_of_an_eager_forward(model, counts, start, data):
    """Draft tokens are the target's own choices, a few of them changed; ids beyond the vocabulary are clamped."""
    pools, columns = filled_pools(model, start + 1), data.draw(choices(len(counts)))
    rows = [Rows(owner, start + 1, count) for owner, count in enumerate(counts)]
    first = list(accumulate(counts, initial=0))
    ids, sampling = torch.arange(sum(counts)), sampling_from(columns)
    for place in range(1, max(counts)):
        chosen = model.ops.verify_chain(
            eagerly(model, lay_out(pools[0], rows, ids), pools[0]), ids, *seqlens(first, sampling)
        )
        for start_of, count in zip(first, counts, strict=False):
            if place < count and data.draw(st.integers(0, 3)):
                ids[start_of + place] = chosen[0][start_of + place - 1]
    logits = eagerly(model, lay_out(pools[0], rows, ids), pools[0])
    expected = model.ops.verify_chain(logits, ids, *seqlens(first, sampling))
    is_draft = torch.ones(len(ids), dtype=torch.bool)
    is_draft[first[:-1]] = False
    drafted = ids[is_draft] + VOCAB_SIZE * (ids[is_draft] == VOCAB_SIZE - 1)
    for _ in range(2):
        layout = lay_out_on_host(pools[1], rows)
        found = model.graphs.verify(layout, ids[~is_draft].tolist(), drafted, columns, pools[1], None)
        assert torch.equal(found[0], logits)
        assert to_host(found[1]) == [part.tolist() for part in expected]
        assert torch.equal(pools[0].tensors[0][:, :, 1:], pools[1].tensors[0][:, :, 1:])


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sizes=st.lists(st.integers(0, 8), min_size=1, max_size=5), start=st.integers(0, 20), data=st.data())
def test_a_verification_of_trees_has_the_bits_of_an_eager_forward(model, sizes, start, data):
    """Siblings differ in their tokens, of which one is the target's own choice now and then."""
    model.use_graphs(replace(LIMITS, tree_rows=9))
    model.graphs.asked = Everything()
    pools, columns = filled_pools(model, start + 1), data.draw(choices(len(sizes)))
    rows = [Rows(owner, start + 1, size + 1) for owner, size in enumerate(sizes)]
    parents = [data.draw(st.integers(-1, node - 1)) for size in sizes for node in range(size)]
    trees, sampling = rows_of_trees(parents, sizes), sampling_from(columns)
    first, above = list(accumulate((size + 1 for size in sizes), initial=0)), torch.from_numpy(trees.parents)
    ids = torch.arange(first[-1]) % VOCAB_SIZE
    for _ in range(max(sizes, default=0)):
        logits = eagerly(model, lay_out(pools[0], rows, ids, trees=trees), pools[0])
        expected = model.ops.verify_chain(logits, ids, *seqlens(first, sampling), above)
        for start_of, stop in pairwise(first):
            row = data.draw(st.integers(start_of, stop - 1))
            wanted = int(expected[0][start_of + max(int(above[row]), 0)])
            siblings = [r for r in range(start_of + 1, stop) if above[r] == above[row]]
            if row > start_of and wanted not in ids[siblings]:
                ids[row] = wanted
    logits = eagerly(model, lay_out(pools[0], rows, ids, trees=trees), pools[0])
    expected = model.ops.verify_chain(logits, ids, *seqlens(first, sampling), above)
    is_draft = torch.ones(len(ids), dtype=torch.bool)
    is_draft[first[:-1]] = False
    for _ in range(2):
        layout, last = lay_out_on_host(pools[1], rows), ids[~is_draft].tolist()
        found = model.graphs.verify(layout, last, ids[is_draft], columns, pools[1], None, trees)
        assert torch.equal(found[0], logits)
        assert to_host(found[1]) == [part.tolist() for part in expected]
        assert torch.equal(pools[0].tensors[0][:, :, 1:], pools[1].tensors[0][:, :, 1:])


def filled_pools(model, length):
    """Return two pools whose owners have entries of ``length`` tokens."""
    pools = [opened_pool(model) for _ in range(2)]
    for pool in pools:
        for batch in batches(pool, [[length] * OWNERS]):
            eagerly(model, batch, pool)
    return pools


def seqlens(first, sampling):
    return torch.tensor(first, dtype=torch.int32), sampling


def drafted_by_graph(model, pool, rows, num_forwards=LIMITS.num_forwards, columns=None, vocab_size=VOCAB_SIZE):
    layout = lay_out_on_host(pool, rows, ahead=LIMITS.num_forwards - 1)
    token_ids = list(range(sum(row.count for row in rows)))
    return model.graphs.draft(layout, token_ids, num_forwards, columns or {}, pool, vocab_size)


def test_a_bucket_is_recorded_when_it_is_asked_for_again(model):
    model.graphs.asked = set()
    pool = opened_pool(model)
    numbers = []
    for batch in batches(pool, [[2], [2], [2], [1, 1]]):
        model.forward(batch, pool)
        numbers.append((model.graphs.num_captured, model.graphs._capture.num_replayed))
    assert numbers == [(0, 0), (1, 1), (1, 2), (1, 2)]


def test_another_pool_gets_graphs_of_its_own(model):
    pool = opened_pool(model)
    first = model.forward(next(batches(pool, [[3, 2]])), pool).clone()
    other = opened_pool(model)
    model.forward(next(batches(other, [[1]])), other)
    assert model.graphs.num_captured == 1
    third = opened_pool(model)
    assert torch.equal(model.forward(next(batches(third, [[3, 2]])), third), first)


def test_graphs_do_not_keep_a_pool(model):
    """An engine drops its pool before it makes a larger one; the memory must be free by then."""
    model.graphs._capture = lambda run: Captured(lambda: None, run())
    pool = opened_pool(model)
    model.forward(next(batches(pool, [[3, 2]])), pool)
    assert model.graphs.num_captured == 1
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None


def test_where_there_are_too_many_all_go(model, monkeypatch):
    """All at once, because destroying one frees memory that the others use: see ``CudaCapture``."""
    monkeypatch.setattr(store, "MOST_GRAPHS", 2)
    pool = opened_pool(model)
    eager_pool = opened_pool(model)
    turns = [[1], [2], [1], [3, 3], [1], [2], [3, 3]]
    numbers = []
    for batch, eager in zip(batches(pool, turns), batches(eager_pool, turns), strict=True):
        assert torch.equal(model.forward(batch, pool), eagerly(model, eager, eager_pool))
        numbers.append(model.graphs.num_captured)
    assert numbers == [1, 2, 2, 1, 2, 1, 2]


def test_graphs_do_not_keep_a_drafter(model):
    """One model may serve drafter after drafter; each of them holds a pool."""
    model.graphs._capture = lambda run: Captured(lambda: None, run())
    drafter = ModelDrafter(model, VOCAB_SIZE)
    drafter.prepare(OWNERS * 32, 16)
    for owner in range(OWNERS):
        drafter.pool.add(owner)
    chosen = drafted_by_graph(model, drafter.pool, [Rows(0, 0, 2)])
    assert chosen.shape == (1, LIMITS.num_forwards)
    assert model.graphs.num_captured == 1
    gone = [weakref.ref(drafter), weakref.ref(drafter.pool)]
    del drafter
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_another_vocabulary_gets_a_graph_of_its_own(model):
    """One draft model may serve targets of different vocabularies."""
    pool = opened_pool(model)
    numbers, largest = [], []
    for vocab_size in (VOCAB_SIZE, 5, VOCAB_SIZE, 5):
        largest.append(int(drafted_by_graph(model, pool, [Rows(0, 0, 2)], vocab_size=vocab_size).max()))
        numbers.append(model.graphs.num_captured)
    assert numbers == [1, 2, 2, 2]
    assert max(largest[1], largest[3]) < 5 <= largest[0]


def test_forwards_with_and_without_hidden_states_have_graphs_of_their_own(model):
    model.use_taps((1, "final"))
    pool, eager_pool = opened_pool(model), opened_pool(model)
    counts_of = [[2, 1, 1], [1, 2], [2, 1, 1], [1, 2]]
    pairs = zip(batches(eager_pool, counts_of), batches(pool, counts_of), strict=True)
    for turn, (eager, graphed) in enumerate(pairs):
        expected, found = (model.empty_hidden_states(len(eager.token_ids)).fill_(float("nan")) for _ in range(2))
        logits = model.hf.forward(eager, eager_pool, None, expected)
        wanted = found if turn >= 2 else None
        assert torch.equal(model.forward(graphed, pool, None, wanted), logits)
        assert wanted is None or torch.equal(found, expected)
    assert model.graphs.num_captured == 4


@pytest.mark.parametrize(
    ("counts_of", "num_graphs"), [([[17], [40], [17]], 1), ([[9, 30], [21, 5, 6]], 2)], ids=["alone", "several"]
)
def test_prefills_of_few_rows_have_the_bits_of_eager_forwards(model, counts_of, num_graphs):
    """One row's logits are wanted, another one each time; more rows than the limit have no graph."""
    model.graphs._limits = replace(LIMITS, prompt_rows=64)
    pools = [opened_pool(model) for _ in range(2)]
    for eager, graphed in zip(*(batches(pool, counts_of) for pool in pools), strict=True):
        for row in (0, int(eager.last_rows[-1])):
            wanted = torch.tensor([row], device="cpu")
            expected = eagerly(model, eager, pools[0], wanted)
            assert torch.equal(model.forward(graphed, pools[1], wanted), expected)
    assert torch.equal(pools[0].tensors[0][:, :, 1:], pools[1].tensors[0][:, :, 1:]), "page 0 is scratch"
    assert model.graphs.num_captured == num_graphs
    (longer,) = batches(opened_pool(model), [[65]])
    assert model.graphs.forward(longer, pools[0], longer.last_rows) is None


def test_draft_tokens_beside_prompts_have_the_bits_of_eager_forwards(model):
    """The logits of several rows are wanted: one graph serves as many as a verification may have."""
    model.graphs._limits = replace(LIMITS, prompt_rows=64)
    counts_of = [[9, 2, 30], [17, 1, 5]]
    pools = [opened_pool(model) for _ in range(2)]
    for turn, (eager, graphed) in enumerate(zip(*(batches(pool, counts_of) for pool in pools), strict=True)):
        last = eager.last_rows.tolist()
        for rows in (last, [last[0], last[1] - 1, last[1], last[2]][turn:], last[:1]):
            wanted = torch.tensor(rows, device="cpu")
            expected = eagerly(model, eager, pools[0], wanted)
            assert torch.equal(model.forward(graphed, pools[1], wanted), expected)
    assert model.graphs.num_captured == 2, "for several rows, and for one"
    assert torch.equal(pools[0].tensors[0][:, :, 1:], pools[1].tensors[0][:, :, 1:]), "page 0 is scratch"
