"""Launchers of FlashAttention: the flash-attn package if it is installed, else the one that PyTorch ships.

The context is never split (``num_splits=1``), so that a batch's longest context does not change the bits of other
sequences. But neither library promises the same bits for one query row as for several.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import attention

from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch
from specdec_fast.errors import BackendError

_PAGE_MULTIPLE = 256  # FlashAttention 2 accepts page sizes that are a multiple of this
_PAGED_ARGUMENTS = ("seqused_k", "block_table", "num_splits", "enable_gqa", "window_size")  # of varlen_attn


@cache
def _package() -> Callable[..., Tensor] | None:
    try:
        return importlib.import_module("flash_attn").flash_attn_with_kvcache
    except ImportError:
        return None


def paged_attention(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams) -> Tensor:
    """Run FlashAttention; the contract is the oracle's, except for what raises a BackendError."""
    package = _package()
    _expect_served(query, kv, batch, params, package is not None)
    if query.numel() == 0:
        return torch.empty_like(query)
    # Both bounds of a window count from a row's own position and include it.
    window = (-1 if params.sliding_window is None else params.sliding_window - 1, 0)
    if package is None:
        return _varlen(query, kv, batch, params.scale, window)
    rows = _right_aligned(batch, query.shape[0])
    padded = query if rows is None else query.new_zeros(batch.seqused_k.numel() * batch.max_seqlen_q, *query.shape[1:])
    if rows is not None:
        padded[rows] = query
    out = package(
        padded.unflatten(0, (-1, batch.max_seqlen_q)),  # [B, max_seqlen_q, num_heads, head_dim]
        *kv,
        cache_seqlens=batch.seqused_k,
        block_table=batch.block_table,
        softmax_scale=params.scale,
        causal=True,
        window_size=window,
        softcap=params.softcap or 0.0,
        num_splits=1,
    ).flatten(0, 1)
    return out if rows is None else out[rows]


def _varlen(
    query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, scale: float, window: tuple[int, int]
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # not on every platform

    missing = _missing(varlen_attn)
    if missing:
        raise BackendError(
            f"varlen_attn of torch {torch.__version__} has no {', '.join(missing)}, so it reads no pages; install "
            "flash-attn or a later torch, or pass backend='triton'."
        )
    try:
        out = varlen_attn(
            query,
            *kv,
            batch.cu_seqlens_q,
            None,
            batch.max_seqlen_q,
            batch.max_seqlen_k,
            scale=scale,
            window_size=window,  # (-1, 0) is causal
            enable_gqa=query.shape[1] != kv[0].shape[2],
            seqused_k=batch.seqused_k,
            block_table=batch.block_table,
            num_splits=1,
        )
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        raise BackendError(
            f"varlen_attn of torch {torch.__version__} does not serve this ({error}); install flash-attn, or activate "
            "another implementation (torch.nn.attention.activate_flash_attention_impl), or pass backend='triton'."
        ) from error
    assert isinstance(out, Tensor), "only the output was requested"
    return out


@cache
def _missing(varlen_attn: Callable[..., object]) -> tuple[str, ...]:
    """Return which of the arguments that paged attention needs a version of ``varlen_attn`` lacks; 2.11's has none."""
    known = inspect.signature(varlen_attn).parameters.values()
    if any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in known):
        return ()
    names = {parameter.name for parameter in known}
    return tuple(name for name in _PAGED_ARGUMENTS if name not in names)


def _right_aligned(batch: PagedBatch, num_rows: int) -> Tensor | None:
    """Return each row's place in right-aligned ``[B * max_seqlen_q]``; None if the rows fill all places."""
    batch_size = batch.seqused_k.numel()
    if num_rows == batch_size * batch.max_seqlen_q:
        return None
    ends = torch.arange(1, batch_size + 1, device=batch.seqused_k.device) * batch.max_seqlen_q
    shift = ends - batch.cu_seqlens_q[1:]
    # With output_size, the host need not wait for the device to count.
    shifts = shift.repeat_interleave(batch.cu_seqlens_q.diff(), output_size=num_rows)
    return torch.arange(num_rows, device=shifts.device) + shifts


def _expect_served(
    query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams, package: bool
) -> None:
    takes_any_page = not package and attention.current_flash_attention_impl() is not None
    head_dim = query.shape[2]
    value_dim = kv[1].shape[3]
    page_size = kv[0].shape[1]
    limits = []
    if query.dtype not in (torch.float16, torch.bfloat16):
        limits.append(f"{query.dtype}; it takes float16 and bfloat16")
    if head_dim % 8 != 0 or head_dim > 256:
        limits.append(f"heads of {head_dim}; it takes multiples of 8 up to 256")
    if head_dim != value_dim:
        limits.append(f"values of {value_dim} beside keys of {head_dim}; it takes one size")
    if params.sinks is not None:
        limits.append("attention sinks")
    if batch.tree_mask is not None:
        limits.append("a tree mask; it takes chains")
    if params.attention_chunk is not None:
        limits.append("chunks of positions (attention_chunk)")
    if params.softcap is not None and not package:
        limits.append("a soft cap; only the flash-attn package has one: install it")
    if page_size % _PAGE_MULTIPLE != 0 and not takes_any_page:
        limits.append(f"pages of {page_size}; it takes multiples of {_PAGE_MULTIPLE}: pass page_size={_PAGE_MULTIPLE}")
    if limits:
        raise BackendError(f"FlashAttention does not serve {'; nor '.join(limits)}; or pass backend='triton'.")
