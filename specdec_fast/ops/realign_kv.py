"""The op ``realign_kv_``: shift every row of a dense, right-aligned KV cache by its own amount."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_fast.ops.checks import FLOATS, expect, expect_tensor, is_in_memory
from specdec_fast.ops.registry import Op


def realign_kv_(layers: Sequence[tuple[Tensor, Tensor]], starts: Tensor, lengths: Tensor, shifts: Tensor) -> None:
    """Move columns ``starts[b]`` to ``starts[b] + lengths[b] - 1`` of row b by ``shifts[b]``, in place, in all layers.

    A shift may be negative (to the left), and the new place may overlap the old one. Rows with shift 0 do not change.
    Columns that a row leaves keep their old numbers.

    Args:
        layers: keys and values of each layer, each ``[B, num_kv_heads, columns, head_dim]``; all with one shape and the
            same strides; the last axis is contiguous.
        starts, lengths, shifts: ``[B]`` int32, of each row its first column, its number of columns, and its shift.
    """
    moves = zip(starts.tolist(), lengths.tolist(), shifts.tolist(), strict=True)
    for row, (start, length, shift) in enumerate(moves):
        if shift == 0:
            continue
        for tensor in (tensor for layer in layers for tensor in layer):
            content = tensor[row, :, start : start + length].clone()
            tensor[row, :, start + shift : start + shift + length] = content


def _check(layers: Sequence[tuple[Tensor, Tensor]], starts: Tensor, lengths: Tensor, shifts: Tensor) -> None:
    expect(len(layers) > 0, "layers is empty; expected keys and values of at least one layer.")
    first = layers[0][0]
    expect_tensor("keys of layer 0", first, (None,) * 4, FLOATS, first.device)
    shape = first.shape
    stride = first.stride()
    dtype = first.dtype
    device = first.device
    for i, (keys, values) in enumerate(layers):
        for name, t in (("keys", keys), ("values", values)):
            # Names are made only for an error, because small caches move in ten microseconds.
            if t.shape != shape or t.dtype is not dtype or t.device != device or not is_in_memory(t):
                expect_tensor(f"{name} of layer {i}", t, tuple(shape), (dtype,), device)
            if t.stride() != stride:
                raise ValueError(f"{name} of layer {i} has other strides than keys of layer 0.")
    expect(stride[3] == 1 or shape[3] == 1, "the last axis of the cache must be contiguous.")
    is_expanded = any(step == 0 and size > 1 for step, size in zip(stride, shape, strict=True))
    expect(not is_expanded, "the cache is expanded; every entry must have memory of its own.")
    rows = (shape[0],)
    for name, array in (("starts", starts), ("lengths", lengths), ("shifts", shifts)):
        expect_tensor(name, array, rows, (torch.int32,), device)
        expect(array.is_contiguous(), "starts, lengths and shifts must be contiguous.")
    if device.type == "cpu":  # on a device, reading them would wait
        num_columns = shape[2]
        for start, length, shift in zip(starts.tolist(), lengths.tolist(), shifts.tolist(), strict=True):
            low, high = (start, start + shift) if shift > 0 else (start + shift, start)
            if low < 0 or length < 0 or high + length > num_columns:
                raise ValueError(
                    f"a row of {length} columns from {start} cannot be shifted by {shift} within {num_columns} columns."
                )


OP = Op(
    name="realign_kv_",
    implementations={
        "torch": "specdec_fast.ops.realign_kv:realign_kv_",
        "cpp": "specdec_fast.ops.cpp:realign_kv_",
        "triton": "specdec_fast.triton_kernels.realign_kv:realign_kv_",
    },
    check=_check,
)
