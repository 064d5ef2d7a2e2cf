"""A service under faults, for minutes: every finished output must equal plain decoding's, and nothing may be left.

Clients of an ``AsyncEngine`` send requests of many kinds at random times: greedy and sampled, with a K of their own,
stop strings, log-probabilities; they read, abandon, cancel, and set deadlines. The KV pool is small, so sequences are
preempted, and parts of steps raise: for lack of memory, by chance, or with logits that hold a NaN. Each engine (drafter
and scheduler) gets its share of the time. In the end pages, threads, tasks and memory are checked.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import threading
from typing import Any

from bench.common import report
from bench.common.workload import Workload, add_workload_options, check_workload, load
from bench.soak_.clients import Clients, Faults, Found, Request
from specdec_fast import AsyncEngine, Engine, SamplingParams
from specdec_fast.commands.common import format_table
from specdec_fast.request.detokenizer import load_tokenizer

_ENGINES = ["model-exspec", "ngram-eqspec", "model-eqspec", "ngram-exspec", "self-exspec", "none-exspec", "none-eqspec"]
_MOST_SHOWN = 3  # wrong outputs of an engine; the table has their number
_KINDS = 40  # different requests
_MOST_GROWTH = 0.03  # of the memory in use, while the second half of an engine's requests is served
_LEAST_SECONDS = 20.0  # of an engine, for a judgement of its memory: before, caches fill


def make_requests(workload: Workload, tokenizer: Any, seed: int) -> list[Request]:
    """Draw requests of many kinds, and decode each plainly, alone."""
    draw, plain = random.Random(seed), Engine(workload.target, None, max_batch_size=1, tokenizer=tokenizer)
    found = []
    for i in range(_KINDS):
        prompt = draw.choice(workload.prompts)
        options: dict[str, Any] = {
            "max_new_tokens": draw.randint(1, workload.max_new_tokens),
            "temperature": draw.choice([0.0, 0.7]),
            "repetition_penalty": draw.choice([1.0, 1.0, 1.2]),
            "seed": i,
            "logprobs": draw.random() < 0.5,
            "num_draft_tokens": draw.choice([None, None, 0, 2]),
        }
        output = plain.generate([prompt], SamplingParams(**options), progress=False)[0]
        if tokenizer is not None and i % 3 == 0 and len(output.text or "") > 8:
            begin = draw.randrange(len(output.text) - 4)  # type: ignore[arg-type]
            options["stop"] = (output.text[begin : begin + 4],)  # type: ignore[index]
            output = plain.generate([prompt], SamplingParams(**options), progress=False)[0]
        expected = (output.token_ids, output.logprobs, output.text or "")
        found.append(Request(prompt, SamplingParams(**options), expected))
    return found


def soak(workload: Workload, requests: list[Request], name: str, args: argparse.Namespace) -> Found:
    """Serve requests by one engine, such as ``model-exspec``, for its share of the time."""
    draft, method = name.split("-")
    longest = max(len(r.prompt) + r.params.max_new_tokens for r in requests)
    threads = set(threading.enumerate())
    engine = AsyncEngine(
        workload.target,
        workload.draft if draft == "model" else draft,
        method=method,
        max_batch_size=args.batch_size,
        max_prefill_tokens=64,
        page_size=4,  # so that pages run short often
        kv_cache_tokens=longest,  # of a window that would need many times as many
        max_waiting=args.clients // 2,
        num_draft_tokens=args.num_draft_tokens[0],
    )
    faults = Faults(engine.engine, random.Random(args.seed), args.fault_probability)
    clients = Clients(engine, requests, args.seed)

    async def main() -> list[str]:
        async with engine:
            await clients.run(args.clients, args.seconds / len(args.engines))
        return [str(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    found = clients.found
    found.left += asyncio.run(main())
    faults.count()
    found.counts = faults.counts
    pools = [engine.engine.core.pool, getattr(engine.engine.drafter, "pool", None)]
    found.left += [f"pages: {pool.num_free_pages} of {pool.num_pages}" for pool in pools if pool and not pool.is_vacant]
    found.left += ["requests"] * engine.engine.core.has_work
    found.left += [t.name for t in set(threading.enumerate()) - threads if t.name.startswith("specdec_fast")]
    return found


def faults_of(found: Found, judges_memory: bool) -> list[str]:
    """Name what is wrong; an empty list if nothing is."""
    problems = [f"wrong output: {text}" for text in found.wrong[:_MOST_SHOWN]]
    problems += [f"left over: {text}" for text in found.left]
    if judges_memory and found.growth is not None and found.growth > _MOST_GROWTH:
        problems.append(f"memory grew by {found.growth:.1%}")
    return problems


def print_table(found: dict[str, Found]) -> None:
    """Print what each engine did, one a line."""
    lines = []
    for name, one in found.items():
        growth = "-" if one.growth is None else f"{one.growth:+.2%}"
        finished = one.ends["stop"] + one.ends["length"]
        counts = (one.counts["preemptions"], one.counts["repeated steps"])
        megabytes = one.memory[-1][1] // 2**20
        lines.append((name, one.ends.total(), finished, *counts, len(one.wrong), len(one.left), megabytes, growth))
    columns = ("engine", "requests", "finished", "preemptions", "repeated steps", "wrong", "left over", "MB", "growth")
    print(format_table(columns, lines))
    for name, one in found.items():
        print(f"{name}: {', '.join(f'{count} {end}' for end, count in one.ends.most_common())}")


def main(argv: list[str] | None = None) -> None:
    """Serve, print the table, end in one JSON line; exit with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=(__doc__ or "").split("\n")[0])
    add_workload_options(parser)
    parser.add_argument("--seconds", type=float, default=300.0, help="for all engines together (default: %(default)s)")
    parser.add_argument("--engines", type=report.names, default=_ENGINES, help=f"some of {','.join(_ENGINES)}")
    parser.add_argument("--clients", type=int, default=24, metavar="N", help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="sequences per step (default: 8)")
    parser.add_argument("--num-draft-tokens", type=report.draft_tokens, default=[4], metavar="K", help="default: 4")
    parser.add_argument(
        "--fault-probability", type=float, default=0.004, metavar="P", help="of a call (default: 0.004)"
    )
    parser.add_argument("--seed", type=int, default=0)
    report.add_report_options(parser)
    args = parser.parse_args(argv)
    check_workload(parser, args)
    if unknown := set(args.engines) - set(_ENGINES):
        parser.error(f"--engines: {', '.join(sorted(unknown))}; expected some of {', '.join(_ENGINES)}")
    report.prepare(args)
    workload = load(args, 16)
    path = getattr(workload.target.config, "_name_or_path", None)
    requests = make_requests(workload, load_tokenizer(path) if path else None, args.seed)
    found = {name: soak(workload, requests, name, args) for name in args.engines}
    print_table(found)
    judges_memory = args.seconds / len(args.engines) >= _LEAST_SECONDS
    problems = [f"{name}: {fault}" for name, one in found.items() for fault in faults_of(one, judges_memory)]
    rows = [
        {"engine": name, "ends": dict(one.ends), **one.counts, "growth": one.growth, "bytes": one.memory[-1][1]}
        for name, one in found.items()
    ]
    machine = report.machine(next(workload.target.parameters()).device)
    settings = {name: getattr(args, name) for name in ("seconds", "clients", "batch_size", "fault_probability", "seed")}
    result = {"benchmark": "soak", "machine": machine, "pair": workload.name, "settings": settings, "rows": rows}
    report.write_json({**result, "problems": problems}, args.json)
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
