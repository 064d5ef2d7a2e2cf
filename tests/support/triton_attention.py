"""``paged_attention`` in Triton's interpreter: sizes of many pieces, and what a call launches. It imports Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.op_cases.paged_attention import PagedShape
from specdec_fast.ops import all_ops
from specdec_fast.triton_kernels import paged_attention as module

OP = all_ops()["paged_attention"]
# fp16 first, which is faster here: its tiles are larger.
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
each_type = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
SMALL_PIECE = 64  # of one tile of KV in fp16 and four in fp32: many pieces in short contexts
UNSPLIT, SPLIT = 0, 1 << 30  # values of _ENOUGH_PROGRAMS
ENOUGH = {"split": SPLIT, "unsplit": UNSPLIT}
WINDOWS = {"full": None, "window": 70}
RULES = {"full": {}, "window": {"sliding_window": 70}, "chunk": {"attention_chunk": 44}}


def attention(**args: Any) -> Tensor:
    return OP.load("triton")(**args)


def make(shape: PagedShape, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    return shape.draw(torch.Generator().manual_seed(seed), dtype)


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[int, ...], dict[str, Any]]]]:
    """Note what is launched: the kernel, the grid and the compile-time options."""
    noted: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(module, name)
            self.arg_names = self.kernel.arg_names

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                noted.append((self.name, grid, options))
                self.kernel[grid](*args, **options)

            return launch

    with monkeypatch.context() as patch:
        for name in ("_attention_kernel", "_merge_kernel"):
            patch.setattr(module, name, Noted(name))
        yield noted


PIECES = {
    "chain": PagedShape((200, 64, 65), (6, 1, 40), head_dim=16),
    "window": PagedShape((200, 64, 130), (6, 3, 20), heads=2, kv_heads=1, head_dim=16, sliding_window=70),
    "chunk": PagedShape((200, 64, 130), (6, 3, 20), heads=2, kv_heads=1, head_dim=16, attention_chunk=50),
    "tree_chunk": PagedShape((150, 70), (5, 12), heads=2, kv_heads=1, head_dim=16, tree=True, attention_chunk=49),
    "softcap": PagedShape((130, 65), (6, 1), head_dim=16, softcap=2.0),
    "tree": PagedShape((150, 64, 40), (9, 3, 6), heads=2, kv_heads=1, head_dim=16, tree=True),
    "tree_window": PagedShape((150, 70), (5, 12), heads=2, kv_heads=1, head_dim=16, tree=True, sliding_window=64),
    "sinks": PagedShape((200, 64, 65), (6, 1, 40), head_dim=16, sinks=True),
    "narrow_values": PagedShape((200, 64, 65), (6, 1, 40), head_dim=24, value_dim=16),
    "page64": PagedShape((200, 64, 65), (6, 1, 40), head_dim=16, page_size=64),
    "page64_window": PagedShape((200, 130), (6, 20), heads=2, kv_heads=1, head_dim=16, page_size=64, sliding_window=70),
    "page128_tree": PagedShape((150, 64), (9, 3), heads=2, kv_heads=1, head_dim=16, page_size=128, tree=True),
    "no_rows": PagedShape((130, 90, 0), (3, 0, 0), head_dim=16),
}
