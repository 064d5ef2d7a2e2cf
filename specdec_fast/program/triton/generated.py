"""Kernels whose source is generated, as Triton compiles them."""

from __future__ import annotations

import linecache
from functools import cache
from hashlib import sha256
from typing import Any

import triton
import triton.language as tl

from specdec_fast.triton_kernels import linear_parts, overlap, row_functions

# A product and a sum are rounded one after the other, as the instructions say.
OPTIONS = {"enable_fp_fusion": False}

# What the source of a kernel may call.
_PARTS = {
    **{name: getattr(row_functions, name) for name in dir(row_functions) if name.endswith("_of")},
    **{name: value for name, value in vars(linear_parts).items() if isinstance(value, type(linear_parts.matrix_of))},
    "wait": overlap.wait,
    "prefetch_rows": overlap.prefetch_rows,
}


@cache
def compiled(source: str) -> Any:
    """Return the kernel of a module; equal sources, as those of a model's layers, are compiled once."""
    name = f"<row kernel {sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # Triton reads it
    namespace: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": name, **_PARTS}
    exec(compile(source, name, "exec"), namespace)
    return namespace["row_kernel"]
