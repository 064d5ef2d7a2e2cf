"""The op ``append_kv_``: write new K/V rows into pages."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.ops.checks import FLOATS, expect, expect_tensor
from specdec_fast.ops.registry import Op


def append_kv_(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Write row t of ``key`` and ``value`` to slot ``slot_mapping[t]``, in place.

    Args:
        key_cache: ``[num_pages, page_size, num_kv_heads, head_dim]``, contiguous.
        value_cache: ``[num_pages, page_size, num_kv_heads, value_head_dim]``, contiguous.
        key: ``[T, num_kv_heads, head_dim]``, the rows of one forward, any strides.
        value: ``[T, num_kv_heads, value_head_dim]``, any strides.
        slot_mapping: ``[T]`` int32, ``page * page_size + offset``; different, except for those of scratch page 0.
    """
    slots = slot_mapping.long()
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)


def _check(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    device = key_cache.device
    dtype = (key_cache.dtype,)
    expect_tensor("key_cache", key_cache, (None,) * 4, FLOATS, device)
    expect_tensor("value_cache", value_cache, (*key_cache.shape[:3], None), dtype, device)
    num_rows = key.shape[0]
    expect_tensor("key", key, (num_rows, *key_cache.shape[2:]), dtype, device)
    expect_tensor("value", value, (num_rows, *value_cache.shape[2:]), dtype, device)
    expect_tensor("slot_mapping", slot_mapping, (num_rows,), (torch.int32,), device)
    expect(
        all(x.is_contiguous() for x in (key_cache, value_cache, slot_mapping)),
        "key_cache, value_cache and slot_mapping must be contiguous.",
    )


OP = Op(
    name="append_kv_",
    implementations={
        "torch": "specdec_fast.ops.append_kv:append_kv_",
        "cpp": "specdec_fast.ops.cpp:append_kv_",
        "triton": "specdec_fast.triton_kernels.append_kv:append_kv_",
    },
    check=_check,
)
