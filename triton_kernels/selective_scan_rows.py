"""``selective_scan_rows_``: the state space of Mamba-1.

Bytes: a state is read and written once, x and dt once, A once for each sequence, B and C once for each block of
channels. Grid: (sequences, groups, blocks of channels). A program holds its part of the state and of A in registers
while its rows advance it.

All rows, replayed ones included, run through one loop: code of their own might be compiled to other arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.batch.recurrent_batch import RecurrentBatch
from specdec_fast.triton_kernels.recurrent_inputs import load_and_keep, rows_of
from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

_TILE = 512  # numbers of a state that one program holds, and as many of A
_INPUTS = ("x", "B", "C", "out")
_NUMBERS = ("dt", "A", "skip", "kept")
_ARRAYS = ("cu_seqlens", "slots", "state_lengths", "num_replayed", "num_stored")
_STRIDES = ("stride_x_row", "stride_dt_row", "stride_A_channel", "stride_A_state",
            "stride_B_row", "stride_B_group", "stride_C_row", "stride_C_group")  # fmt: skip
_SIZES = ("num_kept", "channels")
_UNSPECIALISED = (*_INPUTS, *_NUMBERS, *_ARRAYS, *_STRIDES, *_SIZES)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _selective_scan_kernel(
    x,  # [T, channels], the last axis contiguous
    dt,  # [T, channels] fp32, the last axis contiguous
    A,  # [channels, STATE_DIM] fp32
    B,  # [T, groups, STATE_DIM], the last axis contiguous
    C,  # [T, groups, STATE_DIM], the last axis contiguous
    skip,  # [channels] fp32; read if HAS_SKIP
    states,  # [num_slots, STATE_DIM, channels] fp32, contiguous
    kept,  # [num_slots, num_kept, 2 * channels + groups * STATE_DIM] fp32, contiguous
    out,  # [T, channels], contiguous
    cu_seqlens,  # [B + 1] int32
    slots,  # [B] int32
    state_lengths,  # [B] int32
    num_replayed,  # [B] int32
    num_stored,  # [B] int32
    stride_x_row,
    stride_dt_row,
    stride_A_channel,
    stride_A_state,
    stride_B_row,
    stride_B_group,
    stride_C_row,
    stride_C_group,
    num_kept,
    channels,
    STATE_DIM: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    of_group = channels // groups
    from_first = group * of_group  # the group's first channel
    c_place = tl.program_id(2) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)  # in the group
    s_place = tl.arange(0, BLOCK_STATE)
    inside = (s_place < STATE_DIM)[:, None] & (c_place < of_group)[None, :]
    width = 2 * channels + groups * STATE_DIM
    slot, position, count, replayed, stored, start = rows_of(
        tl.program_id(0), cu_seqlens, slots, state_lengths, num_replayed, num_stored
    )
    channel = (from_first + c_place).to(tl.int64)
    own_state = states + (slot * STATE_DIM + s_place[:, None]) * channels + channel[None, :]
    known = tl.where(position > 0, STATE_DIM, 0)
    state = tl.load(own_state, mask=inside & (s_place < known)[:, None], other=0.0)  # [BLOCK_STATE, BLOCK_CHANNELS]
    rate = tl.load(A + s_place[:, None] * stride_A_state + channel[None, :] * stride_A_channel, mask=inside, other=0.0)
    factor = 0.0
    if HAS_SKIP:
        factor = tl.load(skip + channel, mask=c_place < of_group, other=0.0)
    if stored == 0:
        tl.store(own_state, state, mask=inside)
    for i in range(count):
        is_own = tl.where(i >= replayed, 1, 0)
        to_keep = tl.where(i >= tl.maximum(stored, replayed), 1, 0)
        row = start + i
        entry = kept + (slot * num_kept + (position + i) % tl.maximum(num_kept, 1)) * width
        kept_x = entry + from_first
        own = load_and_keep(x + row * stride_x_row + from_first, kept_x, c_place, of_group, is_own, to_keep)
        own_dt = dt + row * stride_dt_row + from_first
        step = load_and_keep(own_dt, kept_x + channels, c_place, of_group, is_own, to_keep)
        own_b = B + row * stride_B_row + group * stride_B_group
        to_keep_once = tl.where(tl.program_id(2) == 0, to_keep, 0)  # numbers that blocks of a group share
        kept_b = entry + 2 * channels + group * STATE_DIM
        b = load_and_keep(own_b, kept_b, s_place, STATE_DIM, is_own, to_keep_once)
        own_c = C + row * stride_C_row + group * stride_C_group
        c = tl.load(own_c + s_place, mask=s_place < is_own * STATE_DIM, other=0.0).to(tl.float32)
        state = tl.exp(step[None, :] * rate) * state + (step * own)[None, :] * b[:, None]
        read = tl.sum(state * c[:, None], axis=0) + factor * own
        tl.store(out + row * channels + channel, read.to(out.dtype.element_ty), mask=c_place < is_own * of_group)
        if i + 1 == stored:
            tl.store(own_state, state, mask=inside)


def _launch(state_dim: int, has_skip: bool) -> Launch:
    block_state = triton.next_power_of_2(state_dim)
    blocks = {"BLOCK_STATE": block_state, "BLOCK_CHANNELS": max(1, _TILE // block_state)}
    return Launch({"STATE_DIM": state_dim, "HAS_SKIP": has_skip, **blocks}, num_warps=1)


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
    """Launch the kernel; the contract is the oracle's. Arrays are not checked: that would wait for the device."""
    x, dt, B, C = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, dt, B, C))
    states, kept = pools
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    batch_size = batch.slots.shape[0]
    channels, state_dim = A.shape
    if batch_size == 0 or states.numel() == 0:
        return out
    launch = _launch(state_dim, skip is not None)
    groups = B.shape[1]
    grid = (batch_size, groups, triton.cdiv(channels // groups, launch.constexprs["BLOCK_CHANNELS"]))
    _selective_scan_kernel[grid](
        *(x, dt, A, B, C, kept if skip is None else skip, states, kept, out),
        *batch.arrays,
        *(x.stride(0), dt.stride(0), *A.stride(), *B.stride()[:2], *C.stride()[:2]),
        kept.shape[1],
        channels,
        **launch.options,
    )
    return out


def variants() -> Iterator[Variant]:
    """Yield the compilations for each type, with and without a skip."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        signature = dict.fromkeys(_INPUTS, f"*{TYPE_NAMES[dtype]}")
        signature |= dict.fromkeys((*_NUMBERS, "states"), "*fp32") | dict.fromkeys(_ARRAYS, "*i32")
        signature |= dict.fromkeys((*_STRIDES, *_SIZES), "i32")
        for has_skip in (True, False):
            name = f"{TYPE_NAMES[dtype]}_16" + ("_skip" if has_skip else "")
            yield _launch(16, has_skip).variant(name, _selective_scan_kernel, signature, ("states",))
