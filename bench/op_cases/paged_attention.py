"""Arguments of ``paged_attention``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.op_cases.case import Case, OpCases
from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch
from specdec_fast.trees.rows import TREE_MASK_BITS


@dataclass(frozen=True)
class PagedShape:
    """Rows of any kind at the ends of their contexts; ``AttentionShape`` has fewer kinds, and the sizes of serving."""

    contexts: tuple[int, ...]  # KV entries per sequence, new rows included
    rows: tuple[int, ...]  # query rows per sequence
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int | None = None  # None: as head_dim
    page_size: int = 16
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    sinks_dtype: torch.dtype | None = None  # None: as the query
    tree: bool = False
    attention_chunk: int | None = None

    def draw(self, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments of ``paged_attention``; what must not be read is NaN."""
        value_dim = self.value_dim or self.head_dim
        kv, block_table = self._paged(value_dim, generator, dtype)
        query = torch.randn(self.heads, sum(self.rows), self.head_dim, generator=generator).to(dtype)
        batch = PagedBatch(
            cu_seqlens_q=torch.tensor([0, *self.rows]).cumsum(0).to(torch.int32),
            seqused_k=torch.tensor(self.contexts, dtype=torch.int32),
            block_table=block_table,
            max_seqlen_q=max(self.rows, default=0),
            max_seqlen_k=max(self.contexts, default=0),
            tree_mask=_random_trees(self.rows, generator) if self.tree else None,
        )
        sinks = torch.randn(self.heads, generator=generator).to(self.sinks_dtype or dtype) if self.sinks else None
        rule = (self.head_dim**-0.5, self.sliding_window, self.softcap, sinks, self.attention_chunk)
        return {
            "query": query.transpose(0, 1),
            "kv": (kv[0, ..., : self.head_dim].contiguous(), kv[1, ..., :value_dim].contiguous()),
            "batch": batch,
            "params": AttentionParams(*rule),
        }

    def _paged(self, value_dim: int, generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        pages_per_sequence = [-(-context // self.page_size) for context in self.contexts]
        num_pages = sum(pages_per_sequence) + 1
        size = (2, num_pages, self.page_size, self.kv_heads, max(self.head_dim, value_dim))
        kv = torch.full(size, float("nan"), dtype=dtype)  # entries that no sequence owns must not be read
        order = (torch.randperm(num_pages - 1, generator=generator) + 1).to(torch.int32)
        block_table = torch.zeros(len(self.contexts), max(pages_per_sequence, default=1), dtype=torch.int32)
        used = 0
        for b, (context, count) in enumerate(zip(self.contexts, pages_per_sequence, strict=True)):
            pages = order[used : used + count]
            used += count
            block_table[b, :count] = pages
            entries = torch.randn(2, count * self.page_size, *size[3:], generator=generator).to(dtype)
            entries[:, context:] = float("nan")  # stale entries beyond the context must not be read (I2, I4)
            kv[:, pages.long()] = entries.unflatten(1, (count, self.page_size))
        return kv, block_table


def _random_trees(rows: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Give every row except a sequence's first a random earlier row as its parent; return the tree mask."""
    num_words = -(-max(rows, default=1) // TREE_MASK_BITS)
    masks = []
    for count in rows:
        ancestors: list[int] = []  # of each row, as bits of one integer
        for row in range(count):
            parent = int(torch.randint(row, (), generator=generator)) if row else None
            ancestors.append(1 << row | (0 if parent is None else ancestors[parent]))
        for bits in ancestors:
            words = [bits >> TREE_MASK_BITS * word & 0xFFFFFFFF for word in range(num_words)]
            masks.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(masks, dtype=torch.int32).view(-1, num_words)


def _bytes_moved(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams) -> int:
    entries = batch.seqused_k
    rows = batch.cu_seqlens_q.diff()
    if params.sliding_window is not None:
        entries = entries.minimum(params.sliding_window + rows - 1)
    if params.attention_chunk is not None:  # from the beginning of the first row's chunk on
        entries = entries - (entries - rows).clamp(min=0) // params.attention_chunk * params.attention_chunk
    (num_rows, num_heads, head_dim) = query.shape
    (num_kv_heads, value_dim) = kv[1].shape[2:]
    numbers = int(entries.sum()) * num_kv_heads + num_rows * num_heads  # keys and queries, values and output
    return numbers * (head_dim + value_dim) * query.element_size()


_CAPPED = partial(PagedShape, sliding_window=5, softcap=2.0)
_CASES = (
    ("prefill", "rows of a whole prompt, ragged", PagedShape((1, 7, 33), (1, 7, 33))),
    ("verify", "K + 1 rows at unequal contexts", PagedShape((6, 40, 129, 17), (6, 6, 3, 1))),
    ("decode", "one row each", PagedShape((1, 16, 17, 90), (1, 1, 1, 1))),
    ("page_boundary", "contexts that end at a page boundary", PagedShape((16, 32, 15), (2, 5, 3))),
    ("window", "a sliding window shorter than the context", PagedShape((40, 9), (6, 6), sliding_window=8)),
    ("window_decode", "one row behind a sliding window", PagedShape((40, 3), (1, 1), sliding_window=8)),
    ("softcap", "capped scores", PagedShape((40, 9), (6, 1), softcap=2.0)),
    ("window_softcap", "a window and capped scores, as in Gemma-2", _CAPPED((40, 9), (6, 1))),
    ("multi_head", "as many KV heads as heads", PagedShape((21, 5), (4, 4), heads=3, kv_heads=3, head_dim=20)),
    ("multi_query", "one KV head for all heads", PagedShape((21, 5), (4, 4), heads=8, kv_heads=1, head_dim=64)),
    ("page_of_one", "pages of one position", PagedShape((9, 4), (3, 3), page_size=1)),
    ("tree", "siblings do not see each other", PagedShape((20, 9, 1), (8, 9, 1), tree=True)),
    ("wide_tree", "more rows than a word of the mask has bits", PagedShape((90, 40), (70, 33), tree=True)),
    ("tree_window", "a window counts from a row's depth", PagedShape((70, 99), (9, 7), sliding_window=32, tree=True)),
    ("chunk", "rows of two chunks", PagedShape((40, 9, 16), (6, 6, 1), attention_chunk=8)),
    ("chunk_decode", "one row: first, last and in the middle", PagedShape((41, 48, 3), (1, 1, 1), attention_chunk=8)),
    ("chunk_prefill", "a prompt of chunks that end in no page", PagedShape((50, 150), (50, 90), attention_chunk=23)),
    ("chunk_of_tiles", "chunks that tiles divide", PagedShape((300, 129), (70, 3), attention_chunk=128)),
    ("tree_chunk", "a chunk that ends in a path", PagedShape((70, 99), (9, 7), attention_chunk=32, tree=True)),
    ("sinks", "one more term in the denominator", PagedShape((70, 9, 1), (6, 9, 1), sinks=True)),
    ("sinks_fp32", "kept in fp32", PagedShape((33, 9), (3, 1), sinks=True, sinks_dtype=torch.float32)),
    ("sinks_window_softcap", "sinks are neither capped nor outside a window", _CAPPED((40, 9), (6, 1), sinks=True)),
    ("sinks_tree", "every row of a tree has the sink", PagedShape((20, 9, 1), (8, 9, 1), tree=True, sinks=True)),
    ("narrow_values", "keys of larger heads", PagedShape((70, 9), (6, 9), head_dim=48, value_dim=32)),
    ("wide_values", "values of larger heads", PagedShape((70, 9), (6, 9), head_dim=20, value_dim=72, sinks=True)),
    ("narrow_values_tree", "both sizes odd", PagedShape((70, 9), (6, 9), head_dim=24, value_dim=7, tree=True)),
    ("empty", "no sequences", PagedShape((), ())),
)


def _benchmarks() -> Iterator[Case]:
    qwen3_8b = partial(PagedShape, heads=32, kv_heads=8, head_dim=128)
    for context in (256, 1024, 4096):
        yield Case(f"verify_{context}", "batch 8, K 5", qwen3_8b((context,) * 8, (6,) * 8).draw)
        yield Case(f"decode_{context}", "plain decoding", qwen3_8b((context,) * 8, (1,) * 8).draw)
    for tokens in (128, 512, 2048, 4096):
        why = f"a prompt of {tokens} tokens"
        yield Case(f"prefill_{tokens}", why, qwen3_8b((tokens,), (tokens,)).draw)
        small = qwen3_8b((tokens,), (tokens,), heads=16)
        yield Case(f"prefill_16_heads_{tokens}", f"{why}, Qwen3-0.6B", small.draw)


OP_CASES = OpCases(
    cases=tuple(Case(name, why, shape.draw) for name, why, shape in _CASES),
    benchmarks=tuple(_benchmarks()),
    bytes_moved=_bytes_moved,
)
