"""Arguments of ``append_kv_``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.op_cases.case import Case, OpCases


def _draw(
    rows: int,
    shape: tuple[int, int, int],
    generator: torch.Generator,
    dtype: torch.dtype,
    fused: bool = False,
    value_dim: int | None = None,
) -> dict[str, Any]:
    """Draw caches and rows; ``shape``: page size, KV heads, size of a key. None: a value has the size of a key.

    With ``fused``, values are a slice of one projection's output and keys are not.
    """
    page_size, heads, head_dim = shape
    num_pages = rows // page_size + 3
    caches = torch.randn(2, num_pages, page_size, heads, head_dim, generator=generator).to(dtype)
    # the strides with which a model passes them
    new = torch.randn(2, heads, rows, head_dim, generator=generator).to(dtype)
    value = new[1].transpose(0, 1)
    if fused:
        value = torch.stack([value, value], dim=1).flatten(1, 2)[:, heads:]  # wider rows than those of the keys
    slots = torch.randperm((num_pages - 1) * page_size, generator=generator)[:rows]
    slots += page_size  # page 0 is scratch
    return {
        "key_cache": caches[0],
        "value_cache": caches[1, ..., :value_dim].contiguous(),
        "key": new[0].transpose(0, 1),
        "value": value[..., :value_dim],
        "slot_mapping": slots.to(torch.int32),
    }


def _bytes_moved(key: Tensor, value: Tensor, **others: Tensor) -> int:
    return 2 * (key.numel() + value.numel()) * key.element_size()  # every row is read and written


_SIZES = "keys and values of different head sizes"
_QWEN3_8B = (16, 8, 128)  # one layer

OP_CASES = OpCases(
    cases=(
        Case("one_row", "plain decoding of one sequence", partial(_draw, 1, (16, 2, 32))),
        Case("verify", "rows of several sequences, scattered pages", partial(_draw, 48, (16, 2, 32))),
        Case("prefill", "many pages, odd sizes", partial(_draw, 301, (8, 3, 20))),
        Case("page_of_one", "pages of one position", partial(_draw, 7, (1, 1, 16))),
        Case("no_rows", "an empty batch", partial(_draw, 0, (16, 2, 32))),
        Case("wider_keys", _SIZES, partial(_draw, 21, (16, 2, 48), fused=True, value_dim=32)),
        Case("odd_sizes", _SIZES, partial(_draw, 21, (8, 3, 24), fused=True, value_dim=7)),
        Case("fused_projection", "values of other strides than keys", partial(_draw, 21, (16, 2, 32), fused=True)),
    ),
    benchmarks=(
        Case("verify", "batch 8, K 5", partial(_draw, 48, _QWEN3_8B)),
        Case("prefill", "a prompt of 2048 tokens", partial(_draw, 2048, _QWEN3_8B)),
    ),
    bytes_moved=_bytes_moved,
)
