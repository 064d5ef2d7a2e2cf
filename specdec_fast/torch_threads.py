"""Threads of a forward that PyTorch runs: all threads for linears and attention, one for the operations between them.

PyTorch splits an elementwise operation among threads at arbitrary places, and computes the end of each part, behind the
last full vector, by another function, whose results may differ in the last bits. On one thread nothing is split.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

# In the present forward: the threads for `invariant_call`, and whether the code runs inside one.
_threads: ContextVar[int | None] = ContextVar("threads", default=None)
_in_invariant_call: ContextVar[bool] = ContextVar("in_invariant_call", default=False)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on the calling thread alone, except inside ``invariant_call``."""
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


@contextmanager
def number_of_threads(number: int) -> Iterator[None]:
    """Let the calling thread compute on so many threads."""
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    _setter()(number)
    try:
        yield
    finally:
        _setter()(before)


def invariant_call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that gives a row the same bits whatever the other rows, on all threads even in ``one_thread``."""
    threads = _threads.get()
    token = _in_invariant_call.set(True)
    if threads is not None:
        _setter()(threads)
    try:
        return function(*args)
    finally:
        if threads is not None:
            _setter()(1)
        _in_invariant_call.reset(token)


def in_invariant_call() -> bool:
    """Return whether the code runs inside ``invariant_call``, in this thread."""
    return _in_invariant_call.get()


@cache
def _setter() -> Callable[[int], Any]:
    """Return the function that sets the number of threads: OpenMP's own if PyTorch uses OpenMP, else PyTorch's.

    OpenMP's sets it for the calling thread only; ``torch.set_num_threads`` also for every thread that starts later.
    """
    before = torch.get_num_threads()
    try:
        setter = ctypes.CDLL(None).omp_set_num_threads
    except (OSError, AttributeError, TypeError):
        return torch.set_num_threads
    setter.argtypes = [ctypes.c_int]
    setter.restype = None
    setter(before + 1)
    is_used = torch.get_num_threads() == before + 1
    setter(before)
    return setter if is_used else torch.set_num_threads
