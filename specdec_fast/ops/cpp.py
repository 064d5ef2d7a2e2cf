"""Launchers of the C++ ops: they pass addresses, sizes and strides of checked tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_fast import _C  # after torch, whose OpenMP runtime it shares
from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch
from specdec_fast.batch.sampling_batch import Sampling, addresses_of

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # DType in csrc/kernels/dtype.h


def append_kv_(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Run ``csrc/ops/append_kv.cpp``; the contract is the oracle's."""
    num_pages, page_size, num_kv_heads, _ = key_cache.shape
    item = key_cache.element_size()
    new_rows = [rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (key, value)]
    sizes = [(rows.stride(0) * item, rows.stride(1) * item, rows.shape[2] * item) for rows in new_rows]
    _C.append_kv(
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        num_pages * page_size,
        *((rows.data_ptr(), *strides) for rows, strides in zip(new_rows, sizes, strict=True)),
        slot_mapping.data_ptr(),
        (key.shape[0], num_kv_heads),
        torch.get_num_threads(),
    )


def paged_attention(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams) -> Tensor:
    """Run ``csrc/ops/paged_attention.cpp``; the contract is the oracle's."""
    if query.stride(-1) != 1:
        query = query.contiguous()
    num_pages, page_size, num_kv_heads, head_dim = kv[0].shape
    value_dim = kv[1].shape[3]
    tree_mask = batch.tree_mask
    sinks = params.sinks
    out = torch.empty(*query.shape[:2], value_dim, dtype=query.dtype, device=query.device)
    _C.paged_attention(
        DTYPE_CODES[query.dtype],
        (query.data_ptr(), query.stride(0), query.stride(1), query.shape[0]),
        (kv[0].data_ptr(), kv[1].data_ptr()),
        (num_pages, page_size, query.shape[1], num_kv_heads, head_dim, value_dim),
        (batch.block_table.data_ptr(), batch.cu_seqlens_q.data_ptr(), batch.seqused_k.data_ptr()),
        tuple(batch.block_table.shape),
        (0, 0) if tree_mask is None else (tree_mask.data_ptr(), tree_mask.shape[1]),
        (params.scale, params.sliding_window or 0, params.softcap or 0.0),
        (0, 0) if sinks is None else (sinks.data_ptr(), DTYPE_CODES[sinks.dtype]),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run ``csrc/ops/linear.cpp``; the contract is the oracle's."""
    row_stride, stride = rows.stride()
    if stride != 1:
        rows = rows.contiguous()
        row_stride = rows.stride(0)
    num_rows, in_features = rows.shape
    out_features = weight.shape[0]
    out = rows.new_empty(num_rows, out_features)  # faster than torch.empty, which counts beside a small layer
    _C.linear(
        DTYPE_CODES[rows.dtype],
        (num_rows, in_features, out_features),
        rows.data_ptr(),
        row_stride,
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def grouped_linear(rows: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run ``csrc/ops/grouped_linear.cpp``; the contract is the oracle's."""
    rows = rows.contiguous()
    num_rows, num_vectors, in_features = rows.shape
    num_experts, out_features, _ = weight.shape
    out = torch.empty(*expert_ids.shape, out_features, dtype=rows.dtype, device=rows.device)
    _C.grouped_linear(
        DTYPE_CODES[rows.dtype],
        (num_rows, expert_ids.shape[1], num_vectors, in_features, out_features, num_experts),
        rows.data_ptr(),
        expert_ids.data_ptr(),
        weight.data_ptr(),
        not weight.is_contiguous(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def compact_kv_(kv_cache: Tensor, block_table: Tensor, cu_moves: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Run ``csrc/ops/compact_kv.cpp``; the contract is the oracle's."""
    num_layers, planes, num_pages, page_size, num_kv_heads, head_dim = kv_cache.shape
    _C.compact_kv(
        kv_cache.data_ptr(),
        (planes * num_layers, num_pages, page_size, num_kv_heads * head_dim * kv_cache.element_size()),
        block_table.data_ptr(),
        tuple(block_table.shape),
        (cu_moves.data_ptr(), sources.data_ptr(), destinations.data_ptr()),
        torch.get_num_threads(),
    )


def realign_kv_(layers: Sequence[tuple[Tensor, Tensor]], starts: Tensor, lengths: Tensor, shifts: Tensor) -> None:
    """Run ``csrc/ops/realign_kv.cpp``; the contract is the oracle's."""
    first = layers[0][0]
    batch_size, num_kv_heads, num_columns, head_dim = first.shape
    item = first.element_size()
    _C.realign_kv(
        [tensor.data_ptr() for layer in layers for tensor in layer],
        (batch_size, num_kv_heads, num_columns, head_dim * item),
        tuple(stride * item for stride in first.stride()[:3]),
        (starts.data_ptr(), lengths.data_ptr(), shifts.data_ptr()),
        torch.get_num_threads(),
    )


def noise_words(token_ids: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Run ``csrc/ops/noise_words.cpp``; the contract is the oracle's."""
    words = torch.empty_like(token_ids)
    addresses = token_ids.data_ptr(), seeds.data_ptr(), positions.data_ptr()
    _C.noise_words(tuple(token_ids.shape), addresses, words.data_ptr())
    return words


def verify_chain(
    logits: Tensor,
    token_ids: Tensor,
    cu_seqlens: Tensor,
    sampling: Sampling | None = None,
    parents: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Run ``csrc/ops/verify_chain.cpp``; the contract is the oracle's."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    batch_size = cu_seqlens.numel() - 1
    target_tokens = torch.empty_like(token_ids)
    num_accepted = torch.empty(batch_size, dtype=torch.int32, device=logits.device)
    next_tokens = torch.empty(batch_size, dtype=torch.int64, device=logits.device)
    accepted_rows = None if parents is None else torch.empty_like(parents)
    _C.verify_chain(
        logits.data_ptr(),
        DTYPE_CODES[logits.dtype],
        (logits.shape[0], logits.shape[1], logits.stride(0)),
        token_ids.data_ptr(),
        cu_seqlens.data_ptr(),
        batch_size,
        addresses_of(sampling),
        0 if parents is None else parents.data_ptr(),
        (
            *(target_tokens.data_ptr(), num_accepted.data_ptr(), next_tokens.data_ptr()),
            0 if accepted_rows is None else accepted_rows.data_ptr(),
        ),
        torch.get_num_threads(),
    )
    outputs = (target_tokens, num_accepted, next_tokens)
    return outputs if accepted_rows is None else (*outputs, accepted_rows)
