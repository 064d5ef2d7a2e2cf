"""Timing for all benchmarks: interleaved samples of equal weight, medians, and ratios taken within a repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

Call = Callable[[], Any]
SHORTEST_SAMPLE = 5e-3  # seconds; in a shorter sample the timer's resolution or one interrupt would change the figure


@dataclass(frozen=True)
class Clock:
    """Measures calls on one device: by the wall clock on a CPU, by the device's events on a GPU."""

    device: torch.device

    def seconds(self, call: Call, num_calls: int = 1) -> float:
        """Return the mean seconds per call of ``num_calls`` in a row."""
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(num_calls):
                call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3 / num_calls
        started = perf_counter()
        for _ in range(num_calls):
            call()
        return (perf_counter() - started) / num_calls

    def calls_per_sample(self, call: Call) -> int:
        """Return how many calls take ``SHORTEST_SAMPLE``; run them, which also warms up."""
        self.seconds(call)  # the first call starts threads and compiles kernels
        num_calls = 1
        while (seconds := self.seconds(call, num_calls) * num_calls) < SHORTEST_SAMPLE:
            num_calls = max(2 * num_calls, int(num_calls * SHORTEST_SAMPLE / max(seconds, SHORTEST_SAMPLE / 100)))
        return num_calls

    def interleave(self, repeats: Sequence[Mapping[str, Call]]) -> dict[str, list[float]]:
        """Time all calls of a repeat before those of the next one; return seconds per call, by name.

        Args:
            repeats: the calls of each repeat, with the same names; the first repeat also warms up.

        """
        num_calls = {name: self.calls_per_sample(call) for name, call in repeats[0].items()}
        samples: dict[str, list[float]] = {name: [] for name in repeats[0]}
        for calls in repeats:
            for name, call in calls.items():
                samples[name].append(self.seconds(call, num_calls[name]))
        return samples


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median of the ratios within each repeat, which is steadier than a ratio of medians."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))
