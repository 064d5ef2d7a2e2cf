"""What choosing K and learning from a step take on this machine, as they do between two forwards."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np

from specdec_fast.request.sequence import Sequence
from specdec_fast.sampling_params import SamplingParams
from specdec_fast.speculation_length.base import LengthPolicy, StepObservation

_ROUNDS = 5  # of which the least counts: a busy machine only adds
_SWEPT = 2**20  # numbers of 8 bytes, more than a core's own caches hold: a forward leaves little of what is needed here
_PROMPT, _NEW_TOKENS = 64, 64


def profile_overhead(make: Callable[[], LengthPolicy], most: int, batch_size: int) -> tuple[float, float]:
    """Return the seconds of a choice and of an observation, for full batches, of policies that ``make`` makes."""
    swept = np.zeros(_SWEPT)
    choosing, observing = [], []
    for _ in range(_ROUNDS):
        lengths = make()  # chooses and observes in its first step
        batch = [_sequence(index) for index in range(batch_size)]
        swept += 1
        started = perf_counter()
        lengths.limits(batch)
        choosing.append(perf_counter() - started)
        counts = [most // 2] * batch_size
        step = StepObservation(batch, counts, counts, counts, 1.0, 1.0, 1.0)
        swept += 1
        started = perf_counter()
        lengths.observe(step)
        observing.append(perf_counter() - started)
    return min(choosing), min(observing)


def _sequence(index: int) -> Sequence:
    return Sequence(index, [0] * _PROMPT, _PROMPT, _PROMPT + _NEW_TOKENS, SamplingParams(), frozenset())
