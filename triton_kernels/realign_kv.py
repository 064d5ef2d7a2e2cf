"""``realign_kv_``: shift the rows of a dense cache, each by its own amount, in place, all layers in one launch.

Bytes: every column of a row that moves is read and written once in each layer, keys and values; rows with shift 0 cost
nothing. Grid: (rows, heads, planes), where a plane is the keys or the values of one layer. Each plane is an allocation
of its own, so the kernel receives a list of addresses. A program moves the columns of one head, row and plane.

Why tiles of columns are safe: a shift to the left takes tiles from the left, so it overwrites columns of the same or of
*earlier* tiles only. A shift to the right takes tiles from the right, so it overwrites columns of the same or of
*later* tiles only. Within a tile the kernel loads all columns before it stores any, with a barrier between, so that no
thread's store overtakes another thread's load. It needs no barrier after the stores, because no earlier tile has
written what the next tile loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.triton_kernels.variant import Launch, Variant

_TILE_BYTES = 16384  # bytes that a program holds in registers between loading and storing
_NARROW_TILE_BYTES = 4096  # the same if every number is loaded by itself, with an address in two registers
_STRIDES = ("stride_plane_row", "stride_plane_head", "stride_plane_column")
_UNSPECIALISED = ("addresses", "starts", "lengths", "shifts", *_STRIDES)  # a cache's strides change as it grows
_INTEGERS = {2: tl.int16, 4: tl.int32}  # a copy needs no floating-point type


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _realign_kernel(
    addresses,  # [num_planes] int64: of [B, num_kv_heads, columns, HEAD_DIM] each, the last axis contiguous
    starts,  # [B] int32
    lengths,  # [B] int32
    shifts,  # [B] int32
    stride_plane_row,
    stride_plane_head,
    stride_plane_column,
    ELEMENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    shift = tl.load(shifts + row)
    if shift == 0:
        return
    start = tl.load(starts + row)
    length = tl.load(lengths + row)
    plane = tl.load(addresses + tl.program_id(2)).to(tl.pointer_type(ELEMENT))
    if ALIGNMENT > 1:  # the compiler cannot know the alignment of a loaded address, and would use no vectors
        plane = tl.multiple_of(plane, 16)
    dims = tl.arange(0, BLOCK_DIM)[None, :]  # [1, BLOCK_DIM]
    source = plane + tl.multiple_of(row * stride_plane_row + head * stride_plane_head, ALIGNMENT) + dims
    num_tiles = tl.cdiv(length, BLOCK_COLUMNS)
    for i in range(num_tiles):
        tile = tl.where(shift < 0, i, num_tiles - 1 - i)
        columns = tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)  # [BLOCK_COLUMNS]
        inside = (columns < length)[:, None] & (dims < HEAD_DIM)
        read = tl.multiple_of((start + columns).to(tl.int64) * stride_plane_column, ALIGNMENT)
        written = tl.multiple_of((start + shift + columns).to(tl.int64) * stride_plane_column, ALIGNMENT)
        content = tl.load(source + read[:, None], mask=inside)
        tl.debug_barrier()
        tl.store(source + written[:, None], content, mask=inside)


def _launch(head_dim: int, itemsize: int, aligned: bool) -> Launch:
    block_dim = triton.next_power_of_2(head_dim)
    tile_bytes = _TILE_BYTES if aligned else _NARROW_TILE_BYTES
    constexprs = {
        "ELEMENT": _INTEGERS[itemsize],
        "HEAD_DIM": head_dim,
        "BLOCK_COLUMNS": max(1, min(128, tile_bytes // (block_dim * itemsize))),
        "BLOCK_DIM": block_dim,
        "ALIGNMENT": 16 // itemsize if aligned else 1,  # in numbers, of every column's address
    }
    return Launch(constexprs, num_warps=4)


def realign_kv_(layers: Sequence[tuple[Tensor, Tensor]], starts: Tensor, lengths: Tensor, shifts: Tensor) -> None:
    """Launch the kernel; the contract is the oracle's. Columns are not checked: that would wait for the device."""
    first = layers[0][0]
    if first.numel() == 0:
        return
    batch_size, num_kv_heads, _, head_dim = first.shape
    pointers = [tensor.data_ptr() for layer in layers for tensor in layer]
    strides = first.stride()[:3]
    itemsize = first.element_size()
    aligned = all(place % 16 == 0 for place in (*pointers, *(stride * itemsize for stride in strides)))
    _realign_kernel[batch_size, num_kv_heads, len(pointers)](
        _on_device(pointers, first.device), starts, lengths, shifts, *strides,
        **_launch(head_dim, itemsize, aligned).options,
    )  # fmt: skip


def _on_device(pointers: list[int], device: torch.device) -> Tensor:
    """Copy addresses to the device without waiting. The copy is not kept, because growing caches move every step."""
    addresses = torch.tensor(pointers, dtype=torch.int64, device="cpu")
    if device.type != "cpu":
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("realign_kv_ copies addresses from the host, so a CUDA graph cannot contain it")
        addresses = addresses.pin_memory()
    return addresses.to(device, non_blocking=True)


def variants() -> Iterator[Variant]:
    """Yield the compilations for usual models, for columns that fill no vector, and for unaligned addresses."""
    signature = {"addresses": "*i64"} | dict.fromkeys(("starts", "lengths", "shifts"), "*i32")
    signature |= dict.fromkeys(_STRIDES, "i32")
    for itemsize in (2, 4):
        for head_dim, aligned in ((128, True), (64, True), (20, 20 * itemsize % 16 == 0), (128, False)):
            name = f"{8 * itemsize}bit_dim{head_dim}" + ("" if aligned or head_dim == 20 else "_unaligned")
            yield _launch(head_dim, itemsize, aligned).variant(name, _realign_kernel, signature, ())
