"""Declaration of ``paged_attention``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_fast.ops.checks import FLOATS, expect, expect_offsets, expect_tensor
from specdec_fast.ops.registry import Case, Op


def _check(
    query: Tensor,
    kv: tuple[Tensor, Tensor],
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> None:
    device, dtype = query.device, (query.dtype,)
    key_cache, value_cache = kv
    batch_size = seqused_k.shape[0]
    expect_tensor("query", query, (None,) * 3, FLOATS, device)
    expect_tensor("key cache", key_cache, (None, None, None, query.shape[2]), dtype, device)
    expect_tensor("value cache", value_cache, tuple(key_cache.shape), dtype, device)
    expect_tensor("block_table", block_table, (batch_size, None), (torch.int32,), device)
    expect_tensor("cu_seqlens_q", cu_seqlens_q, (batch_size + 1,), (torch.int32,), device)
    expect_tensor("seqused_k", seqused_k, (batch_size,), (torch.int32,), device)
    expect(
        all(x.is_contiguous() for x in (*kv, block_table, cu_seqlens_q, seqused_k)),
        "the caches, block_table, cu_seqlens_q and seqused_k must be contiguous.",
    )
    expect_offsets("cu_seqlens_q", cu_seqlens_q, query.shape[0], strictly=False)
    heads, kv_heads = query.shape[1], key_cache.shape[2]
    expect(heads % kv_heads == 0, f"{heads} query heads are not a multiple of {kv_heads} KV heads.")
    expect(sliding_window is None or sliding_window > 0, f"sliding_window={sliding_window}; expected None or > 0.")
    expect(softcap is None or softcap > 0, f"softcap={softcap}; expected None or > 0.")


@dataclass(frozen=True)
class _Shape:
    contexts: tuple[int, ...]  # KV entries per sequence, new rows included
    rows: tuple[int, ...]  # query rows per sequence
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 16
    sliding_window: int | None = None
    softcap: float | None = None


def _make(shape: _Shape, generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    pages_per_sequence = [-(-context // shape.page_size) for context in shape.contexts]
    num_pages = sum(pages_per_sequence) + 1
    size = (2, num_pages, shape.page_size, shape.kv_heads, shape.head_dim)
    kv = torch.full(size, float("nan"), dtype=dtype)  # what no sequence owns must not be read
    order = (torch.randperm(num_pages - 1, generator=generator) + 1).to(torch.int32)
    block_table = torch.zeros(len(shape.contexts), max(pages_per_sequence, default=1), dtype=torch.int32)
    used = 0
    for b, (context, count) in enumerate(zip(shape.contexts, pages_per_sequence, strict=True)):
        pages = order[used : used + count]
        used += count
        block_table[b, :count] = pages
        entries = torch.randn(2, count * shape.page_size, *size[3:], generator=generator).to(dtype)
        entries[:, context:] = float("nan")  # stale entries beyond the context must not be read (I2, I4)
        kv[:, pages.long()] = entries.unflatten(1, (count, shape.page_size))
    query = torch.randn(shape.heads, sum(shape.rows), shape.head_dim, generator=generator).to(dtype)
    cu_seqlens_q = torch.tensor([0, *shape.rows]).cumsum(0)
    return {
        "query": query.transpose(0, 1).to(device),
        "kv": (kv[0].to(device), kv[1].to(device)),
        "block_table": block_table.to(device),
        "cu_seqlens_q": cu_seqlens_q.to(torch.int32).to(device),
        "seqused_k": torch.tensor(shape.contexts, dtype=torch.int32).to(device),
        "scale": shape.head_dim**-0.5,
        "sliding_window": shape.sliding_window,
        "softcap": shape.softcap,
    }


def _cases() -> Iterator[Case]:
    grid = (
        ("prefill", "rows of a whole prompt, ragged", _Shape((1, 7, 33), (1, 7, 33))),
        ("verify", "K + 1 rows at unequal contexts", _Shape((6, 40, 129, 17), (6, 6, 3, 1))),
        ("decode", "one row each", _Shape((1, 16, 17, 90), (1, 1, 1, 1))),
        ("page_boundary", "contexts that just fill a page", _Shape((16, 32, 15), (2, 5, 3))),
        ("window", "a sliding window shorter than the context", _Shape((40, 9), (6, 6), sliding_window=8)),
        ("window_decode", "one row behind a sliding window", _Shape((40, 3), (1, 1), sliding_window=8)),
        ("softcap", "capped scores", _Shape((40, 9), (6, 1), softcap=2.0)),
        ("window_softcap", "both, as Gemma-2", _Shape((40, 9), (6, 1), sliding_window=5, softcap=2.0)),
        ("multi_head", "as many KV heads as heads", _Shape((21, 5), (4, 4), heads=3, kv_heads=3, head_dim=20)),
        ("multi_query", "one KV head for all", _Shape((21, 5), (4, 4), heads=8, kv_heads=1, head_dim=64)),
        ("page_of_one", "every position its own page", _Shape((9, 4), (3, 3), page_size=1)),
        ("empty", "no sequences", _Shape((), ())),
    )
    for name, why, shape in grid:
        yield Case(name, why, partial(_make, shape))


def _bytes_moved(
    query: Tensor,
    kv: tuple[Tensor, Tensor],
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    sliding_window: int | None = None,
    **others: Any,
) -> int:
    rows = cu_seqlens_q.diff()
    entries = seqused_k if sliding_window is None else seqused_k.minimum(sliding_window + rows - 1)
    per_entry = 2 * kv[0].shape[2] * kv[0].shape[3] * kv[0].element_size()
    return int(entries.sum()) * per_entry + 2 * query.numel() * query.element_size()


OP = Op(
    name="paged_attention",
    implementations={
        "torch": "specdec_fast.oracle.ops.paged_attention:paged_attention",
        "cpp": "specdec_fast.ops.cpp:paged_attention",
    },
    check=_check,
    cases=_cases,
    bytes_moved=_bytes_moved,
    exact=False,
)
