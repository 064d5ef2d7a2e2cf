"""What a sum over the ranks of a sharded target costs: ``--link-latency`` and ``--link-bandwidth`` of ``plan``.

The ranks are processes of one thread, or one per GPU. They add up rows of several sizes, as a forward does after the
attention and the MLP of every layer, and do nothing else.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import distributed

from bench.common import report
from bench.common.device import synchronize
from specdec_fast.ranks.exchange import Ranks, connected
from specdec_fast.ranks.workers import join_group

_ROWS = (1, 4, 16, 64, 256)
_CALLS = 200  # whose mean is one measurement


def seconds_of_sums(ranks: Ranks, hidden_size: int, device: torch.device, repeats: int) -> dict[int, float]:
    """Return the seconds of a sum of bf16 rows, the median of interleaved repeats, by the bytes that a rank sends."""
    rows = {count: torch.ones(count, hidden_size, dtype=torch.bfloat16, device=device) for count in _ROWS}
    found: dict[int, list[float]] = {each.nbytes: [] for each in rows.values()}
    for repeat in range(repeats + 1):
        for each in rows.values():
            ranks.sum(each)  # all ranks begin together
            synchronize(device)
            started = perf_counter()
            for _ in range(_CALLS):
                ranks.sum(each)
            synchronize(device)
            if repeat:
                found[each.nbytes].append((perf_counter() - started) / _CALLS)
    return {size: median(seconds) for size, seconds in found.items()}


def link_of(seconds: dict[int, float], num_ranks: int) -> tuple[float, float]:
    """Return latency (of the smallest sum) and bandwidth (that a rank receives: what larger ones take besides)."""
    least = min(seconds)
    most = max(seconds)
    return seconds[least], (num_ranks - 1) * (most - least) / (seconds[most] - seconds[least])


def _rank(rank: int, args: argparse.Namespace, folder: str, answer: Callable[[Any], None]) -> None:
    torch.set_num_threads(1)
    join_group(rank, args.ranks, folder)
    device = torch.device(f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
    ranks = connected(distributed.group.WORLD, device)
    seconds = seconds_of_sums(ranks, args.hidden_size, device, args.repeats)
    if rank == 0:
        answer((ranks.native is not None, seconds))
    distributed.destroy_process_group()


def main() -> None:
    """Measure, and print both figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        others = [context.Process(target=_rank, args=(rank, args, folder, there.send)) for rank in range(args.ranks)]
        for other in others:
            other.start()
        shares_memory, seconds = here.recv()
        for other in others:
            other.join()
    latency, bandwidth = link_of(seconds, args.ranks)
    for size, each in seconds.items():
        print(f"{size} bytes: {each * 1e6:.1f} us")
    print(f"--link-latency {latency * 1e6:.3g} --link-bandwidth {bandwidth / 1e9:.3g}")
    machine = report.machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    found = {"latency_us": latency * 1e6, "bandwidth_gb_per_second": bandwidth / 1e9, "seconds": seconds}
    report.write_json({"machine": machine, "ranks": args.ranks, "shares_memory": shares_memory, **found}, args.json)


if __name__ == "__main__":
    main()
