"""Oracle of ``append_kv_``: write new K/V rows into pages."""

from __future__ import annotations

from torch import Tensor


def append_kv_(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Write row t of ``key`` and ``value`` to slot ``slot_mapping[t]``, in place.

    Args:
        key_cache: ``[num_pages, page_size, num_kv_heads, head_dim]``, contiguous.
        value_cache: ``[num_pages, page_size, num_kv_heads, value_head_dim]``, contiguous.
        key: ``[T, num_kv_heads, head_dim]``, the rows of one forward, any strides.
        value: ``[T, num_kv_heads, value_head_dim]``, any strides.
        slot_mapping: ``[T]`` int32, ``page * page_size + offset`` of each row. Slots of page 0 are scratch; every
            other slot appears at most once.

    """
    slots = slot_mapping.long()
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)
