"""Calls of the host between the kernels of a device, which a graph of the device cannot record.

An exchange between ranks by way of the host is one. While a graph is recorded, such a call ends the graph, and the
kernels behind it go to another one: see ``runner/graphs/capture.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

HostCall = Callable[[], None]
_take: ContextVar[Callable[[HostCall], None] | None] = ContextVar("take", default=None)


def call_host(call: HostCall) -> None:
    """Make a call, which reads and writes tensors that exist already; or let what records the kernels take it."""
    take = _take.get()
    if take is None:
        call()
    else:
        take(call)


@contextmanager
def host_calls_taken_by(take: Callable[[HostCall], None]) -> Iterator[None]:
    """While the context lasts, ``call_host`` in this thread passes calls to ``take`` instead of making them."""
    token = _take.set(take)
    try:
        yield
    finally:
        _take.reset(token)
