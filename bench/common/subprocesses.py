"""Calls in a process of their own, for figures that depend on what a process did before.

An allocator reuses freed memory without asking the system. So the peak does not rise, and the speed of an allocation
depends on which sizes were freed before, and in which order.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch


def in_subprocess(function: Callable[..., Any], *args: Any) -> Any:
    """Call a module's function in a new process, with as many threads as this one has; return what it returns."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_call, (torch.get_num_threads(), function, args))


def _call(num_threads: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(num_threads)
    return function(*args)
