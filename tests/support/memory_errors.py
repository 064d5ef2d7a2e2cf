"""Errors of memory that could not be allocated, as they come from a GPU, from C++ and from a CPU."""

from __future__ import annotations

import pytest
import torch


def real_error(make):
    """Return what PyTorch raises if memory cannot be allocated."""
    with pytest.raises(RuntimeError) as raised:
        make()
    return raised.value


ERRORS = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "c++": MemoryError("std::bad_alloc"),
    "cpu": real_error(lambda: torch.empty(2**46, device="cpu")),
}
