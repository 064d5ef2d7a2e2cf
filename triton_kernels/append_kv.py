"""``append_kv_``: write new K/V rows into pages, keys and values in one launch.

Bytes: every new row is read and written once, in all ``2 * T * num_kv_heads * (head_dim + value_dim) * itemsize``, and
4 bytes of slot per row. Grid: (rows, blocks of heads); a program moves the keys and values of some heads of one row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

_TILE = 2048  # numbers of keys that one program holds, and as many numbers of values


@triton.jit(do_not_specialize=["slot_mapping"])  # its address has any alignment
def _append_kernel(
    key_cache,  # [num_pages * page_size, NUM_HEADS, HEAD_DIM], contiguous
    value_cache,  # [num_pages * page_size, NUM_HEADS, VALUE_DIM], contiguous
    key,  # [T, NUM_HEADS, HEAD_DIM], the last axis contiguous
    value,  # [T, NUM_HEADS, VALUE_DIM], the last axis contiguous
    slot_mapping,  # [T] int32
    stride_key_row,
    stride_key_head,
    stride_value_row,
    stride_value_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]  # [BLOCK_HEADS, 1]
    dims = tl.arange(0, BLOCK_DIM)[None, :]  # [1, BLOCK_DIM]
    inside_key = (heads < NUM_HEADS) & (dims < HEAD_DIM)
    inside_value = (heads < NUM_HEADS) & (dims < VALUE_DIM)
    slot = tl.load(slot_mapping + row).to(tl.int64)
    # both loads before the first store, so that their latencies overlap
    new_key = tl.load(key + row * stride_key_row + heads * stride_key_head + dims, mask=inside_key)
    new_value = tl.load(value + row * stride_value_row + heads * stride_value_head + dims, mask=inside_value)
    head = slot * NUM_HEADS + heads
    tl.store(key_cache + head * HEAD_DIM + dims, new_key, mask=inside_key)
    tl.store(value_cache + head * VALUE_DIM + dims, new_value, mask=inside_value)


def _launch(num_heads: int, head_dim: int, value_dim: int) -> Launch:
    block_dim = triton.next_power_of_2(max(head_dim, value_dim))
    block_heads = triton.next_power_of_2(min(num_heads, max(1, _TILE // block_dim)))
    sizes = {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "VALUE_DIM": value_dim}
    constexprs = {**sizes, "BLOCK_HEADS": block_heads, "BLOCK_DIM": block_dim}
    return Launch(constexprs, num_warps=max(1, min(4, block_heads * block_dim // 256)))  # 16 bytes of bf16 a thread


def append_kv_(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Launch the kernel; the contract is the oracle's. Slots are not checked: that would wait for the device."""
    num_rows, num_heads, head_dim = key.shape
    if num_rows == 0:
        return
    key, value = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (key, value))
    launch = _launch(num_heads, head_dim, value.shape[2])
    grid = (num_rows, triton.cdiv(num_heads, launch.constexprs["BLOCK_HEADS"]))
    _append_kernel[grid](
        key_cache,
        value_cache,
        key,
        value,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        **launch.options,
    )


def variants() -> Iterator[Variant]:
    """Yield the compilations for usual models, and for heads whose size is no multiple of a vector."""
    strides = ("stride_key_row", "stride_key_head", "stride_value_row", "stride_value_head")
    tensors = ("key_cache", "value_cache", "key", "value")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        signature = dict.fromkeys(tensors, f"*{TYPE_NAMES[dtype]}") | {"slot_mapping": "*i32"}
        signature |= dict.fromkeys(strides, "i32")
        for num_heads, head_dim, value_dim in ((8, 128, 128), (3, 20, 20), (16, 192, 128)):
            aligned = (*tensors, *(strides if head_dim % 16 == 0 else ()))
            name = f"{TYPE_NAMES[dtype]}_{num_heads}x{head_dim}" + (f"_{value_dim}" if value_dim != head_dim else "")
            yield _launch(num_heads, head_dim, value_dim).variant(name, _append_kernel, signature, aligned)
        within = ("key_cache", "value_cache", "key")  # the values begin within the row of a fused projection
        fused = (*tensors, "stride_value_row")  # the stride of such rows is a multiple of 16
        for place, aligned in (("within", within), ("fused", fused)):
            name = f"{TYPE_NAMES[dtype]}_{place}_3x20"
            yield _launch(3, 20, 20).variant(name, _append_kernel, signature, aligned)
