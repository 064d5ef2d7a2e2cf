"""What clients of a service saw: how long they waited, and by how much the event loop was late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

LOOK_SECONDS = 0.001  # between two looks at whether the event loop runs


@dataclass
class Load:
    """What clients saw.

    Attributes:
        first: seconds from a request to its first chunk.
        each: seconds per token after it, of each later chunk.
        pauses: seconds by which the event loop was late, at every look.
        num_tokens: tokens received.
        num_wrong: requests with a token that differs from the reference's.
        num_ended: requests that came to their end, or were cancelled.
        num_hung: requests that got nothing for a minute.
        seconds: from the first request to the last end.

    """

    first: list[float] = field(default_factory=list)
    each: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_wrong: int = 0
    num_ended: int = 0
    num_hung: int = 0
    seconds: float = 0.0


@asynccontextmanager
async def watched_loop(pauses: list[float], times: list[float] | None = None) -> AsyncIterator[None]:
    """Note by how much the event loop is late, again and again, and at what time."""
    times = [] if times is None else times

    async def watch() -> None:
        while True:
            started = perf_counter()
            await asyncio.sleep(LOOK_SECONDS)
            times.append(perf_counter())
            pauses.append(max(0.0, times[-1] - started - LOOK_SECONDS))

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


def milliseconds(values: list[float]) -> dict[str, float]:
    """Return percentiles and the largest of some seconds."""
    found = 1e3 * np.percentile(values or [0.0], (50, 99, 99.9, 100))
    return dict(zip(("p50", "p99", "p99.9", "largest"), found.tolist(), strict=True))
