"""A SpecBlock drafter that learns while it serves: tokens per step and speed, call by call, with updates and without.

Both engines decode the same calls, in turns: each call has the next prompts of the file, round after round, sampled
with seeds of their own. The time of updates counts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.common import report
from specdec_fast import Engine, EngineConfig, SamplingParams
from specdec_fast.assets import demo_pair
from specdec_fast.commands.common import format_table
from specdec_fast.commands.prompt_files import read_prompts
from specdec_fast.models.loading import load_model
from specdec_fast.training.online import OnlineSettings, OnlineUpdates

_SHOWN = 8  # lines of the table


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per call."""
    target = load_model(args.target, report.DTYPES[args.dtype], torch.device("cpu"))
    config = EngineConfig(
        dtype=report.DTYPES[args.dtype], max_batch_size=args.batch_size, num_draft_tokens=args.num_draft_tokens
    )
    draft = f"specblock:{args.draft}"
    fixed, learning = Engine(target, draft, config), Engine(target, draft, config)
    settings = OnlineSettings(
        learning_rate=args.learning_rate, time_share=args.time_share, matrix_learning_rate=args.matrix_learning_rate
    )
    updates = OnlineUpdates(learning, settings)
    prompts = [line.prompt for line in read_prompts(args.prompts)]
    rows = []
    for call in range(args.calls):
        chosen = [prompts[(call * args.batch_size + i) % len(prompts)] for i in range(args.batch_size)]
        params = [
            SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=call * 1000 + i)
            for i in range(args.batch_size)
        ]
        row: dict[str, Any] = {"call": call}
        expected = None
        for name, engine in (("without", fixed), ("with", learning)):
            started = perf_counter()
            outputs = engine.generate(chosen, params, progress=False)
            row[f"seconds {name}"] = perf_counter() - started
            tokens = [output.raise_for_error().token_ids for output in outputs]
            row["tokens"] = sum(map(len, tokens))
            row[f"tokens per step {name}"] = engine.last_run.decoding.mean_acceptance_length
            assert expected is None or tokens == expected, "updates changed an output"
            expected = tokens
        update = updates.observe(outputs)
        rows.append(row | {"arm": update.arm, "seconds of update": update.seconds})
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print sums over equal parts of the calls, and the speed with updates over that without."""
    size = max(1, len(rows) // _SHOWN)
    lines = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        sums = {key: sum(row[key] for row in part) for key in part[0] if key not in ("call", "arm")}
        arms = [row["arm"] for row in part]
        learning = sums["seconds with"] + sums["seconds of update"]
        lines.append((
            f"{start} to {start + len(part) - 1}",
            f"{sums['tokens per step without'] / len(part):.2f}", f"{sums['tokens per step with'] / len(part):.2f}",
            f"{sums['seconds without'] / learning:.2f}", f"{sums['seconds of update'] / learning:.0%}",
            arms.count("head"), arms.count("full"),
        ))  # fmt: skip
    header = ("calls", "tokens/step", "with updates", "speed over without", "updating", "head", "full")
    print(format_table(header, lines))


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, end in one JSON line."""
    folder = demo_pair()
    parser = argparse.ArgumentParser(prog="python -m bench.online", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", default=str(folder / "target"), help="name or folder (default: the bundled one)")
    parser.add_argument("--draft", required=True, metavar="FOLDER", help="a SpecBlock checkpoint")
    parser.add_argument("--prompts", type=Path, default=folder / "prompts.jsonl", metavar="FILE.jsonl")
    parser.add_argument("--calls", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8, help="and prompts per call")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--num-draft-tokens", type=int, default=4, metavar="K")
    parser.add_argument("--learning-rate", type=float, default=OnlineSettings.learning_rate)
    parser.add_argument("--matrix-learning-rate", type=float)
    parser.add_argument("--time-share", type=float, default=OnlineSettings.time_share)
    parser.add_argument("--dtype", choices=list(report.DTYPES), default="float32")
    report.add_report_options(parser)
    args = parser.parse_args(argv)
    report.prepare(args)
    rows = measured(args)
    print_table(rows)
    report.write_json({"machine": report.machine(torch.device("cpu")), "rows": rows}, args.json)


if __name__ == "__main__":
    main()
