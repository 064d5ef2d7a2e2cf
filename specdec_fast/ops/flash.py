"""Launcher of FlashAttention: a second GPU implementation of ``paged_attention``, chosen by ``backend="flash"``.

``flash_attn_with_kvcache`` where the flash-attn package is installed, else ``torch.nn.attention.varlen.varlen_attn``,
which needs no package. In which order they add up a row is not known here; neither serves tree masks or fp32.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from specdec_fast.errors import BackendError
from specdec_fast.ragged import PagedBatch, Scores

_PAGE_MULTIPLE = 256  # FlashAttention-2 reads pages in tiles, none of which may end inside a page

Attention = Callable[[Tensor, tuple[Tensor, Tensor], PagedBatch, Scores], Tensor]


def paged_attention(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, scores: Scores) -> Tensor:
    """Run FlashAttention; the contract is the oracle's, but for what is refused.

    Raises:
        BackendError: fp32, a tree mask, a page size that is no multiple of 256; a soft cap without the flash-attn
            package.

    """
    if query.dtype == torch.float32:
        raise BackendError("FlashAttention serves float16 and bfloat16, not float32; pass backend='auto'.")
    if batch.tree_mask is not None:
        raise BackendError("FlashAttention serves chains of draft tokens, not trees; pass backend='auto'.")
    page_size = kv[0].shape[1]
    if page_size % _PAGE_MULTIPLE:
        raise BackendError(
            f"FlashAttention reads pages of {_PAGE_MULTIPLE} positions or multiples of that, not of {page_size}; "
            f"set page_size={_PAGE_MULTIPLE}, or pass backend='auto'."
        )
    if query.numel() == 0:
        return torch.empty_like(query)
    return _implementation()(query, kv, batch, scores)


@lru_cache(maxsize=1)
def _implementation() -> Attention:
    return _by_package if importlib.util.find_spec("flash_attn") else _by_torch


def _window(scores: Scores) -> tuple[int, int]:
    """Return how many entries a row sees before and after its own; -1: all."""
    return (-1 if scores.sliding_window is None else scores.sliding_window - 1), 0


def _by_package(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, scores: Scores) -> Tensor:
    """Pad ragged rows on the left, as ``flash_attn_with_kvcache`` takes the last rows of every sequence."""
    attention = importlib.import_module("flash_attn").flash_attn_with_kvcache
    place = _padded_place(batch, query.shape[0])  # [T]
    size = (batch.seqused_k.numel(), batch.max_seqlen_q, *query.shape[1:])
    padded = query.new_zeros(size)
    padded.flatten(0, 1)[place] = query
    out = attention(
        padded,
        kv[0],
        kv[1],
        cache_seqlens=batch.seqused_k,
        block_table=batch.block_table,
        softmax_scale=scores.scale,
        causal=True,
        window_size=_window(scores),
        softcap=scores.softcap or 0.0,
    )
    return out.flatten(0, 1)[place]


def _padded_place(batch: PagedBatch, num_rows: int) -> Tensor:
    """Return each row's index in ``[B * max_seqlen_q]`` rows of which every sequence has its last ones; ``[T]``."""
    row = torch.arange(num_rows, device=batch.cu_seqlens_q.device)
    ends = batch.cu_seqlens_q[1:].long()
    sequence = torch.searchsorted(ends, row, right=True)
    return (sequence + 1) * batch.max_seqlen_q - (ends[sequence] - row)


def _by_torch(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, scores: Scores) -> Tensor:
    if scores.softcap is not None:
        raise BackendError("FlashAttention through torch has no soft cap; install flash-attn, or pass backend='auto'.")
    return importlib.import_module("torch.nn.attention.varlen").varlen_attn(
        query.contiguous(),
        kv[0],
        kv[1],
        batch.cu_seqlens_q,
        None,  # the lengths stand in seqused_k
        batch.max_seqlen_q,
        batch.max_seqlen_k,
        scale=scores.scale,
        window_size=_window(scores),  # (-1, 0) is causal
        enable_gqa=query.shape[1] != kv[0].shape[2],
        seqused_k=batch.seqused_k,
        block_table=batch.block_table,
        num_splits=1,  # else the batch's longest context decides how every sequence's is cut
    )
