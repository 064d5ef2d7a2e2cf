"""The op ``append_kv_``: write new K/V rows into pages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_fast.ops.checks import FLOATS, expect, expect_tensor
from specdec_fast.ops.registry import Case, Op


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


def _make(
    rows: int,
    shape: tuple[int, int, int],
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    fused: bool = False,
    value_dim: int | None = None,
) -> dict[str, Any]:
    """Make random caches and rows.

    With ``fused``, values are a slice of one projection's output and keys are not. ``value_dim`` is by default a key's.
    """
    page_size, heads, head_dim = shape
    num_pages = rows // page_size + 3
    caches = torch.randn(2, num_pages, page_size, heads, head_dim, generator=generator, device="cpu").to(dtype)
    # the strides with which a model passes them
    new = torch.randn(2, heads, rows, head_dim, generator=generator, device="cpu").to(dtype)
    value = new[1].transpose(0, 1)
    if fused:
        value = torch.stack([value, value], dim=1).flatten(1, 2)[:, heads:]  # wider rows than those of the keys
    slots = torch.randperm((num_pages - 1) * page_size, generator=generator, device="cpu")[:rows]
    slots += page_size  # page 0 is scratch
    return {
        "key_cache": caches[0].to(device),
        "value_cache": caches[1, ..., :value_dim].contiguous().to(device),
        "key": new[0].transpose(0, 1).to(device),
        "value": value[..., :value_dim].to(device),
        "slot_mapping": slots.to(torch.int32).to(device),
    }


def _cases() -> Iterator[Case]:
    grid = (
        ("one_row", "plain decoding of one sequence", 1, (16, 2, 32)),
        ("verify", "rows of several sequences, scattered pages", 48, (16, 2, 32)),
        ("prefill", "many pages, odd sizes", 301, (8, 3, 20)),
        ("page_of_one", "pages of one position", 7, (1, 1, 16)),
        ("no_rows", "an empty batch", 0, (16, 2, 32)),
    )
    for name, why, rows, shape in grid:
        yield Case(name, why, partial(_make, rows, shape))
    sizes = {"wider_keys": ((16, 2, 48), 32), "odd_sizes": ((8, 3, 24), 7)}
    for name, (shape, value_dim) in sizes.items():
        why = "keys and values of different head sizes"
        yield Case(name, why, partial(_make, 21, shape, fused=True, value_dim=value_dim))
    yield Case("fused_projection", "values of other strides than keys", partial(_make, 21, (16, 2, 32), fused=True))


def _benchmarks() -> Iterator[Case]:
    qwen3_8b = (16, 8, 128)  # page size, KV heads, head size: one layer
    yield Case("verify", "batch 8, K 5", partial(_make, 48, qwen3_8b))
    yield Case("prefill", "a prompt of 2048 tokens", partial(_make, 2048, qwen3_8b))


def _bytes_moved(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> int:
    return 2 * (key.numel() + value.numel()) * key.element_size()  # every row is read and written


OP = Op(
    name="append_kv_",
    implementations={
        "torch": "specdec_fast.ops.append_kv:append_kv_",
        "cpp": "specdec_fast.ops.cpp:append_kv_",
        "triton": "specdec_fast.triton_kernels.append_kv:append_kv_",
    },
    check=_check,
    cases=_cases,
    benchmarks=_benchmarks,
    bytes_moved=_bytes_moved,
)
