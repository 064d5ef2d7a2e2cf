"""Signals that end a training: SIGTERM does so as Ctrl-C does, and both wait for the end of a step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise Terminated while the block runs; only the main thread can handle signals."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def deferred() -> Iterator[None]:
    """Handle SIGINT and SIGTERM when the block has ended, so that none leaves half of its work."""
    if current_thread() is not main_thread():
        yield
        return
    present = {int(number): signal.getsignal(number) for number in _SIGNALS}
    handlers = {number: handler for number, handler in present.items() if callable(handler)}
    came: list[int] = []
    for number in handlers:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in came[:1]:
        handlers[number](number, None)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated
