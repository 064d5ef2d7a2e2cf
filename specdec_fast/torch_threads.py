"""Threads of a forward that PyTorch runs: many for linears and attention, one for all that lies between them.

PyTorch cuts an elementwise operation among threads wherever it likes, and takes what is left of a thread's share behind
its last full vector from another function with other last bits. On one thread nothing is cut.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

# Of the forward under way: threads of what is computed apart, and whether something is just now.
_threads: ContextVar[int | None] = ContextVar("threads", default=None)
_is_apart: ContextVar[bool] = ContextVar("is_apart", default=False)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on the calling thread alone, but for what ``apart`` computes."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    token = _threads.set(before)
    _setter()(1)
    try:
        yield
    finally:
        _setter()(before)
        _threads.reset(token)


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that looks after the bits of its rows by itself, on as many threads as there were before."""
    threads, token = _threads.get(), _is_apart.set(True)
    if threads is not None:
        _setter()(threads)
    try:
        return function(*args)
    finally:
        if threads is not None:
            _setter()(1)
        _is_apart.reset(token)


def is_apart() -> bool:
    """Return whether ``apart`` calls something at the moment, in this thread."""
    return _is_apart.get()


@cache
def _setter() -> Callable[[int], Any]:
    """Return what sets the number of threads of the calling thread, OpenMP's own function if PyTorch runs on it.

    ``torch.set_num_threads`` sets it for every thread that begins meanwhile, too.
    """
    before = torch.get_num_threads()
    try:
        setter = ctypes.CDLL(None).omp_set_num_threads
    except (OSError, AttributeError, TypeError):
        return torch.set_num_threads
    setter.argtypes, setter.restype = [ctypes.c_int], None
    setter(before + 1)
    is_heard = torch.get_num_threads() == before + 1
    setter(before)
    return setter if is_heard else torch.set_num_threads
