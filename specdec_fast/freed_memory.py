"""Gives memory that this process has freed back to the system."""

from __future__ import annotations

import ctypes
import gc
import os


def return_freed_memory() -> None:
    """Return to the system what this process has freed, where the C library can (``malloc_trim`` of glibc).

    Probes of a new engine, and the rounding of weights, allocate and free tensors. glibc keeps some of that memory,
    which a plan does not count.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
