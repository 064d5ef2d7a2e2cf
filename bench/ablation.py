"""What each part of a scheduler or of a length policy gains.

``--part exspec``: the window, taking equal lengths together, and the bound on waiting; ratios are to eqspec.
``--part auto``: ``num_draft_tokens="auto"`` beside fixed K.
``--part auto-simulated``: the same in simulated time, for three pairs and six courses of acceptance.
``--part confidence-simulated``: in simulated time, a drafter that scores its chains (DSpark).
``--part ranks``: tokens per step of EAGLE-3's dynamic trees, by the temperature that gives ranks their probabilities.

All variants decode the same prompts, of unequal lengths and with unequal ends, interleaved; what is reported are ratios
within a repeat. Outputs are held against plain decoding.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.common import report
from bench.common.measurement import Measurement, MethodSetting, Runs, measure
from bench.common.timing import median_ratio
from bench.common.workload import Workload, add_workload_options, check_workload, load
from bench.engine_ import length_ablation, rank_ablation, simulated_ablation
from bench.engine_.methods import Bench, EngineRunner
from bench.engine_.summary import latency_percentiles
from specdec_fast import Engine
from specdec_fast.commands.common import format_table
from specdec_fast.config import EngineConfig
from specdec_fast.request.sequence import Sequence
from specdec_fast.schedulers import SCHEDULERS
from specdec_fast.schedulers.exspec import ExspecScheduler

BASELINE = "eqspec"


class InTurn(ExspecScheduler):
    """exspec without grouping: the sequences that have waited longest are next, whatever their lengths."""

    def select(self, resident: list[Sequence]) -> list[Sequence]:
        """Choose a batch of those passed over most often."""
        return sorted(resident, key=lambda sequence: -sequence.passed_over)[: self.max_batch_size]


def variants(batch_size: int) -> Iterator[tuple[str, type[ExspecScheduler] | None, dict[str, Any]]]:
    """Yield (name, scheduler in place of the method's own, options of the engine)."""
    yield BASELINE, None, {"method": "eqspec"}
    for windows in (1, 2, 4):
        yield f"exspec, window {windows} batch", None, {"window_size": windows * batch_size}
    yield "exspec, window 2 batch, in turn", InTurn, {"window_size": 2 * batch_size}
    for max_wait_steps in (1, 16):
        options = {"window_size": 2 * batch_size, "max_wait_steps": max_wait_steps}
        yield f"exspec, window 2 batch, waits {max_wait_steps}", None, options


class Ablation(Bench):
    """The variants at one number of draft tokens."""

    def __init__(self, workload: Workload, num_draft_tokens: int) -> None:
        super().__init__(workload)
        self.num_draft_tokens = num_draft_tokens

    def all(self, batch_sizes: list[int]) -> Iterator[MethodSetting]:
        """Yield every variant at every batch size."""
        for batch_size in batch_sizes:
            for name, scheduler, options in variants(batch_size):
                config = EngineConfig(max_batch_size=batch_size, num_draft_tokens=self.num_draft_tokens, **options)
                engine = Engine(self.target, self.draft, config)
                if scheduler is not None:
                    engine.core.scheduler = scheduler(config)
                yield MethodSetting(name, batch_size, EngineRunner(engine, engine.drafter, self.workload))


def rows_of(runs: Runs) -> list[dict[str, Any]]:
    """Return one row per variant and batch size."""
    baselines = {c.batch_size: measurements for c, measurements in runs.items() if c.name == BASELINE}
    return [_row(c, measurements, baselines[c.batch_size]) for c, measurements in runs.items()]


def _row(setting: MethodSetting, measurements: list[Measurement], baseline: list[Measurement]) -> dict[str, Any]:
    speeds, base = ([m.tokens_per_second for m in each] for each in (measurements, baseline))
    first, own, theirs = (
        measurements[0],
        *([latency_percentiles([m]) for m in each] for each in (measurements, baseline)),
    )
    return {
        "variant": setting.name,
        "batch_size": setting.batch_size,
        "tokens_per_second": median(speeds),
        "speedup_over_eqspec": median_ratio(speeds, base),
        **{f"{p}_over_eqspec": median_ratio([m[p] for m in own], [m[p] for m in theirs]) for p in ("p50", "p99")},
        "sequences_per_step": first.decoding.num_steps / first.num_steps,
        "grouping_rate": first.grouping_rate,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per row."""
    header = ("variant", "batch", "tokens/s", "x eqspec", "P50 / eqspec's", "P99 / eqspec's", "sequences", "grouped")
    lines = [
        (
            row["variant"],
            row["batch_size"],
            f"{row['tokens_per_second']:.0f}",
            *(f"{row[key]:.2f}" for key in ("speedup_over_eqspec", "p50_over_eqspec", "p99_over_eqspec")),
            f"{row['sequences_per_step']:.1f}",
            f"{row['grouping_rate']:.0%}",
        )
        for row in rows
    ]
    print(format_table(header, lines))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw throughput against P99 latency, both over eqspec's, one colour per batch size."""
    plt = report.pyplot()
    figure, axes = plt.subplots(figsize=(8, 5))
    for number, batch_size in enumerate(dict.fromkeys(row["batch_size"] for row in rows)):
        own = [row for row in rows if row["batch_size"] == batch_size]
        places = [row["p99_over_eqspec"] for row in own], [row["speedup_over_eqspec"] for row in own]
        axes.scatter(*places, color=f"C{number}", label=f"batch {batch_size}")
        for row, *place in zip(own, *places, strict=True):
            axes.annotate(row["variant"], place, fontsize=6)
    axes.set(xlabel="P99 latency over eqspec's", ylabel="tokens/s over eqspec's")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


SIMULATED = {
    "auto-simulated": (simulated_ablation.simulated_rows, simulated_ablation.print_table),
    "confidence-simulated": (simulated_ablation.confidence_rows, simulated_ablation.print_confidence_table),
}


def _acceptances(text: str) -> list[tuple[float, ...]]:
    """Parse ``0.8,0.9:0``: one acceptance, and one that changes after half of the prompts."""
    return [tuple(report.probabilities(part.replace(":", ","))) for part in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, end in one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.ablation", description=(__doc__ or "").split("\n")[0])
    add_workload_options(parser)
    parser.add_argument("--batch-sizes", type=report.integers, default=[4, 8, 16])
    parser.add_argument(
        "--part",
        choices=["exspec", "auto", "auto-simulated", "confidence-simulated", "ranks"],
        default="exspec",
        help="default: %(default)s",
    )
    parser.add_argument("--num-draft-tokens", type=int, default=5, metavar="K", help="of exspec (default: 5)")
    parser.add_argument("--method", choices=list(SCHEDULERS), default="eqspec", help="of auto (default: %(default)s)")
    parser.add_argument(
        "--acceptance",
        type=_acceptances,
        metavar="P,P:P",
        help="of auto: replay the target's tokens with these probabilities; P:P changes in mid-run",
    )
    report.add_report_options(parser)
    args = parser.parse_args(argv)
    check_workload(parser, args)
    report.prepare(args)
    if args.part in SIMULATED:
        rows_of_part, print_rows = SIMULATED[args.part]
        rows = rows_of_part(args.batch_sizes, args.repeats, args.method == "exspec")
        print_rows(rows)
        report.write_json({"method": args.method, "repeats": args.repeats, "rows": rows}, args.json)
        return
    if args.part == "ranks":
        rows = rank_ablation.rank_rows(args.num_prompts, args.max_new_tokens)
        rank_ablation.print_table(rows)
        report.write_json({"rows": rows}, args.json)
        return
    workload = load(args, 64)
    machine = report.machine(torch.device(workload.target.device))
    described = {"pair": workload.name, "dtype": args.dtype, "prompts": len(workload.prompts)}
    if args.part == "auto":
        acceptances = args.acceptance or [None]
        settings = list(length_ablation.settings_of(Bench(workload), args.method, args.batch_sizes, acceptances))
        rows = length_ablation.rows_of(measure(settings, args.repeats))
        length_ablation.print_table(rows)
        described |= {"method": args.method, "max_new_tokens": args.max_new_tokens, "repeats": args.repeats}
        report.write_json({"machine": machine, **described, "rows": rows}, args.json)
        return
    bench = Ablation(workload, args.num_draft_tokens)
    settings = list(bench.all(args.batch_sizes))
    rows = rows_of(measure(settings, args.repeats, bench.reference(settings)))
    print_table(rows)
    if args.plot:
        plot(rows, args.plot)
    described |= {"num_draft_tokens": args.num_draft_tokens}
    report.write_json({"machine": machine, **described, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
