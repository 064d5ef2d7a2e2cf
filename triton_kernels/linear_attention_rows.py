"""``linear_attention_rows_``: linear attention with a recurrent state.

Bytes: a state is read and written once, the rows once for each block of value channels. Grid: (sequences, value heads,
blocks of value channels). A program holds its part of the state in registers while its rows advance it. It has one
warp, so that a sum over the key channels needs no shared memory.

All rows, replayed ones included, run through one loop: code of their own might be compiled to other arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.batch.recurrent_batch import LinearAttentionParams, RecurrentBatch
from specdec_fast.triton_kernels.recurrent_inputs import load_and_keep, rows_of
from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

_TILE = 1024  # numbers of a state that one program holds
_INPUTS = ("query", "key", "value")
_NUMBERS = ("log_decay", "beta", "kept", "skip")
_ARRAYS = ("cu_seqlens", "slots", "state_lengths", "num_replayed", "num_stored")
_STRIDES = tuple(f"stride_{name}_row" for name in (*_INPUTS, "decay", "beta"))
_SIZES = ("num_kept", "key_heads")
_UNSPECIALISED = (*_INPUTS, *_NUMBERS, "out", *_ARRAYS, *_STRIDES, *_SIZES, "scale", "l2norm_eps")


@triton.jit
def _normalised(vector, eps, IS_WANTED: tl.constexpr):
    if IS_WANTED:
        vector = vector * tl.rsqrt(tl.sum(vector * vector, axis=0) + eps)
    return vector


@triton.jit
def _advance(state, key, value, decay, beta, DELTA_RULE: tl.constexpr):
    """Return the state [keys, values] after a row; ``decay`` has a factor for each key channel, or one."""
    change = value
    if DELTA_RULE:
        change = value - tl.sum(state * (decay * key)[:, None], axis=0)
    return state * decay[:, None] + key[:, None] * (change * beta)[None, :]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _linear_attention_kernel(
    query,  # [T, key_heads, KEY_DIM], the last two axes contiguous, as of key and value
    key,  # [T, key_heads, KEY_DIM]
    value,  # [T, value_heads, VALUE_DIM]
    log_decay,  # [T, value_heads, DECAY_DIM] fp32, the last two axes contiguous
    beta,  # [T, value_heads] fp32, the last axis contiguous; read if HAS_BETA
    states,  # [num_slots, value_heads, KEY_DIM, VALUE_DIM] fp32, contiguous
    kept,  # [num_slots, num_kept, keys + values + decays + betas] fp32, contiguous
    skip,  # [value_heads] fp32; read if HAS_SKIP
    out,  # [T, value_heads, VALUE_DIM], contiguous
    cu_seqlens,  # [B + 1] int32
    slots,  # [B] int32
    state_lengths,  # [B] int32
    num_replayed,  # [B] int32
    num_stored,  # [B] int32
    stride_query_row,
    stride_key_row,
    stride_value_row,
    stride_decay_row,
    stride_beta_row,
    num_kept,
    key_heads,
    scale,
    l2norm_eps,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY_DIM: tl.constexpr,
    DELTA_RULE: tl.constexpr,
    NORMALISED: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_DECAY: tl.constexpr,
):
    head = tl.program_id(1)
    value_heads = tl.num_programs(1)
    key_head = head * key_heads // value_heads
    k_place = tl.arange(0, BLOCK_KEY)
    v_place = tl.program_id(2) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    values_at = key_heads * KEY_DIM  # where they begin in a kept row
    decays_at = values_at + value_heads * VALUE_DIM
    betas_at = decays_at + value_heads * DECAY_DIM
    width = betas_at + HAS_BETA * value_heads
    slot, position, count, replayed, stored, start = rows_of(
        tl.program_id(0), cu_seqlens, slots, state_lengths, num_replayed, num_stored
    )
    own_state = states + ((slot * value_heads + head) * KEY_DIM + k_place[:, None]) * VALUE_DIM + v_place[None, :]
    inside = (k_place < KEY_DIM)[:, None] & (v_place < VALUE_DIM)[None, :]
    state = tl.load(own_state, mask=inside & (k_place < tl.where(position > 0, KEY_DIM, 0))[:, None], other=0.0)
    if stored == 0:
        tl.store(own_state, state, mask=inside)
    for i in range(count):
        is_own = tl.where(i >= replayed, 1, 0)
        to_keep = tl.where(i >= tl.maximum(stored, replayed), 1, 0)
        to_keep_once = tl.where(tl.program_id(2) == 0, to_keep, 0)  # numbers that blocks of a head share
        to_keep_keys = tl.where(head * key_heads % value_heads == 0, to_keep_once, 0)
        row = start + i
        entry = kept + (slot * num_kept + (position + i) % tl.maximum(num_kept, 1)) * width
        own_k = key + row * stride_key_row + key_head * KEY_DIM
        k = load_and_keep(own_k, entry + key_head * KEY_DIM, k_place, KEY_DIM, is_own, to_keep_keys)
        own_v = value + row * stride_value_row + head * VALUE_DIM
        v = load_and_keep(own_v, entry + values_at + head * VALUE_DIM, v_place, VALUE_DIM, is_own, to_keep)
        own_g = log_decay + row * stride_decay_row + head * DECAY_DIM
        kept_g = entry + decays_at + head * DECAY_DIM
        g = load_and_keep(own_g, kept_g, tl.arange(0, BLOCK_DECAY), DECAY_DIM, is_own, to_keep_once)
        b = 1.0
        if HAS_BETA:
            own_b = beta + row * stride_beta_row + head
            b = load_and_keep(own_b, entry + betas_at + head, tl.arange(0, 1), 1, is_own, to_keep_once)
        own_q = query + row * stride_query_row + key_head * KEY_DIM
        q = tl.load(own_q + k_place, mask=k_place < is_own * KEY_DIM, other=0.0).to(tl.float32)
        state = _advance(state, _normalised(k, l2norm_eps, NORMALISED), v, tl.exp(g), b, DELTA_RULE)
        read = tl.sum(state * (_normalised(q, l2norm_eps, NORMALISED) * scale)[:, None], axis=0)
        if HAS_SKIP:
            read += tl.load(skip + head) * v
        own_out = out + (row * value_heads + head) * VALUE_DIM
        tl.store(own_out + v_place, read.to(out.dtype.element_ty), mask=v_place < is_own * VALUE_DIM)
        if i + 1 == stored:
            tl.store(own_state, state, mask=inside)


def _launch(sizes: tuple[int, int, int], flags: dict[str, bool]) -> Launch:
    """Choose the tiles for a head; ``sizes``: key_dim, value_dim, and decays."""
    key_dim, value_dim, decays = sizes
    block_key = triton.next_power_of_2(key_dim)
    blocks = {
        "BLOCK_KEY": block_key,
        "BLOCK_VALUE": min(triton.next_power_of_2(value_dim), max(1, _TILE // block_key)),
        "BLOCK_DECAY": triton.next_power_of_2(decays),
    }
    of_head = {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "DECAY_DIM": decays}
    return Launch({**of_head, **flags, **blocks}, num_warps=1)


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
    """Launch the kernel; the contract is the oracle's. Arrays are not checked: that would wait for the device."""
    states, kept = pools
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    batch_size = batch.slots.shape[0]
    value_heads, key_dim, value_dim = states.shape[1:]
    if batch_size == 0 or states.numel() == 0:
        return out
    decays = log_decay if log_decay.dim() == 3 else log_decay[..., None]
    betas = decays[..., 0] if beta is None else beta
    rows = [_with_contiguous_heads(x) for x in (query, key, value, decays, betas)]
    launch = _launch((key_dim, value_dim, decays.shape[2]), _flags(beta, params))
    grid = (batch_size, value_heads, triton.cdiv(value_dim, launch.constexprs["BLOCK_VALUE"]))
    _linear_attention_kernel[grid](
        *(*rows, states, kept, kept if params.skip is None else params.skip, out),
        *batch.arrays,
        *(x.stride(0) for x in rows),
        kept.shape[1],
        key.shape[1],
        params.scale,
        0.0 if params.l2norm_eps is None else params.l2norm_eps,
        **launch.options,
    )
    return out


def _with_contiguous_heads(rows: Tensor) -> Tensor:
    """Return rows whose axes after the first are contiguous; the rows may be apart, or all the same."""
    return rows if rows[:1].is_contiguous() else rows.contiguous()


def _flags(beta: Tensor | None, params: LinearAttentionParams) -> dict[str, bool]:
    return {
        "DELTA_RULE": params.delta_rule,
        "NORMALISED": params.l2norm_eps is not None,
        "HAS_BETA": beta is not None,
        "HAS_SKIP": params.skip is not None,
    }


_GATED_DELTA = {"DELTA_RULE": True, "NORMALISED": True, "HAS_BETA": True, "HAS_SKIP": False}
_MAMBA = {"DELTA_RULE": False, "NORMALISED": False, "HAS_BETA": True, "HAS_SKIP": True}
_LIGHTNING = {"DELTA_RULE": False, "NORMALISED": False, "HAS_BETA": False, "HAS_SKIP": False}
_PUBLISHED = (
    ("gated_delta_128x128", (128, 128, 1), _GATED_DELTA),
    ("gated_delta_96x192", (96, 192, 1), _GATED_DELTA),
    ("per_channel_128x128", (128, 128, 128), _GATED_DELTA),
    ("mamba_128x64", (128, 64, 1), _MAMBA),
    ("mamba_256x64", (256, 64, 1), _MAMBA),
    ("lightning_128x128", (128, 128, 1), _LIGHTNING),
)


def variants() -> Iterator[Variant]:
    """Yield the compilations for each type and published recurrence."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        signature = dict.fromkeys((*_INPUTS, "out"), f"*{TYPE_NAMES[dtype]}")
        signature |= dict.fromkeys((*_NUMBERS, "states"), "*fp32") | dict.fromkeys(_ARRAYS, "*i32")
        signature |= dict.fromkeys((*_STRIDES, *_SIZES), "i32") | {"scale": "fp32", "l2norm_eps": "fp32"}
        for name, sizes, flags in _PUBLISHED:
            launch = _launch(sizes, flags)
            yield launch.variant(f"{TYPE_NAMES[dtype]}_{name}", _linear_attention_kernel, signature, ("states",))
