"""How much memory a call needs on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the most bytes of tensors that a call has at once, besides those that exist before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
