"""One forward as a program and as PyTorch runs it: the same rows, interleaved; and what making the program takes.

Both use the same ops and weights. The rows are those of a step: a token of every sequence (plain decoding), or K + 1 of
every sequence (a verification), over contexts of ``--context`` entries. The gate is the one that models are admitted
by: logits within the square root of the dtype's rounding unit of each other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench import report
from bench.timing import Clock, median_ratio
from bench.workload import add_workload_options, check_workload, load
from specdec_fast.commands.common import format_table
from specdec_fast.kv_cache import PagePool
from specdec_fast.models import RaggedModel
from specdec_fast.ops import resolve
from specdec_fast.rows import Rows

_PAGE_SIZE = 16


class Forwards:
    """A model with and without its program, and their forwards of one shape."""

    def __init__(self, model: Any) -> None:
        ops = resolve(model.device)
        started = perf_counter()
        self.eager = RaggedModel(model, replace(ops, program=None))
        middle = perf_counter()
        self.compiled = RaggedModel(model, ops)
        self.loading_seconds = middle - started
        self.program_seconds = perf_counter() - middle - self.loading_seconds  # what loading takes longer with one
        if self.compiled.program is None:
            raise SystemExit(f"{self.compiled.name} has no program: {self.compiled.why_no_program}")

    def calls(self, batch_size: int, num_rows: int, context: int) -> dict[str, Callable[[], torch.Tensor]]:
        """Return the calls to time, on rows ``num_rows`` of each of ``batch_size`` sequences."""
        layout = self.compiled.layout
        pool = PagePool(layout, batch_size * (context + _PAGE_SIZE), _PAGE_SIZE)
        for owner in range(batch_size):
            pool.open(owner, context)
        token_ids = torch.arange(batch_size * num_rows) % self.compiled.vocab_size
        batch = pool.batch([Rows(owner, context - num_rows, num_rows) for owner in range(batch_size)], token_ids)
        return {
            "program": lambda: self.compiled.forward(batch, pool),
            "eager": lambda: self.eager.forward(batch, pool),
        }


def measure(forwards: Forwards, args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Time every shape; one row each."""
    clock, rows = Clock(torch.device("cpu")), []
    bound = torch.finfo(forwards.compiled.layout.dtype).eps ** 0.5
    for batch_size in args.batch_sizes:
        for num_rows in (1, args.num_draft_tokens + 1):
            calls = forwards.calls(batch_size, num_rows, args.context)
            program, eager = (calls[key]().float() for key in ("program", "eager"))
            distance = float((program - eager).norm() / eager.norm())
            if not distance <= bound:
                raise SystemExit(f"{name}: logits {distance:.1e} apart, {bound:.1e} are allowed; no speed is reported.")
            seconds = clock.interleave([calls] * args.repeats)
            rows.append(
                {
                    "model": name,
                    "batch_size": batch_size,
                    "rows_per_sequence": num_rows,
                    "program_milliseconds": 1e3 * median(seconds["program"]),
                    "eager_milliseconds": 1e3 * median(seconds["eager"]),
                    "speedup": median_ratio(seconds["eager"], seconds["program"]),
                    "logit_distance": distance,
                }
            )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measure target and draft, print the table, end in one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.forwards", description=(__doc__ or "").split("\n")[0])
    add_workload_options(parser)
    parser.add_argument("--batch-sizes", type=report.integers, default=[1, 4, 8, 16])
    parser.add_argument("--num-draft-tokens", type=int, default=5, metavar="K")
    parser.add_argument("--context", type=int, default=128, metavar="N", help="KV entries of a sequence (default: 128)")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of torch and of the C++ ops (default: torch's own choice)")
    parser.add_argument("--json", type=report.Path, help="write the result there as well")
    args = parser.parse_args(argv)
    check_workload(parser, args)
    if args.threads:
        torch.set_num_threads(args.threads)
    workload = load(args, 1)
    rows, start_up = [], {}
    for name, model in (("target", workload.target), ("draft", workload.draft)):
        forwards = Forwards(model)
        start_up[name] = {"loading_seconds": forwards.loading_seconds, "program_seconds": forwards.program_seconds}
        rows += measure(forwards, args, name)
    keys = ("model", "batch_size", "rows_per_sequence", "program_milliseconds", "eager_milliseconds", "speedup")
    lines = [[f"{row[key]:.3g}" if isinstance(row[key], float) else row[key] for key in keys] for row in rows]
    print(format_table(("model", "batch", "rows each", "program ms", "PyTorch ms", "x PyTorch"), lines))
    settings = {"pair": workload.name, "dtype": args.dtype, "context": args.context, "start_up": start_up}
    report.write_json({"machine": report.machine(torch.device("cpu")), **settings, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
