"""Launchers of the C++ ops: they pass addresses, sizes and strides of checked tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_fast import _C  # after torch, whose OpenMP runtime it shares
from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch
from specdec_fast.batch.recurrent_batch import LinearAttentionParams, RecurrentBatch
from specdec_fast.batch.sampling_batch import Sampling, addresses_of
from specdec_fast.quantization.packed_weight import KINDS, TENSORS, PackedWeight

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
        (params.scale, params.sliding_window or 0, params.softcap or 0.0, params.attention_chunk or 0),
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


def quantized_linear(rows: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Run ``csrc/ops/quantized_linear.cpp``; the contract is the oracle's."""
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = rows.new_empty(rows.shape[0], weight.out_features)
    _C.quantized_linear(
        DTYPE_CODES[rows.dtype],
        rows.shape[0],
        rows.data_ptr(),
        rows.stride(0),
        addresses_of_packed(weight),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def addresses_of_packed(weight: PackedWeight) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return addresses and sizes of a packed weight, in the order of PackedTuple in csrc/bindings.h."""
    tensors = [getattr(weight, name) for name in TENSORS]
    sizes = (weight.in_features, weight.out_features, weight.block_size, weight.group_size)
    scale_dtype = DTYPE_CODES.get(weight.scales.dtype, 0)  # with super-scales, those of the groups are integers
    formats = (KINDS.index(weight.kind), scale_dtype, int(weight.rounds_rows))
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors), (*sizes, *formats)


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


def grouped_quantized_linear(
    rows: Tensor, expert_ids: Tensor, weight: PackedWeight, bias: Tensor | None = None
) -> Tensor:
    """Run ``csrc/ops/grouped_quantized_linear.cpp``; the contract is the oracle's."""
    rows = rows.contiguous()
    num_rows, num_vectors, _ = rows.shape
    out = rows.new_empty(*expert_ids.shape, weight.out_features)
    _C.grouped_quantized_linear(
        DTYPE_CODES[rows.dtype],
        (num_rows, expert_ids.shape[1], num_vectors, len(weight.codes)),
        rows.data_ptr(),
        expert_ids.data_ptr(),
        addresses_of_packed(weight),
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


def conv_rows_(
    rows: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, batch: RecurrentBatch
) -> Tensor:
    """Run ``csrc/ops/conv_rows.cpp``; the contract is the oracle's."""
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    _C.conv_rows(
        DTYPE_CODES[rows.dtype],
        (rows.data_ptr(), rows.stride(0)),
        state.data_ptr(),
        tuple(state.shape),
        (weight.data_ptr(), weight.shape[1]),
        0 if bias is None else bias.data_ptr(),
        activation == "silu",
        _recurrent(batch, rows.shape[0]),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def linear_attention_rows_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    pools: tuple[Tensor, Tensor],
    batch: RecurrentBatch,
    params: LinearAttentionParams,
) -> Tensor:
    """Run ``csrc/ops/linear_attention_rows.cpp``; the contract is the oracle's."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    if log_decay.dim() == 3 and log_decay.stride(-1) != 1:
        log_decay = log_decay.contiguous()
    states, kept = pools
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    _C.linear_attention_rows(
        DTYPE_CODES[query.dtype],
        [(0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), x.stride(1))
         for x in (query, key, value, log_decay, beta)],
        (log_decay.dim() == 3, beta is not None, params.delta_rule),
        (states.data_ptr(), kept.data_ptr()),
        (*kept.shape[:2], key.shape[1], *states.shape[1:]),
        _recurrent(batch, query.shape[0]),
        (params.scale, -1.0 if params.l2norm_eps is None else params.l2norm_eps),
        0 if params.skip is None else params.skip.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def selective_scan_rows_(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    skip: Tensor | None,
    pools: tuple[Tensor, Tensor],
    batch: RecurrentBatch,
) -> Tensor:
    """Run ``csrc/ops/selective_scan_rows.cpp``; the contract is the oracle's."""
    x, dt, B, C = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, dt, B, C))
    states, kept = pools
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _C.selective_scan_rows(
        DTYPE_CODES[x.dtype],
        (*(each.data_ptr() for each in (x, dt, A, B, C)), 0 if skip is None else skip.data_ptr()),
        (x.stride(0), dt.stride(0), *A.stride(), *B.stride()[:2], *C.stride()[:2]),
        (states.data_ptr(), kept.data_ptr()),
        (*kept.shape[:2], *A.shape, B.shape[1]),
        _recurrent(batch, x.shape[0]),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _recurrent(batch: RecurrentBatch, num_rows: int) -> tuple[tuple[int, int], tuple[int, ...]]:
    return (num_rows, batch.slots.shape[0]), tuple(array.data_ptr() for array in batch.arrays)
