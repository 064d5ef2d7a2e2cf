"""Clients of a service, faults in its steps, and what is counted of both."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import torch

from specdec_fast import AsyncEngine, Engine, RequestError, SamplingParams
from specdec_fast.errors import DeadlineExceededError, EngineOverloadedError, StepError
from specdec_fast.ops import INVALID_TOKEN
from specdec_fast.results import RunStats

_REFUSED_SECONDS = 0.05  # after which a client tries again
_ROWS_IN_MEMORY = 4  # that never run out of memory
_INCOMPLETE = "\ufffd"
_SAMPLES = 200  # of the memory, per engine


@dataclass
class Request:
    """A request, and what plain decoding makes of it alone: tokens, log-probabilities, text."""

    prompt: list[int]
    params: SamplingParams
    expected: tuple[list[int], list[float] | None, str]


@dataclass
class Found:
    """What one engine did.

    Attributes:
        ends: number of requests by how they ended: finish reason, type of the error, abandoned, refused.
        wrong: descriptions of outputs that differ from the expected ones.
        counts: preemptions and repeated steps.
        memory: (requests that have ended, bytes in use) at regular times.
        left: what was not given back.

    """

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, int]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def growth(self) -> float | None:
        """Growth of memory over the second half of the samples, as a share of it: the Theil-Sen slope."""
        samples = self.memory[len(self.memory) // 2 :]
        pairs = [(a, b) for i, a in enumerate(samples) for b in samples[i + 1 :] if b[0] > a[0]]
        if not pairs:
            return None
        slope = median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)
        return slope * (samples[-1][0] - samples[0][0]) / samples[0][1]


class Faults:
    """Lets parts of an engine's steps raise, now and then.

    Args:
        engine: whose parts are replaced.
        draw: source of the choices.
        probability: of a fault, for each call of a part.

    """

    def __init__(self, engine: Engine, draw: random.Random, probability: float) -> None:
        self._draw, self._probability = draw, probability
        self.counts: Counter[str] = Counter()
        self._stats: RunStats | None = None
        for owner, name in (
            (engine.target, "verify_step"),
            (engine.core.prefilling, "compute"),
            (engine.drafter, "propose"),
            (engine.drafter, "commit"),
        ):
            setattr(owner, name, self._failing(getattr(owner, name), name == "verify_step"))
        self._step, self._core = engine.core.step, engine.core
        engine.core.step = self._counted  # type: ignore[method-assign]

    def count(self) -> None:
        """Add the counts of the statistics that the core has replaced, or ends with."""
        if self._stats is not None:
            self.counts["preemptions"] += self._stats.num_preemptions
            self.counts["repeated steps"] += self._stats.num_out_of_memory

    def _counted(self) -> Any:
        if self._core.stats is not self._stats:
            self.count()
            self._stats = self._core.stats
        return self._step()

    def _failing(self, call: Callable[..., Any], verifies: bool) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            result = call(*args)
            if self._draw.random() < self._probability:
                kind = self._draw.choice(["memory", "device", "chance", "nan"])
                is_large = self._core.row_limit.num_rows > _ROWS_IN_MEMORY
                if kind == "memory" and is_large:
                    raise MemoryError("injected")
                if kind == "device" and is_large:
                    raise torch.OutOfMemoryError("injected")
                if kind == "chance":
                    raise ZeroDivisionError("injected")
                if verifies and isinstance(result.results, list):
                    result.results[self._draw.randrange(len(result.results))][-1] = INVALID_TOKEN
            return result

        return wrapped


class Clients:
    """Clients of one engine, each with one request at a time."""

    def __init__(self, engine: AsyncEngine, requests: list[Request], seed: int) -> None:
        self._engine, self._requests, self._draw = engine, requests, random.Random(seed)
        self.found = Found()

    async def run(self, num_clients: int, seconds: float) -> None:
        """Send requests for a while, one per client at least, then wait for the ends of all."""
        stop_at, step = monotonic() + seconds, seconds / _SAMPLES

        async def client() -> None:
            await self._send()
            while monotonic() < stop_at:
                await asyncio.sleep(self._draw.expovariate(100.0))
                await self._send()

        async def watch() -> None:
            self.found.memory.append((self.found.ends.total(), bytes_in_use()))
            while monotonic() < stop_at:
                await asyncio.sleep(step)
                self.found.memory.append((self.found.ends.total(), bytes_in_use()))

        await asyncio.gather(watch(), *(client() for _ in range(num_clients)))

    async def _send(self) -> None:
        request, draw = self._draw.choice(self._requests), self._draw
        how = draw.choice(["generate", "stream", "stream", "abandon", "cancel", "cancel task", "deadline"])
        try:
            if how in ("generate", "cancel task"):
                await self._generate(request, how)
            else:
                await self._stream(request, how)
        except EngineOverloadedError:
            self.found.ends["refused"] += 1
            await asyncio.sleep(_REFUSED_SECONDS)
        except DeadlineExceededError as error:  # before its prompt was encoded, so it had no chunk
            self.found.ends[type(error).__name__] += 1

    async def _generate(self, request: Request, how: str) -> None:
        task = asyncio.create_task(self._engine.generate(request.prompt, request.params))
        if how == "cancel task":
            await asyncio.sleep(self._draw.expovariate(50.0))
            task.cancel()
        try:
            output = await task
        except asyncio.CancelledError:
            self.found.ends["task cancelled"] += 1
            return
        self._check(request, (output.token_ids, output.logprobs, output.text or ""), output.finish_reason, output.error)

    async def _stream(self, request: Request, how: str) -> None:
        timeout = self._draw.expovariate(20.0) + 1e-3 if how == "deadline" else None
        stream = self._engine.stream(request.prompt, request.params, timeout=timeout)
        most, num_chunks = self._draw.randrange(1, 6), 0
        tokens: list[int] = []
        logprobs: list[float] = []
        text = ""
        async for chunk in stream:
            tokens += chunk.token_ids
            logprobs += chunk.logprobs or []
            text += chunk.text or ""
            num_chunks += 1
            if chunk.finish_reason is None and num_chunks == most and how == "abandon":
                await stream.aclose()
                self.found.ends["abandoned"] += 1
                break
            if num_chunks == most and how == "cancel":
                self._engine.cancel(stream.request_id)
        result = (tokens, logprobs if request.params.logprobs else None, text)
        self._check(request, result, chunk.finish_reason, chunk.error)

    def _check(
        self, request: Request, result: tuple[Any, Any, Any], reason: str | None, error: RequestError | None
    ) -> None:
        """Compare an output with the expected one, and what there is of an unfinished one with its beginning."""
        tokens, logprobs, text = result
        if reason in ("stop", "length"):
            self.found.ends[reason] += 1
            is_right = result == request.expected
        else:
            if reason is not None:
                self.found.ends[type(error).__name__] += 1
            expected = request.expected
            # The text of a request that is cut short may end in the mark of an incomplete character, or in the
            # beginning of a stop string.
            whole = expected[2] + "".join(request.params.stop)
            is_right = tokens == expected[0][: len(tokens)] and whole.startswith(text.rstrip(_INCOMPLETE))
            is_right &= logprobs is None or logprobs == (expected[1] or [])[: len(logprobs)]
            is_right &= not isinstance(error, StepError) or "injected" in str(error)
        if not is_right:
            self.found.wrong.append(f"{request.params} {reason} {error}: {result}, expected {request.expected}"[:500])


def bytes_in_use() -> int:
    """Return the resident memory of this process; 0 where the system does not tell."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * 4096 if file.exists() else 0
