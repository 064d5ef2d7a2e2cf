"""The instruction of NVIDIA devices that permutes bytes: a table of 16 entries in registers is looked up with it."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETING = tl.constexpr(_IS_INTERPRETED)


def has_permute() -> bool:
    """Return whether the current device has the instruction; the interpreter takes long for what it does."""
    return torch.version.hip is None and not _IS_INTERPRETED


@triton.jit
def permute(first, second, selectors):
    """Return int32 whose byte i is byte ``selectors >> 4 i & 7`` of ``first`` (0 to 3) and ``second`` (4 to 7).

    All are int32; bit 3 of the four selectors must be 0, and higher bits are ignored.
    """
    if _INTERPRETING:
        found = selectors * 0
        for i in tl.static_range(4):
            selector = selectors >> 4 * i & 7
            found |= (tl.where(selector < 4, first, second) >> (selector % 4 * 8) & 255) << 8 * i
    else:
        found = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [first, second, selectors], dtype=tl.int32, is_pure=True, pack=1
        )
    return found
