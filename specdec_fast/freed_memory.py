"""Memory of this process: what it has freed goes back to the system, and errors that say that there is none."""

from __future__ import annotations

import ctypes
import gc
import os

import torch

from specdec_fast.errors import SpecDecError

# PyTorch raises no type of its own for a CPU, nor for some libraries on a GPU.
_MESSAGES = ("DefaultCPUAllocator: ", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def return_freed_memory() -> None:
    """Return to the system what this process has freed, where the C library can (``malloc_trim`` of glibc).

    Probes of a new engine, and the rounding of weights, allocate and free tensors. glibc keeps some of that memory,
    which a plan does not count.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory could not be allocated, on the device or on the host."""
    if isinstance(error, SpecDecError):
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)
