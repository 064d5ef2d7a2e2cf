"""Buckets of graphs: every batch fits into its own, there are few, and none keeps anything of an earlier batch."""

from __future__ import annotations

import itertools
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_fast.batch.ragged_batch import RowPadding, Rows
from specdec_fast.kv_cache.forward_layout import lay_out, lay_out_on_host
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.runner.graphs.buckets import BatchSize, Bucket, GraphLimits, size_of
from specdec_fast.runner.graphs.inputs import Inputs
from support.graphs import CPU, LIMITS, OWNERS, ROOM, RULE, batches, opened_pool


def _layout():
    return KVLayout.uniform(1, 1, 8, torch.float32, CPU)


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    limits=st.builds(GraphLimits, st.integers(1, 40), st.integers(1, 9)),
    multiple=st.sampled_from((1, 4, 8, 64)),
    page_size=st.sampled_from((1, 16, 48, 1024)),
)
def test_a_bucket_holds_its_batch(counts, limits, multiple, page_size):
    row_padding = RowPadding(multiple, largest=256)
    pool = PagePool(_layout(), len(counts) * (9 + page_size), page_size, row_padding)
    for owner in range(len(counts)):
        pool.add(owner)
    rows = [Rows(owner, 0, count) for owner, count in enumerate(counts)]
    batch = lay_out(pool, rows, torch.arange(sum(counts)))
    bucket = limits.bucket(size_of(batch), page_size, row_padding)
    if len(counts) > limits.sequences or max(counts) > limits.rows_each:
        assert bucket is None
        return
    if bucket is None:
        assert 2 * sum(counts) * multiple > row_padding.largest or multiple * len(counts) > row_padding.largest
        return
    assert bucket.num_rows % multiple == bucket.one_each % multiple == 0
    assert sum(counts) <= bucket.num_rows <= row_padding.largest
    assert len(counts) <= bucket.one_each <= bucket.num_sequences
    assert bucket.max_seqlen_q in (1, limits.rows_each)
    assert bucket.num_pages * page_size >= 512
    filled = Inputs(bucket, page_size, CPU)
    filled.fill(batch)
    each = filled.batch.cu_seqlens_q.diff()
    assert each.tolist()[: len(counts)] == counts
    assert each.sum() == bucket.num_rows, "every row has an owner, or attention would leave it unwritten"
    assert 0 <= each.min() <= each.max() <= bucket.max_seqlen_q
    assert torch.equal(filled.batch.seqused_k[len(counts) :], each[len(counts) :])
    assert filled.batch.slot_mapping[sum(counts) :].lt(page_size).all(), "on the scratch page"
    assert not filled.batch.block_table[len(counts) :].any()


@pytest.mark.parametrize(("multiple", "most"), [(1, 30), (4, 24)])
def test_there_are_few_buckets(multiple, most):
    """A graph costs a second to record: all batches of eight sequences and K = 5 share some."""
    row_padding, limits, found = RowPadding(multiple, 512), GraphLimits(8, 6), set()
    pool = PagePool(_layout(), 8 * 32, 16, row_padding)
    for owner in range(8):
        pool.add(owner)
    for batch_size in range(1, 9):
        for total in range(batch_size, 6 * batch_size + 1):
            counts = [total // batch_size + (i < total % batch_size) for i in range(batch_size)]
            batch = lay_out(pool, [Rows(i, 0, n) for i, n in enumerate(counts)], torch.zeros(total, dtype=torch.int64))
            found.add(limits.bucket(size_of(batch), 16, row_padding))
    assert None not in found
    assert len(found) <= most


def test_pages_are_rounded_up_and_what_is_too_large_has_no_bucket():
    row_padding = RowPadding(4, 16)
    pool = PagePool(_layout(), 4096, 16, row_padding)
    pool.add("long")
    pool.add("other")

    def bucket(*rows):
        batch = lay_out(pool, list(rows), torch.zeros(sum(r.count for r in rows), dtype=torch.int64))
        return GraphLimits(8, 6).bucket(size_of(batch), 16, row_padding)

    pages = [bucket(Rows("long", start, 1)).num_pages for start in (0, 511, 512, 1024)]
    assert pages == [32, 32, 64, 128]
    assert bucket(Rows("long", 0, 7)) is None, "more rows each than K + 1"
    assert bucket(Rows("long", 0, 6)) == Bucket(8, 4, 6, 32, 4)
    batch = lay_out(pool, [Rows("long", 0, 17)], torch.zeros(17))
    assert GraphLimits(8, 20).bucket(size_of(batch), 16, row_padding) is None, "not proved"


@given(
    counts_of=st.lists(st.lists(st.integers(1, LIMITS.rows_each), min_size=1, max_size=5), min_size=1, max_size=5),
    page_size=st.sampled_from((1, 16)),
)
def test_a_batch_sent_from_the_host_is_the_batch_copied_on_the_device(counts_of, page_size):
    """In one and the same bucket, one batch after the other: the arrays of the host are written in turn."""
    pool = PagePool(_layout(), OWNERS * (ROOM + page_size), page_size, RULE)
    for owner in range(OWNERS):
        pool.add(owner)
    bucket = Bucket(24, 16, LIMITS.rows_each, 32 * 16 // page_size, 8)
    filled, sent = (Inputs(bucket, page_size, CPU) for _ in range(2))
    for turn, counts in enumerate(counts_of):
        rows, num_rows = [Rows(i, 2 * turn, count) for i, count in enumerate(counts)], sum(counts)
        token_ids = torch.arange(num_rows) + 7
        filled.fill(lay_out(pool, rows, token_ids))
        sent.send(lay_out_on_host(pool, rows), {}, token_ids=token_ids.tolist())
        for field in fields(sent.batch):
            if isinstance(tensor := getattr(sent.batch, field.name), torch.Tensor):
                assert torch.equal(tensor, getattr(filled.batch, field.name)), field.name
        drafted = [token - 1 for token in range(num_rows) if token not in itertools.accumulate(counts, initial=0)]
        sent.drafted[: len(drafted)] = torch.tensor(drafted, dtype=torch.int64)
        last = [100 + i for i in range(len(counts))]
        sent.send(lay_out_on_host(pool, rows), {}, first_ids=last)
        expected = [[last[i], *(drafted.pop(0) for _ in range(count - 1))] for i, count in enumerate(counts)]
        expected = [min(token, 90) if place else token for own in expected for place, token in enumerate(own)]
        assert sent.token_ids(91).tolist() == expected + [0] * (bucket.num_rows - num_rows)


def test_sampling_of_an_earlier_batch_is_gone(model):
    pool, bucket = opened_pool(model), Bucket(8, 8, LIMITS.rows_each, 32, 8)
    inputs = Inputs(bucket, pool.page_size, CPU)
    for counts, temperature in (([1, 1, 1], 0.5), ([1], 0.0), ([1, 1], 0.25), ([1], 0.125)):
        layout = lay_out_on_host(pool, [Rows(i, 0, n) for i, n in enumerate(counts)])
        column = np.full(len(counts), temperature)
        inputs.send(layout, {"temperatures": column, "positions": column}, first_ids=[5] * len(counts))
        expected = [*column.tolist(), *[0.0] * (8 - len(counts))]
        assert inputs.sampling.temperatures.tolist() == expected
        assert inputs.sampling.positions.tolist() == [int(value) for value in expected]


def test_nothing_is_left_of_an_earlier_batch(model):
    """A bucket filled with a batch does not depend on what it held before."""
    pool = opened_pool(model)
    batch = next(batches(pool, [[2, 1, 4]]))
    bucket = LIMITS.bucket(size_of(batch), pool.page_size, RULE)
    clean, used = (Inputs(bucket, pool.page_size, CPU) for _ in range(2))
    for field in fields(used.batch):
        if isinstance(tensor := getattr(used.batch, field.name), torch.Tensor):
            tensor.fill_(10**8)
    for inputs in (clean, used):
        inputs.fill(batch)
    for field in fields(used.batch):
        if isinstance(tensor := getattr(used.batch, field.name), torch.Tensor):
            assert torch.equal(tensor, getattr(clean.batch, field.name)), field.name


def test_prefills_of_few_rows_share_few_buckets():
    """Rows that fill a bucket are a sequence of their own; larger buckets waste at most 255 rows."""
    limits = GraphLimits(8, 6, prompt_rows=1024)

    def bucket(num_rows, batch_size=1, num_pages=3, limits=limits, most=2048, num_logits=1):
        size = BatchSize(num_rows, batch_size, num_rows, num_pages)
        return limits.prompt_bucket(size, num_logits, 16, RowPadding(1, most))

    rows = {count: bucket(count).num_rows for count in (7, 64, 65, 256, 257, 700, 1024)}
    assert rows == {7: 64, 64: 64, 65: 128, 256: 256, 257: 512, 700: 768, 1024: 1024}
    assert bucket(100, batch_size=3) == Bucket(128, 5, 128, 32, 5)
    assert bucket(100, num_pages=33).num_pages == 64
    assert [bucket(100, 7, num_logits=count).num_logit_rows for count in (1, 2, 48)] == [1, 48, 48]
    assert bucket(30, 7, num_logits=30, limits=GraphLimits(16, 9, prompt_rows=1024)).num_logit_rows == 64
    assert bucket(100, 7, num_logits=49) is None, "more than a verification has"
    assert bucket(1025) is None
    assert bucket(100, batch_size=9) is None
    assert bucket(100, 9, num_logits=9, limits=GraphLimits(16, 6, prompt_rows=1024)).num_sequences == 17
    assert bucket(100, limits=GraphLimits(8, 6)) is None
    assert bucket(100, most=120) is None, "not proved"
