"""Forwards as graphs under test: a pool of several owners, and batches of them."""

from __future__ import annotations

import torch

from specdec_fast.batch.ragged_batch import RowPadding, Rows
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.runner.graphs.buckets import GraphLimits
from support.models import VOCAB_SIZE

CPU = torch.device("cpu")
LIMITS = GraphLimits(sequences=5, rows_each=4, num_forwards=3)
RULE = RowPadding(multiple=4, largest=512)  # one thread: fp32 linears are invariant there
OWNERS, ROOM = 6, 70


class Everything:
    """A set that holds every bucket, as if each had been used before."""

    def __contains__(self, key):
        return True

    def add(self, key):
        """Do nothing."""


def opened_pool(model, page_size=16):
    pool = PagePool(model.layout, OWNERS * (ROOM + page_size), page_size, model.row_padding)
    for owner in range(OWNERS):
        pool.add(owner)
    return pool


def eagerly(model, batch, pool, logit_rows=None):
    return model.hf.forward(batch, pool, logit_rows)


def batches(pool, counts_of, seed=0):
    """Yield batches of the pool's owners; each owner continues where it stopped, and owners take turns."""
    generator, lengths = torch.Generator().manual_seed(seed), [0] * OWNERS
    for turn, counts in enumerate(counts_of):
        rows = []
        for i, count in enumerate(counts):
            owner = (i + turn) % OWNERS
            rows.append(Rows(owner, lengths[owner], count))
            lengths[owner] += count
        yield lay_out(pool, rows, torch.randint(VOCAB_SIZE, (sum(counts),), generator=generator))
