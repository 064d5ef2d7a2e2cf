"""``conv_rows_``: the short causal convolution of recurrent layers.

Bytes: every row is read and written once and stored once; the ring of a sequence is read where its first rows need it.
Grid: (sequences, blocks of channels). A program computes all rows of its channels, then stores them in the ring: a
barrier lies between, because a row may take the place of an input that was read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.batch.recurrent_batch import RecurrentBatch
from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

_ARRAYS = ("cu_seqlens", "slots", "state_lengths", "num_replayed")
_SIZES = ("stride_row", "num_places", "channels")
_TENSORS = ("rows", "state", "weight", "bias", "out")


@triton.jit(do_not_specialize=[*_TENSORS, *_ARRAYS, *_SIZES])
def _conv_kernel(
    rows,  # [T, channels], the last axis contiguous
    state,  # [num_slots, num_places, channels], contiguous
    weight,  # [channels, KERNEL_DIM], contiguous
    bias,  # [channels]; read if HAS_BIAS
    out,  # [T, channels], contiguous
    cu_seqlens,  # [B + 1] int32
    slots,  # [B] int32
    state_lengths,  # [B] int32
    num_replayed,  # [B] int32
    stride_row,
    num_places,
    channels,
    KERNEL_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)  # [BLOCK_CHANNELS]
    inside = channel < channels
    first = tl.load(cu_seqlens + sequence)
    num_rows = tl.load(cu_seqlens + sequence + 1) - first
    position = tl.load(state_lengths + sequence) + tl.load(num_replayed + sequence)
    ring = state + tl.load(slots + sequence).to(tl.int64) * num_places * channels + channel
    own = rows + first.to(tl.int64) * stride_row + channel
    written = out + first.to(tl.int64) * channels + channel
    start = tl.zeros([BLOCK_CHANNELS], tl.float32)
    if HAS_BIAS:
        start += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    for row in range(num_rows):
        total = start
        for j in tl.static_range(KERNEL_DIM):
            p = position + row - (KERNEL_DIM - 1) + j  # the input's position
            num_given = tl.where(p >= position, channels, 0)
            num_earlier = tl.where(p >= 0, channels - num_given, 0)  # in the ring
            place = tl.maximum(p, 0) % num_places
            earlier = tl.load(ring + place.to(tl.int64) * channels, mask=channel < num_earlier, other=0.0)
            given = tl.load(own + (p - position).to(tl.int64) * stride_row, mask=channel < num_given, other=0.0)
            number = (earlier + given).to(tl.float32)  # one of them is 0
            total += tl.load(weight + channel * KERNEL_DIM + j, mask=inside, other=0.0).to(tl.float32) * number
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(written, total.to(out.dtype.element_ty), mask=inside)
        written += channels
    tl.debug_barrier()
    for row in range(tl.maximum(0, num_rows - num_places), num_rows):
        p = position + row
        number = tl.load(own + (p - position).to(tl.int64) * stride_row, mask=inside)
        tl.store(ring + (p % num_places).to(tl.int64) * channels, number, mask=inside)


def _launch(kernel: int, has_bias: bool, activation: str | None) -> Launch:
    constexprs = {"KERNEL_DIM": kernel, "HAS_BIAS": has_bias, "SILU": activation == "silu", "BLOCK_CHANNELS": 128}
    return Launch(constexprs, num_warps=4)


def conv_rows_(
    rows: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, batch: RecurrentBatch
) -> Tensor:
    """Launch the kernel; the contract is the oracle's. Arrays are not checked: that would wait for the device."""
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    batch_size = batch.slots.shape[0]
    channels, kernel = weight.shape
    if rows.numel() == 0 or batch_size == 0:
        return out
    launch = _launch(kernel, bias is not None, activation)
    _conv_kernel[(batch_size, triton.cdiv(channels, launch.constexprs["BLOCK_CHANNELS"]))](
        rows,
        state,
        weight,
        weight if bias is None else bias,
        out,
        batch.cu_seqlens,
        batch.slots,
        batch.state_lengths,
        batch.num_replayed,
        rows.stride(0),
        state.shape[1],
        channels,
        **launch.options,
    )
    return out


def variants() -> Iterator[Variant]:
    """Yield the compilations for each type: the kernels of published models, with and without bias and activation."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = TYPE_NAMES[dtype]
        signature = dict.fromkeys(_TENSORS, f"*{name}") | dict.fromkeys(_ARRAYS, "*i32") | dict.fromkeys(_SIZES, "i32")
        for kernel, has_bias, activation in ((4, False, "silu"), (4, True, "silu"), (3, False, None), (4, True, None)):
            label = f"{name}_{kernel}" + ("_bias" if has_bias else "") + ("_silu" if activation else "")
            yield _launch(kernel, has_bias, activation).variant(label, _conv_kernel, signature, ())
