"""Helpers for the tests of the asynchronous engine."""

from __future__ import annotations

import asyncio
from threading import Event, Semaphore

import specdec_fast as sd

NUM_REQUESTS = 14
MANY = sd.SamplingParams(max_new_tokens=90, ignore_eos=True)


SOME_STEPS = 5  # a first token comes within them, and no request of MANY tokens ends with one token per step


async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)


def num_served(engine):
    """Return how many requests have been encoded and have not ended; the next step serves them, or they wait."""
    return len(engine._worker._served)


def vacant(engine):
    core, pool = engine.engine.core, getattr(engine.engine.drafter, "pool", None)
    return not core.has_work and all(each is None or each.is_vacant for each in (core.pool, pool))


class Gate:
    """Lets a step through for each permit, or every step once it is open; and notes how many came."""

    def __init__(self, monkeypatch, engine):
        self.permits, self.num_steps, core = Semaphore(0), 0, engine.engine.core
        self.is_reached = Event()
        self._is_open = Event()
        step = core.step

        def gated():
            self.is_reached.set()
            if not self._is_open.is_set():
                assert self.permits.acquire(timeout=3600)
            self.num_steps += 1
            return step()

        monkeypatch.setattr(core, "step", gated)

    def open(self):
        self._is_open.set()
        self.permits.release()  # for the step that waits, if one does: steps come one after the other


async def read(stream, most=10**6):
    """Return the tokens, log-probabilities and last chunk of a stream, of which ``most`` chunks are read."""
    tokens, logprobs, chunk = [], [], None
    async for chunk in stream:
        tokens += chunk.token_ids
        logprobs += chunk.logprobs or []
        most -= 1
        if not most:
            break
    return tokens, logprobs, chunk
