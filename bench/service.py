"""What the asynchronous engine costs beside ``Engine.generate`` with the same batch size, and how long callers wait.

Throughput: clients stream all prompts, each client its next one when the last has ended, in turns with one call of
``generate`` on the same engine. Waiting: seconds to a request's first token, seconds per token after it, and how long
the event loop did not run. Faults: for some seconds, clients abandon and cancel a part of their streams; no token may
be wrong, no page lost, and no request without an end. No speed is reported if a token is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench.common import report
from bench.common.workload import Workload, add_workload_options, check_workload, load
from specdec_fast import AsyncEngine, Engine, SamplingParams
from specdec_fast.commands.common import format_table

_LOOK_SECONDS = 0.001  # between two looks at whether the event loop runs
_IDLE_SECONDS = 5.0  # for which the event loop is watched while nothing is served
_ABANDONED, _CANCELLED = 5, 7  # every so many-th request of the part with cancellations


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
        seconds: from the first request to the last end.

    """

    first: list[float] = field(default_factory=list)
    each: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_wrong: int = 0
    num_ended: int = 0
    seconds: float = 0.0


class Clients:
    """Clients of one service, each with one request at a time."""

    def __init__(self, engine: AsyncEngine, workload: Workload, expected: list[list[int]], num_clients: int) -> None:
        self._engine, self._prompts, self._expected = engine, workload.prompts, expected
        self._params, self._num_clients = SamplingParams(max_new_tokens=workload.max_new_tokens), num_clients

    async def run(self, numbers: Iterator[int], stop_at: float = float("inf"), cancels: bool = False) -> Load:
        """Stream the prompts with these numbers until they are exhausted, or until a time."""
        load = Load()

        async def client() -> None:
            for number in numbers:
                await self._request(number, load, cancels)
                if perf_counter() >= stop_at:
                    return

        async with _watched_loop(load.pauses):
            started = perf_counter()
            await asyncio.gather(*(client() for _ in range(self._num_clients)))
            load.seconds = perf_counter() - started
        return load

    async def _request(self, number: int, load: Load, cancels: bool) -> None:
        index = number % len(self._prompts)
        tokens: list[int] = []
        started = last = perf_counter()
        stream = self._engine.stream(self._prompts[index], self._params)
        async for chunk in stream:
            now = perf_counter()
            if not tokens:
                load.first.append(now - started)
            elif chunk.token_ids:
                load.each.append((now - last) / len(chunk.token_ids))
            last = now
            tokens += chunk.token_ids
            if cancels and number % _ABANDONED == 0 and len(tokens) > number % 50:
                break
            if cancels and number % _CANCELLED == 0:
                self._engine.cancel(stream.request_id)
        expected = self._expected[index]
        is_cut = cancels and (number % _ABANDONED == 0 or number % _CANCELLED == 0)
        load.num_wrong += tokens != (expected[: len(tokens)] if is_cut else expected)
        load.num_tokens += len(tokens)
        load.num_ended += 1


@asynccontextmanager
async def _watched_loop(pauses: list[float]) -> AsyncIterator[None]:
    """Note by how much the event loop is late, again and again."""

    async def watch() -> None:
        while True:
            started = perf_counter()
            await asyncio.sleep(_LOOK_SECONDS)
            pauses.append(max(0.0, perf_counter() - started - _LOOK_SECONDS))

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


def _milliseconds(values: list[float]) -> dict[str, float]:
    """Return percentiles and the largest of some seconds."""
    found = 1e3 * np.percentile(values or [0.0], (50, 99, 99.9, 100))
    return dict(zip(("p50", "p99", "p99.9", "largest"), found.tolist(), strict=True))


async def compare(engine: AsyncEngine, workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Run both in turns, then the part with cancellations."""
    plain = Engine(workload.target, None, max_batch_size=1)
    params = SamplingParams(max_new_tokens=workload.max_new_tokens)
    expected = [output.token_ids for output in plain.generate(workload.prompts, params, progress=False)]
    clients = Clients(engine, workload, expected, args.streams)
    idle: list[float] = []
    async with _watched_loop(idle):
        await asyncio.sleep(_IDLE_SECONDS)
    generate, loads = [], []
    for turn in range(args.repeats + 1):  # the first is not measured
        started = perf_counter()
        outputs = await asyncio.to_thread(engine.engine.generate, workload.prompts, params, progress=False)
        seconds = perf_counter() - started
        wrong = sum(output.token_ids != tokens for output, tokens in zip(outputs, expected, strict=True))
        load = await clients.run(iter(range(len(workload.prompts))))
        if wrong or load.num_wrong:
            sys.exit(f"{wrong} outputs and {load.num_wrong} streams differ from plain decoding; no speed is reported.")
        if turn:
            generate.append(sum(map(len, expected)) / seconds)
            loads.append(load)
    faults = await clients.run(count(), perf_counter() + args.seconds, cancels=True)
    await engine.close(finish_within=60.0)
    pools = [engine.engine.core.pool, getattr(engine.engine.drafter, "pool", None)]
    first, each, pauses = ([v for load in loads for v in getattr(load, name)] for name in ("first", "each", "pauses"))
    return {
        "generate_tokens_per_second": median(generate),
        "stream_tokens_per_second": median(load.num_tokens / load.seconds for load in loads),
        "ratio": median(load.num_tokens / load.seconds / g for load, g in zip(loads, generate, strict=True)),
        "first_token_ms": _milliseconds(first),
        "per_token_ms": _milliseconds(each),
        "loop_pause_ms": _milliseconds(pauses),
        "idle_loop_pause_ms": _milliseconds(idle),
        "with_cancellations": {
            "seconds": faults.seconds,
            "num_requests": faults.num_ended,
            "num_wrong": faults.num_wrong,
            "loop_pause_ms": _milliseconds(faults.pauses),
            "all_pages_free": all(pool is None or pool.is_vacant for pool in pools),
        },
    }


def print_table(found: dict[str, Any]) -> None:
    """Print the figures, one a line."""
    faults = found["with_cancellations"]
    lines = [
        ("tokens/s, Engine.generate", f"{found['generate_tokens_per_second']:.0f}"),
        ("tokens/s, streams", f"{found['stream_tokens_per_second']:.0f} ({found['ratio']:.2f}x)"),
        *(
            (f"{label}, {name}", f"{value:.2f} ms")
            for key, label in (
                ("first_token_ms", "first token"),
                ("per_token_ms", "each later token"),
                ("loop_pause_ms", "event loop late"),
                ("idle_loop_pause_ms", "the same, nothing served"),
            )
            for name, value in found[key].items()
        ),
        ("requests with cancellations", f"{faults['num_requests']} in {faults['seconds']:.0f} s"),
        ("of them with a wrong token", faults["num_wrong"]),
        ("all pages free at the end", "yes" if faults["all_pages_free"] else "NO"),
    ]
    print(format_table(("measured", "value"), lines))


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, end in one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.service", description=(__doc__ or "").split("\n")[0])
    add_workload_options(parser)
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="clients (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="sequences per step (default: 32)")
    parser.add_argument("--num-draft-tokens", type=report.draft_tokens, default=[5], metavar="K", help="default: 5")
    parser.add_argument("--seconds", type=float, default=20.0, help="with cancellations (default: %(default)s)")
    report.add_report_options(parser)
    args = parser.parse_args(argv)
    check_workload(parser, args)
    report.prepare(args)
    workload = load(args, 2 * args.streams)
    engine = AsyncEngine(
        workload.target,
        workload.draft,
        max_batch_size=args.batch_size,
        num_draft_tokens=args.num_draft_tokens[0],
        max_waiting=args.streams,
    )
    found = asyncio.run(compare(engine, workload, args))
    print_table(found)
    settings = {name: getattr(args, name) for name in ("streams", "batch_size", "num_draft_tokens", "repeats", "dtype")}
    description = {"machine": report.machine(engine.engine.target.layout.device), "pair": workload.name}
    report.write_json({"benchmark": "service", **description, "settings": settings, **found}, args.json)
    if found["with_cancellations"]["num_wrong"] or not found["with_cancellations"]["all_pages_free"]:
        sys.exit("wrong tokens or lost pages; see above.")


if __name__ == "__main__":
    main()
