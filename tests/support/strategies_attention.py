"""Hypothesis strategies for the arguments of ``paged_attention``; see ``strategies``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch
from specdec_fast.trees.rows import TREE_MASK_BITS
from support.strategies import HEAD_DIMS, LAYOUTS, SEEDS, CallSizes, block_table_of, generator, laid_out


def tree_mask(rows: list[int], reach: int, spare: int, g: torch.Generator) -> Tensor:
    """Give each row a parent among the ``reach + 1`` before it, or none where they would begin before the first."""
    num_words = -(-max(rows, default=0) // TREE_MASK_BITS) + spare
    masks = [torch.zeros(0, num_words, dtype=torch.int32)]
    for count in rows:
        sees = torch.eye(count, num_words * TREE_MASK_BITS, dtype=torch.int64)
        for row in range(1, count):
            parent = int(torch.randint(max(-1, row - 1 - reach), row, (), generator=g))
            sees[row] += sees[parent] if parent >= 0 else 0
        words = (sees.unflatten(1, (num_words, TREE_MASK_BITS)) << torch.arange(TREE_MASK_BITS)).sum(-1)
        masks.append(words.int())  # wraps: bit 31 is the sign
    return torch.cat(masks)


@dataclass(frozen=True)
class AttentionCall:
    sequences: tuple[tuple[int, int], ...]  # (KV entries, rows)
    page_size: int
    kv_heads: int
    group: int
    head_dim: int
    params: AttentionParams  # without sinks
    reach: int | None  # of a tree's parents; None: chains
    layout: str
    spare: int  # unused places of the block table, and unused words of the tree mask
    dtype: torch.dtype
    seed: int
    value_dim: int = 0  # 0: as head_dim
    sinks: torch.dtype | None = None

    def make(self, device: torch.device) -> dict[str, Any]:
        g, rows = generator(self.seed), [count for _, count in self.sequences]
        pages = [-(-context // self.page_size) for context, _ in self.sequences]
        table, num_pages = block_table_of(pages, self.spare, g)
        dims = (self.head_dim, self.value_dim or self.head_dim)
        kv = torch.full((2, num_pages, self.page_size, self.kv_heads, max(dims)), math.nan, dtype=self.dtype)
        for b, (context, count) in enumerate(self.sequences):
            seen = torch.arange(self.first_seen(context, count), context)
            entries = torch.randn(2, len(seen), self.kv_heads, max(dims), generator=g).to(self.dtype)
            kv[:, table[b, seen // self.page_size].long(), seen % self.page_size] = entries
        query = torch.randn(sum(rows), self.kv_heads * self.group, self.head_dim, generator=g).to(self.dtype)
        mask = None if self.reach is None else tree_mask(rows, self.reach, self.spare, g).to(device)
        batch = PagedBatch(
            cu_seqlens_q=torch.tensor([0, *rows]).cumsum(0).int().to(device),
            seqused_k=torch.tensor([context for context, _ in self.sequences], dtype=torch.int32).to(device),
            block_table=table.to(device),
            max_seqlen_q=max(rows, default=0),
            max_seqlen_k=max((context for context, _ in self.sequences), default=0),
            tree_mask=mask,
        )
        params = self.params
        if self.sinks is not None:
            params = replace(params, sinks=2 * torch.randn(query.shape[1], generator=g).to(self.sinks).to(device))
        caches = tuple(cache[..., :dim].contiguous().to(device) for cache, dim in zip(kv, dims, strict=True))
        return {"query": laid_out(query.to(device), self.layout), "kv": caches, "batch": batch, "params": params}

    def has_rows(self) -> bool:
        return any(rows for _, rows in self.sequences)

    def first_seen(self, context: int, rows: int) -> int:
        """Where the earliest row, a chain's first or a tree's root, begins to see; the context's end without rows."""
        window = self.params.sliding_window or context
        chunk = self.params.attention_chunk or context + 1
        first = context - rows
        return max(first // chunk * chunk, first - window + 1) if rows else context


@st.composite
def attention_calls(draw: st.DrawFn, limits: CallSizes, trees: bool = False) -> AttentionCall:
    page_size = draw(st.sampled_from((1, 2, 7, 16, 64)))
    # contexts around the ends of pages, and of the 64 positions that a kernel likes to take at once
    ends = st.sampled_from((page_size, 64)).flatmap(
        lambda unit: st.integers(1, limits.context // unit).map(unit.__mul__)
    )
    contexts = st.builds(int.__add__, ends, st.integers(-1, 1)) | st.integers(0, limits.context)
    # one sequence in four has many rows: a prefill, or a chunk of one
    few = st.sampled_from((1, *range(2, limits.rows + 1), 0))
    rows = st.one_of(few, few, few, st.integers(1, limits.prefill))
    drawn = draw(st.lists(st.tuples(contexts, rows), min_size=draw(st.integers(0, 2)), max_size=limits.batch))
    sequences = tuple((context, min(context, count)) for context, count in drawn)
    kv_heads, spare = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    head_dim, dtype = draw(HEAD_DIMS), draw(st.sampled_from(limits.dtypes))
    words = -(-max((count for _, count in sequences), default=0) // TREE_MASK_BITS) + spare
    holds_tree = max(1, words * TREE_MASK_BITS)
    windows = st.sampled_from((1, 2, 5, 33, 64, 1000))
    if trees and not limits.windows_in_trees:
        windows = st.integers(holds_tree, holds_tree + 40)
    window = draw(st.none() | windows)
    return AttentionCall(
        sequences=sequences,
        page_size=page_size,
        kv_heads=kv_heads,
        group=draw(st.integers(1, min(8, limits.heads // kv_heads))),
        head_dim=head_dim,
        params=AttentionParams(
            scale=draw(st.sampled_from((head_dim**-0.5, 0.25))),
            sliding_window=window,
            attention_chunk=draw(st.none() | windows) if window is None else None,
            softcap=draw(st.sampled_from((None, None, 0.5, 30.0))),
        ),
        reach=draw(st.sampled_from((0, 1, 4, 100))) if trees else None,
        layout=draw(st.sampled_from(LAYOUTS)),
        spare=spare,
        dtype=dtype,
        seed=draw(SEEDS),
        value_dim=draw(st.just(0) | HEAD_DIMS),
        sinks=draw(st.none() | st.sampled_from((dtype, torch.float32))),
    )


# One output of this call is off by 2.2e-6 and no other by more than 8e-7: its largest term is the first that is added.
# The oracle's largest error on this very call is 9e-7, on others of its kind up to 1.6e-6.
LARGEST_TERM_FIRST = AttentionCall(
    sequences=((154, 13), (129, 2), (78, 1), (154, 4), (200, 3)),
    page_size=1,
    kv_heads=2,
    group=5,
    head_dim=31,
    params=AttentionParams(0.25, sliding_window=64, softcap=30.0),
    reach=0,
    layout="contiguous",
    spare=0,
    dtype=torch.float32,
    seed=70,
    value_dim=96,
    sinks=None,
)
