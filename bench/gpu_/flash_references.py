"""The FlashAttention functions that PyTorch ships, each in its best layout; making that layout is not timed.

A call that a version of torch or a device does not serve raises an error, which is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from bench.common.timing import Call
from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch

FLASH_PAGE = 256  # positions; torch's FlashAttention-2 accepts multiples of this


def _contexts(kv: tuple[Tensor, Tensor], batch: PagedBatch, length: int) -> list[Tensor]:
    """Gather keys and values of every sequence, padded to ``length``: two tensors ``[B, length, num_kv_heads, D]``."""
    page_size = kv[0].shape[1]
    places = torch.arange(length, device=kv[0].device).clamp(max=batch.max_seqlen_k - 1)
    pages = batch.block_table[:, places // page_size].long()  # entries after a shorter context are not attended
    return [cache[pages, places % page_size] for cache in kv]


def varlen_paged(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams) -> Call:
    """Call ``varlen_attn`` on a block table of large pages."""
    from torch.nn.attention.varlen import varlen_attn  # not on every platform

    pages_each = -(-batch.max_seqlen_k // FLASH_PAGE)
    key, value = (x.unflatten(1, (-1, FLASH_PAGE)).flatten(0, 1) for x in _contexts(kv, batch, pages_each * FLASH_PAGE))
    table = torch.arange(len(batch.seqused_k) * pages_each, dtype=torch.int32, device=query.device)
    options: dict[str, Any] = {
        "seqused_k": batch.seqused_k,
        "block_table": table.view(-1, pages_each),
        "window_size": (-1, 0),
        "enable_gqa": True,
        "scale": params.scale,
    }
    shape = (batch.cu_seqlens_q, None, batch.max_seqlen_q, batch.max_seqlen_k)
    return lambda: varlen_attn(query, key, value, *shape, **options)


def varlen_packed(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams) -> Call:
    """Call ``varlen_attn`` on contexts one after the other, without pages."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = batch.seqused_k.tolist()
    padded = _contexts(kv, batch, batch.max_seqlen_k)
    key, value = (torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)]) for x in padded)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(query.device)
    shape = (batch.cu_seqlens_q, starts, batch.max_seqlen_q, batch.max_seqlen_k)
    options: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True, "scale": params.scale}
    return lambda: varlen_attn(query, key, value, *shape, **options)


def sdpa_causal(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams) -> Call:
    """Call SDPA on a dense batch of equal lengths, causal from the lower right, so without a mask."""
    counts, contexts = set(batch.cu_seqlens_q.diff().tolist()), set(batch.seqused_k.tolist())
    if len(counts) != 1 or len(contexts) != 1:
        raise ValueError("sequences of unequal lengths make no dense batch")
    key, value = (x.transpose(1, 2).contiguous() for x in _contexts(kv, batch, batch.max_seqlen_k))
    rows = query.unflatten(0, (-1, counts.pop())).transpose(1, 2).contiguous()  # [B, num_heads, rows, D]
    causal = causal_lower_right(rows.shape[2], key.shape[2])

    def attend() -> Tensor:
        heads = scaled_dot_product_attention(rows, key, value, causal, scale=params.scale, enable_gqa=True)
        return heads.transpose(1, 2).flatten(0, 1)

    return attend


FLASH_REFERENCES: dict[str, Callable[..., Call]] = {
    "varlen_paged": varlen_paged,
    "varlen_packed": varlen_packed,
    "sdpa_causal": sdpa_causal,
}
