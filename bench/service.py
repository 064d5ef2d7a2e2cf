"""What the asynchronous engine costs beside ``Engine.generate`` with the same batch size, and how long callers wait.

Throughput: clients stream all prompts, each client its next one when the last has ended, in turns with one call of
``generate`` on the same engine. Waiting: seconds to a request's first token, seconds per token after it, and how long
the event loop did not run. Faults: for some seconds, clients abandon and cancel a part of their streams; no token may
be wrong, no page lost, and no request without an end. No speed is reported if a token is wrong.

With ``--http`` the same prompts are also streamed from the HTTP server, which runs in the event loop of this process,
to clients in a process of their own. Over HTTP, clients abandon their streams by closing the connection, and others
read slowly.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any

from bench.common import report
from bench.common.http_load import HTTPClients
from bench.common.load import LOOK_SECONDS, Load, milliseconds, watched_loop
from bench.common.workload import Workload, add_workload_options, check_workload, load
from specdec_fast import AsyncEngine, Engine, SamplingParams
from specdec_fast.commands.common import format_table

_END_SECONDS = 60.0  # within which all requests end when all clients have gone
_IDLE_SECONDS = 5.0  # for which the event loop is watched while nothing is served
_ABANDONED, _CANCELLED = 5, 7  # every so many-th request of the part with cancellations


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

        async with watched_loop(load.pauses):
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


async def compare(engine: AsyncEngine, workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Run all in turns, then the part with cancellations."""
    plain = Engine(workload.target, None, max_batch_size=1)
    params = SamplingParams(max_new_tokens=workload.max_new_tokens)
    once = workload.prompts[: len(workload.prompts) // args.times]
    expected = [output.token_ids for output in plain.generate(once, params, progress=False)] * args.times
    clients = Clients(engine, workload, expected, args.streams)
    idle: list[float] = []
    async with watched_loop(idle):
        await asyncio.sleep(_IDLE_SECONDS)
    async with AsyncExitStack() as stack:
        http = None
        if args.http:
            http = await stack.enter_async_context(
                HTTPClients(engine, workload, expected, args.streams, args.stream_interval)
            )
        generate, loads, http_loads = await _measure(engine, workload, expected, clients, http, args.repeats)
        faults = await clients.run(count(), perf_counter() + args.seconds, cancels=True)
        http_faults = await http.run(args.seconds) if http else None
        num_left = await _num_live_after(engine, _END_SECONDS)
    await engine.close()
    pools = [engine.engine.core.pool, getattr(engine.engine.drafter, "pool", None)]
    return {
        "generate_tokens_per_second": median(generate),
        **_described(loads, generate),
        "idle_loop_pause_ms": milliseconds(idle),
        **({"http": _described(http_loads, generate)} if http else {}),
        "with_cancellations": _faults(faults),
        **({"http_with_cancellations": _faults(http_faults)} if http_faults else {}),
        "num_not_ended": num_left,
        "all_pages_free": all(pool is None or pool.is_vacant for pool in pools),
    }


async def _num_live_after(engine: AsyncEngine, seconds: float) -> int:
    """Return how many requests the engine still serves when all clients have gone, after some seconds at most."""
    deadline = perf_counter() + seconds
    while (number := engine.stats().num_running + engine.stats().num_waiting) and perf_counter() < deadline:
        await asyncio.sleep(LOOK_SECONDS)
    return number


def _faults(load: Load) -> dict[str, Any]:
    """Return what a part with cancellations has found."""
    names = ("seconds", "num_ended", "num_tokens", "num_wrong", "num_hung")
    return {**{name: getattr(load, name) for name in names}, "loop_pause_ms": milliseconds(load.pauses)}


async def _measure(
    engine: AsyncEngine,
    workload: Workload,
    expected: list[list[int]],
    clients: Clients,
    http: HTTPClients | None,
    repeats: int,
) -> tuple[list[float], list[Load], list[Load]]:
    """Return the speeds of ``generate``, and what streams and streams over HTTP saw, of every turn but the first."""
    generate, loads, http_loads = [], [], []
    params = SamplingParams(max_new_tokens=workload.max_new_tokens)
    for turn in range(repeats + 1):  # the first is not measured
        started = perf_counter()
        outputs = await asyncio.to_thread(engine.engine.generate, workload.prompts, params, progress=False)
        seconds = perf_counter() - started
        wrong = sum(output.token_ids != tokens for output, tokens in zip(outputs, expected, strict=True))
        found = [await clients.run(iter(range(len(workload.prompts)))), *([await http.run()] if http else [])]
        num_wrong = sum(load.num_wrong for load in found)
        if wrong or num_wrong:
            sys.exit(f"{wrong} outputs and {num_wrong} streams differ from plain decoding; no speed is reported.")
        if turn:
            generate.append(sum(map(len, expected)) / seconds)
            loads.append(found[0])
            http_loads += found[1:]
    return generate, loads, http_loads


def _described(loads: list[Load], generate: list[float]) -> dict[str, Any]:
    """Return the speed of streams, and how long they waited."""
    first, each, pauses = ([v for load in loads for v in getattr(load, name)] for name in ("first", "each", "pauses"))
    return {
        "stream_tokens_per_second": median(load.num_tokens / load.seconds for load in loads),
        "ratio": median(load.num_tokens / load.seconds / g for load, g in zip(loads, generate, strict=True)),
        "first_token_ms": milliseconds(first),
        "per_token_ms": milliseconds(each),
        "loop_pause_ms": milliseconds(pauses),
    }


def print_table(found: dict[str, Any]) -> None:
    """Print the figures, one a line."""
    kinds = {"with_cancellations": "streams", "http_with_cancellations": "streams over HTTP"}
    lines = [
        ("tokens/s, Engine.generate", f"{found['generate_tokens_per_second']:.0f}"),
        *_lines("streams", found),
        *(_lines("streams over HTTP", found["http"]) if "http" in found else []),
        *(
            (f"event loop late, nothing served, {name}", f"{v:.2f} ms")
            for name, v in found["idle_loop_pause_ms"].items()
        ),
        *(line for key, label in kinds.items() if key in found for line in _fault_lines(label, found[key])),
        ("requests that had not ended when all clients had gone", found["num_not_ended"]),
        ("all pages free at the end", "yes" if found["all_pages_free"] else "NO"),
    ]
    print(format_table(("measured", "value"), lines))


def _fault_lines(label: str, faults: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of a part with cancellations."""
    pause = faults["loop_pause_ms"]
    return [
        (f"{label} with cancellations: requests", f"{faults['num_ended']} in {faults['seconds']:.0f} s"),
        (f"{label} with cancellations: with a wrong token", f"{faults['num_wrong']}"),
        (f"{label} with cancellations: hung", f"{faults['num_hung']}"),
        (
            f"{label} with cancellations: event loop late, p99, largest",
            f"{pause['p99']:.2f}, {pause['largest']:.2f} ms",
        ),
    ]


def _lines(label: str, found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of one kind of streams."""
    kinds = {"first_token_ms": "first token", "per_token_ms": "each later token", "loop_pause_ms": "event loop late"}
    return [
        (f"tokens/s, {label}", f"{found['stream_tokens_per_second']:.0f} ({found['ratio']:.2f}x)"),
        *(
            (f"{label}: {kind}, {name}", f"{value:.2f} ms")
            for key, kind in kinds.items()
            for name, value in found[key].items()
        ),
    ]


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, end in one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.service", description=(__doc__ or "").split("\n")[0])
    add_workload_options(parser)
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="clients (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="sequences per step (default: 32)")
    parser.add_argument("--num-draft-tokens", type=report.draft_tokens, default=[5], metavar="K", help="default: 5")
    parser.add_argument("--seconds", type=float, default=20.0, help="with cancellations (default: %(default)s)")
    parser.add_argument("--http", action="store_true", help="also stream over HTTP")
    parser.add_argument("--stream-interval", type=int, default=1, metavar="N", help="tokens per event over HTTP")
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
    gc.collect()
    gc.freeze()  # as `specdec-fast serve` does
    found = asyncio.run(compare(engine, workload, args))
    print_table(found)
    settings = {
        name: getattr(args, name)
        for name in ("streams", "batch_size", "num_draft_tokens", "repeats", "dtype", "stream_interval")
    }
    description = {"machine": report.machine(engine.engine.target.layout.device), "pair": workload.name}
    report.write_json({"benchmark": "service", **description, "settings": settings, **found}, args.json)
    parts = [found[name] for name in ("with_cancellations", "http_with_cancellations") if name in found]
    if any(part["num_wrong"] or part["num_hung"] for part in parts) or found["num_not_ended"]:
        sys.exit("wrong tokens or requests without an end; see above.")
    if not found["all_pages_free"]:
        sys.exit("lost pages; see above.")


if __name__ == "__main__":
    main()
