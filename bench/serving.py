"""What clients see of ``specdec-fast serve`` and of ``transformers serve``, one after the other.

Every server runs in a process of its own, with the same target, the same number of threads and the same load: clients
that stream completions, each its next one when the last has ended. An output is equal if its text is that of plain
greedy decoding. ``transformers serve`` needs ``accelerate`` in the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import monotonic, sleep
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import torch

from bench.common import report
from bench.common.http_load import run_clients
from specdec_fast import Engine, SamplingParams
from specdec_fast.assets import demo_pair
from specdec_fast.commands.common import format_table
from specdec_fast.commands.prompt_files import read_prompts
from specdec_fast.models.loading import load_model

_START_SECONDS = 180.0  # in which a server must be ready
_STOP_SECONDS = 30.0
_MODELS = "--target {target} --draft {draft} --batch-size {batch_size}"
_SPECDEC = f"-m specdec_fast serve --no-access-log {_MODELS} --dtype {{dtype}} --port {{port}} --num-draft-tokens"
SERVERS = {  # arguments of Python
    "specdec-fast": f"{_SPECDEC} {{num_draft_tokens}}",
    "specdec-fast-plain": f"{_SPECDEC} 0",
    # by default the KV cache takes 0.6 of the memory of a machine without a GPU
    "transformers-serve": "-m transformers.cli.transformers serve {target} --continuous-batching --device cpu "
    "--cb-max-memory-percent 0.1 --dtype {dtype} --port {port}",
}


@contextmanager
def running(name: str, args: argparse.Namespace) -> Iterator[int]:
    """Start a server, wait until it is ready, and yield its port; stop it in the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {"port": port, "target": args.target, "draft": args.draft, "dtype": args.dtype}
    values |= {"batch_size": args.batch_size, "num_draft_tokens": args.num_draft_tokens}
    command = [sys.executable, *(part.format(**values) for part in SERVERS[name].split())]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    # uvicorn prints a line for every request of transformers' server, on standard output
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = monotonic() + _START_SECONDS
        while not _is_ready(port):
            if process.poll() is not None:
                sys.exit(f"{' '.join(command)} ended with status {process.returncode}; see above.")
            if monotonic() > deadline:
                sys.exit(f"{' '.join(command)} is not ready after {_START_SECONDS:.0f} s.")
            sleep(0.1)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


def measure(name: str, prompts: list[str], expected: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Return what clients of a server see, in all turns but the first."""
    fields = {"model": args.target, "max_tokens": args.max_new_tokens, "temperature": 0, "stream": True}
    if name != "transformers-serve":  # it shows the usage of every stream
        fields |= {"stream_options": {"include_usage": True}}
    speeds, first, each, num_equal = [], [], [], 0
    with running(name, args) as port:
        settings = {"port": port, "prompts": prompts, "fields": fields, "num_clients": args.streams, "seconds": 0}
        for turn in range(args.repeats + 1):
            found = asyncio.run(run_clients(settings))
            if turn:
                counts = found["num_tokens"]
                speeds.append(sum(counts) / found["seconds"])
                first += found["first"]
                each += [span / (n - 1) for span, n in zip(found["spans"], counts, strict=True) if n > 1]
                num_equal += sum(text == own for text, own in zip(found["texts"], expected, strict=True))
    return {
        "server": name,
        "tokens_per_second": median(speeds),
        "first_token_ms": _percentiles(first),
        "per_token_ms": _percentiles(each),
        "share_equal": num_equal / (args.repeats * len(prompts)),
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    p50, p99 = 1e3 * np.percentile(seconds, (50, 99))
    return {"p50": float(p50), "p99": float(p99)}


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print a line per server."""
    head = ("server", "tokens/s", "first token p50", "p99", "per token p50", "p99", "equal to greedy")
    lines = [
        (
            row["server"],
            f"{row['tokens_per_second']:.0f}",
            *(f"{row[key][p]:.1f} ms" for key in ("first_token_ms", "per_token_ms") for p in ("p50", "p99")),
            f"{100 * row['share_equal']:.1f} %",
        )
        for row in rows
    ]
    print(format_table(head, lines))


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, end in one JSON line."""
    folder = demo_pair()
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--servers", nargs="+", choices=list(SERVERS), default=list(SERVERS), metavar="NAME")
    parser.add_argument("--target", default=str(folder / "target"), help="folder of a model (default: the bundled one)")
    parser.add_argument("--draft", default=str(folder / "draft"), help="the same for its draft")
    parser.add_argument("--dtype", choices=list(report.DTYPES), default="float32", help="default: %(default)s")
    parser.add_argument("--times", type=int, default=1, metavar="N", help="all prompts N times (default: 1)")
    parser.add_argument("--num-prompts", type=int, default=0, metavar="N", help="the first N; 0 (default) is all")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (default: 128)")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="clients (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="of specdec-fast (default: 32)")
    parser.add_argument("--num-draft-tokens", type=int, default=5, metavar="K", help="of specdec-fast (default: 5)")
    report.add_report_options(parser)
    args = parser.parse_args(argv)
    report.prepare(args)
    args.threads = args.threads or os.cpu_count()
    lines = read_prompts(folder / "prompts.jsonl")[: args.num_prompts or None]
    prompts = [str(line.prompt) for line in lines] * args.times
    target = load_model(args.target, report.DTYPES[args.dtype], torch.device("cpu"))
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    plain = Engine(target, None, max_batch_size=1)
    expected = [output.text or "" for output in plain.generate(prompts, params, progress=False)]
    rows = [measure(name, prompts, expected, args) for name in args.servers]
    print_table(rows)
    names = ("dtype", "threads", "times", "max_new_tokens", "streams", "batch_size", "num_draft_tokens", "repeats")
    settings = {name: getattr(args, name) for name in names}
    description = {"benchmark": "serving", "machine": report.machine(target.device), "settings": settings}
    report.write_json({**description, "servers": rows}, args.json)


if __name__ == "__main__":
    main()
