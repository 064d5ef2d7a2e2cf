"""Whole decoding runs, all in one process: transformers, plain decoding, the oracle, the engine.

Repeats are interleaved (every contender once, then every contender again), and what is reported are medians and
medians of ratios within a repeat: a lone absolute time on a shared machine says little. No speed is reported when an
output differs from ``transformers`` at batch 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging

from bench import report
from bench.device import ForwardMeter
from specdec_fast import DecodingStats, Engine, EngineConfig, SamplingParams, oracle
from specdec_fast.assets import demo_pair
from specdec_fast.commands.common import format_table, read_prompts
from specdec_fast.drafters.model import ModelDrafter
from specdec_fast.equivalence import transformers_greedy
from specdec_fast.loading import eos_token_ids, load_model
from specdec_fast.oracle.dense import Repad, repad_in_python
from specdec_fast.text import load_tokenizer

REALIGNMENT = ("realign", "assemble")  # stages that exist only because the oracle's layout is dense


@dataclass(frozen=True)
class Measurement:
    """One run of one contender over all prompts.

    ``outside_forwards`` is the engine's: the share of its steps that is spent outside of all model forwards, prefill
    left out but for what is around its forwards.
    """

    outputs: list[list[int]]
    seconds: float
    stage_seconds: dict[str, float]
    moved_bytes: int
    num_steps: int
    mean_acceptance_length: float
    outside_forwards: float | None = None


@dataclass(frozen=True)
class Contender:
    """Something that decodes all prompts."""

    name: str
    batch_size: int
    run: Callable[[], Measurement]


class Bench:
    """The models and prompts of one benchmark, and its contenders."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.target = load_model(args.target, EngineConfig(dtype=args.dtype).dtype, None)
        self.draft = load_model(args.draft, EngineConfig(dtype=args.dtype).dtype, None)
        tokenizer = load_tokenizer(args.target)
        prompts = [line.prompt for line in read_prompts(args.prompts)]
        self.prompts = [tokenizer(p).input_ids if isinstance(p, str) else p for p in prompts]
        self.limits = oracle.Limits(args.max_new_tokens, eos_token_ids(self.target))

    def contenders(self) -> Iterator[Contender]:
        """Yield every method at every batch size; the first is the reference."""
        yield Contender("transformers", 1, self.run_transformers)
        for batch_size in self.args.batch_sizes:
            yield Contender("plain", batch_size, self.engine_runner(batch_size, "eqspec", None))
            yield Contender("oracle-eqspec", batch_size, lambda b=batch_size: self.run_oracle_eqspec(b))
            yield Contender("oracle-exspec", batch_size, lambda b=batch_size: self.run_oracle_exspec(b))
            for method in ("eqspec", "exspec"):
                yield Contender(method, batch_size, self.engine_runner(batch_size, method, self.draft))

    def run_transformers(self) -> Measurement:
        """``generate()``, one prompt at a time."""
        started = perf_counter()
        outputs = [transformers_greedy(self.target, prompt, self.args.max_new_tokens) for prompt in self.prompts]
        return Measurement(outputs, perf_counter() - started, {}, 0, sum(map(len, outputs)), 1.0)

    def run_oracle_eqspec(self, batch_size: int, repad: Repad = repad_in_python) -> Measurement:
        """Fixed batches of prompts, one after the other."""
        started = perf_counter()
        starts = range(0, len(self.prompts), batch_size)
        batches = [self.prompts[start : start + batch_size] for start in starts]
        num_draft_tokens = self.args.num_draft_tokens
        runs = [oracle.eqspec(self.target, self.draft, b, self.limits, num_draft_tokens, repad) for b in batches]
        return self._oracle_measurement(runs, perf_counter() - started)

    def run_oracle_exspec(self, batch_size: int, repad: Repad = repad_in_python) -> Measurement:
        """A sliding window over all prompts."""
        started = perf_counter()
        run = self.oracle_exspec(batch_size, repad)
        return self._oracle_measurement([run], perf_counter() - started)

    def oracle_exspec(self, batch_size: int, repad: Repad = repad_in_python) -> oracle.OracleRun:
        """Run the oracle's exspec with all its step records."""
        return oracle.exspec(
            self.target,
            self.draft,
            self.prompts,
            self.limits,
            self.args.num_draft_tokens,
            batch_size=batch_size,
            repad=repad,
        )

    def _oracle_measurement(self, runs: list[oracle.OracleRun], seconds: float) -> Measurement:
        stages: dict[str, float] = {}
        decoding = DecodingStats()
        for run in runs:
            for stage, spent in run.timer.seconds.items():
                stages[stage] = stages.get(stage, 0.0) + spent
            decoding.add(run.decoding)
        outputs = [tokens for run in runs for tokens in run.outputs]
        moved_bytes, num_steps = sum(run.moved_bytes for run in runs), sum(len(run.steps) for run in runs)
        return Measurement(outputs, seconds, stages, moved_bytes, num_steps, decoding.mean_acceptance_length)

    def engine_runner(self, batch_size: int, method: str, draft: Any) -> Callable[[], Measurement]:
        """Make an engine, and the run that has it decode all prompts."""
        engine = Engine(
            self.target,
            draft,
            method=method,
            max_batch_size=batch_size,
            num_draft_tokens=self.args.num_draft_tokens,
        )
        params = SamplingParams(max_new_tokens=self.args.max_new_tokens)

        drafter = engine.drafter
        models = [engine.target, *([drafter.model] if isinstance(drafter, ModelDrafter) else [])]

        def run() -> Measurement:
            with ForwardMeter(models, engine.target.layout.device) as meter:
                outputs = [o.raise_for_error().token_ids for o in engine.generate(self.prompts, params, progress=False)]
            stats = engine.last_run
            outside = (stats.seconds - meter.seconds()) / (stats.seconds - stats.timer.seconds["prefill"])
            length = stats.decoding.mean_acceptance_length
            return Measurement(outputs, stats.seconds, stats.timer.seconds, 0, stats.num_steps, length, outside)

        return run


def measure(contenders: list[Contender], repeats: int) -> dict[Contender, list[Measurement]]:
    """Run every contender once unmeasured, then ``repeats`` times in turn; exit if any output differs."""
    runs: dict[Contender, list[Measurement]] = {contender: [] for contender in contenders}
    expected: list[list[int]] | None = None
    rounds = [contender for _ in range(repeats + 1) for contender in contenders]
    for i, contender in enumerate(tqdm(rounds, disable=not sys.stderr.isatty())):
        measurement = contender.run()
        expected = measurement.outputs if expected is None else expected
        if measurement.outputs != expected:
            differing = sum(a != b for a, b in zip(measurement.outputs, expected, strict=True))
            sys.exit(
                f"{contender.name} at batch {contender.batch_size}: {differing} outputs differ from "
                "transformers at batch 1; no speed is reported."
            )
        if i >= len(contenders):
            runs[contender].append(measurement)
    return runs


def summarise(runs: dict[Contender, list[Measurement]]) -> list[dict[str, Any]]:
    """Reduce repeats to medians; ratios are taken within a repeat."""
    by_key = {(c.name, c.batch_size): measurements for c, measurements in runs.items()}
    reference = by_key["transformers", 1]
    rows = []
    for (name, batch_size), measurements in by_key.items():
        num_tokens = sum(map(len, measurements[0].outputs))
        oracle_runs = by_key.get((f"oracle-{name}", batch_size))
        measures_forwards = measurements[0].outside_forwards is not None
        rows.append(
            {
                "method": name,
                "batch_size": batch_size,
                "tokens_per_second": round(median(num_tokens / m.seconds for m in measurements), 1),
                "speedup_over_transformers": _median_ratio(reference, measurements),
                "speedup_over_oracle": _median_ratio(oracle_runs, measurements) if oracle_runs else None,
                "realignment_share": round(median(_realignment(m) / m.seconds for m in measurements), 4),
                "moved_megabytes": round(measurements[0].moved_bytes / 1e6, 1),
                "outside_forwards": median(m.outside_forwards for m in measurements) if measures_forwards else None,
                "mean_acceptance_length": round(measurements[0].mean_acceptance_length, 3),
            }
        )
    return rows


def _median_ratio(base: list[Measurement], measurements: list[Measurement]) -> float:
    return round(median(b.seconds / m.seconds for b, m in zip(base, measurements, strict=True)), 3)


def _realignment(measurement: Measurement) -> float:
    return sum(measurement.stage_seconds.get(stage, 0.0) for stage in REALIGNMENT)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per method and batch size."""
    header = (
        "method",
        "batch",
        "tokens/s",
        "x transformers",
        "x same oracle",
        "realignment",
        "outside forwards",
        "MB moved",
        "acc. length",
    )
    print(
        format_table(
            header,
            [
                (
                    row["method"],
                    row["batch_size"],
                    f"{row['tokens_per_second']:.0f}",
                    f"{row['speedup_over_transformers']:.2f}",
                    "-" if row["speedup_over_oracle"] is None else f"{row['speedup_over_oracle']:.2f}",
                    f"{row['realignment_share']:.1%}",
                    "-" if row["outside_forwards"] is None else f"{row['outside_forwards']:.1%}",
                    row["moved_megabytes"],
                    f"{row['mean_acceptance_length']:.2f}",
                )
                for row in rows
            ],
        )
    )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the defaults are the bundled pair and its 32 prompts."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=(__doc__ or "").split("\n")[0])
    add_decoding_options(parser)
    parser.add_argument("--batch-sizes", type=report.integers, default=[1, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the result there as well")
    return parser.parse_args(argv)


def add_decoding_options(parser: argparse.ArgumentParser) -> None:
    """Add what ``Bench`` reads: the pair, its prompts, and how far to decode."""
    pair = demo_pair()
    parser.add_argument("--target", default=str(pair / "target"))
    parser.add_argument("--draft", default=str(pair / "draft"))
    parser.add_argument("--prompts", type=Path, default=pair / "prompts.jsonl")
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", help="of the pair (default: %(default)s)")


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, end in one JSON line."""
    args = parse_args(argv)
    logging.disable_progress_bar()
    bench = Bench(args)
    contenders = list(bench.contenders())
    runs = measure(contenders, args.repeats)
    rows = summarise(runs)
    print(
        f"{len(bench.prompts)} prompts, {sum(map(len, runs[contenders[0]][0].outputs))} new tokens, {args.dtype}, "
        f"K {args.num_draft_tokens}, {args.repeats} interleaved repeats, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads; every output equals transformers at batch 1\n"
    )
    print_table(rows)
    settings = {"num_draft_tokens": args.num_draft_tokens, "dtype": args.dtype, "repeats": args.repeats}
    report.write_json({**settings, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
