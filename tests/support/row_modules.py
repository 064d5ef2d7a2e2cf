"""A function of rows, as the layers of a drafter are: one layer of attention with random weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import embedding

from specdec_fast.batch.ragged_batch import AttentionParams
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import resolve
from specdec_fast.program import RowFunction
from support.programs import CPU

VOCAB, WIDTH, HEAD_DIM, KV_HEADS = 29, 12, 8, 2
OPS = resolve(CPU)


def function_of(dtype=torch.float32, spoil: Callable = lambda hidden, batch: hidden) -> RowFunction:
    """One layer of attention over token and carried row; ``spoil`` may do something that no program expresses."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape):
        return torch.randn(shape, generator=generator).div(shape[-1] ** 0.5).to(dtype)

    table, qkv, out, head = weight(VOCAB, WIDTH), weight(64, 2 * WIDTH), weight(WIDTH, 32), weight(VOCAB, WIDTH)

    def run(ops, pool, batch, carried, logit_rows):
        rows = torch.cat([embedding(batch.token_ids, table), carried], dim=-1)
        states = ops.linear(rows, qkv).unflatten(1, (-1, HEAD_DIM))
        query, key, value = states.split([4, KV_HEADS, KV_HEADS], dim=1)
        ops.append_kv_(*pool.layers[0], key, value, batch.slot_mapping)
        attended = ops.paged_attention(query, pool.layers[0], batch, AttentionParams(HEAD_DIM**-0.5))
        hidden = spoil(torch.tanh(carried + ops.linear(attended.flatten(1), out)), batch)
        return ops.linear(hidden if logit_rows is None else hidden[logit_rows], head), hidden

    return RowFunction(run, KVLayout.uniform(1, KV_HEADS, HEAD_DIM, dtype, CPU), WIDTH, WIDTH)


def pool_of(function, owners="abc"):
    pool = PagePool(function.layout, 256, 16)
    for owner in owners:
        pool.add(owner)
    return pool
