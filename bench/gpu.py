"""Everything that needs a GPU, in one command: speed, correctness of the kernels, graphs and whole decoding runs.

    python -m bench.gpu --out DIR [--budget SECONDS] [--parts compile,graphs,...]      # one NVIDIA GPU, no network
    python -m bench.gpu --out DIR --device cpu --smoke                      # tiny sizes, to try the check itself

It runs in a checkout, with any Python that has torch, Triton and transformers; it installs nothing and does not need
the C++ extension. It writes DIR/gpu.json after every check, and prints a short table last. Each task has a process of
its own and its share of the budget, which includes all that the task does. The report names the checks for which there
was no time. The first task compiles the kernels of the ops on all cores; then come measurements, one after the other,
and gates last, several at once. The exit status is 1 if a task failed or a gate was red.

``--kernels FILE`` keeps compiled kernels for the next run, which then has more time to measure: they are read from the
file, if there is one, and written to it at the end. The file serves the same versions of Triton, Python and CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import transformers

from bench.common import report
from bench.common.device import properties
from bench.gpu_ import compilation as gpu_compile
from bench.gpu_ import decoding as gpu_decoding
from bench.gpu_ import devices as gpu_devices
from bench.gpu_ import drafters as gpu_drafters
from bench.gpu_ import equivalence as gpu_equivalence
from bench.gpu_ import graphs as gpu_graphs
from bench.gpu_ import kernel_pack
from bench.gpu_ import kernels as gpu_kernels
from bench.gpu_ import programs as gpu_programs
from bench.gpu_ import quantized as gpu_quantized
from bench.gpu_ import ranks as gpu_ranks
from bench.gpu_ import timings as gpu_timings
from bench.gpu_ import variants as gpu_variants
from bench.gpu_.isolated_tasks import ROOT, Progress, Result, Settings, Task, inline, is_red, isolated, run_tasks
from specdec_fast.commands.common import format_table
from specdec_fast.ops import availability

BUDGET = 540.0  # seconds; it leaves a minute of a time limit of ten minutes
TASKS = (
    Task("compile", gpu_compile.run, 5),
    Task("graphs", gpu_graphs.run, 2),
    Task("decoding", gpu_decoding.run, 5),
    Task("timings", gpu_timings.run, 4),
    Task("variants", gpu_variants.run, 2),
    Task("quantized", gpu_quantized.run, 2),
    Task("kernels", gpu_kernels.run, 5, measures=False),
    Task("graph_gates", gpu_graphs.run_gates, 5, measures=False),
    Task("equivalence", gpu_equivalence.run, 5, measures=False),
    Task("programs", gpu_programs.run, 5, measures=False),
    Task("drafters", gpu_drafters.run, 5, measures=False),
    Task("ranks", gpu_ranks.run, 5, measures=False),
    Task("devices", gpu_devices.run, 2, measures=False),
)
GATES_AT_ONCE = 7  # a GPU has room for all of them; each spends most of its time on a core of its own


def environment(settings: Settings, progress: Progress) -> None:
    """Record versions, device and commit of the figures."""
    device = torch.device(settings.device)
    progress.note(
        **properties(device),
        **report.machine(device),
        triton=_version_of("triton"),
        transformers=transformers.__version__,
        commit=_git("rev-parse", "HEAD"),
        uncommitted=bool(_git("status", "--porcelain")),
        measured=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ops={f"{op} on {backend}": reason or "yes" for op, backend, reason in availability()},
    )


def _version_of(package: str) -> str | None:
    try:
        return str(__import__(package).__version__)
    except ImportError:
        return None


def _git(*arguments: str) -> str | None:
    """Ask git about this tree; None if there is no git, or if the tree is a copy without its history."""
    try:
        answer = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


class Record:
    """The result file. It is replaced as a whole each time, so it is never incomplete."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "gpu.json"
        self.content: dict[str, Any] = {"bench": "gpu", **facts, "parts": {}}

    def keep(self, task: str, result: Result) -> None:
        """Record the result of a task so far, and write the file."""
        self.content["parts"][task] = result
        self.note()

    def note(self, **facts: Any) -> None:
        """Record facts about the whole run, and write the file."""
        self.content |= facts
        beside = self.path.with_suffix(".json.new")
        beside.write_text(json.dumps(_finite(report.rounded(self.content)), indent=1) + "\n")
        os.replace(beside, self.path)


def _finite(value: Any) -> Any:
    """Write NaN and infinity as words, because JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if not isinstance(value, float) or value - value == 0 else str(value)


def print_tables(results: dict[str, Result]) -> None:
    """Print measured speeds, failures, and a line per task."""
    tables: tuple[tuple[str, Callable[[Result], Iterator[tuple[Any, ...]]], tuple[str, ...]], ...] = (
        ("timings", _timing_lines, _TIMING_HEADER),
        ("quantized", _timing_lines, _TIMING_HEADER),
        ("graphs", _graph_lines, ("what", "batch", "us", "floor us", "of copy")),
        ("decoding", _decoding_lines, ("method", "batch", "drafter", "acceptance", *_DECODING_HEADER)),
        ("variants", _variant_lines, ("what", "variant", "us", "over default", "equal bits")),
        ("drafters", _drafter_lines, ("what", "tokens/s", "length", "ms drafting/step", "graphs", "equal")),
        ("ranks", _rank_lines, ("what", "tokens/s", "length", "graphs of draft", "equal")),
        ("devices", _rank_lines, ("what", "tokens/s", "length", "graphs of draft", "equal")),
    )
    for task, lines, header in tables:
        rows = list(lines(results.get(task, {"rows": []})))
        if rows:
            print(format_table(header, rows), end="\n\n")
    for task, result in results.items():
        for failure in result.get("failures", []):
            print(f"{task}: {failure['what']}: {failure['why']}")
        if "error" in result:
            print(f"{task}: {result['error']}")
    header = ("part", "status", "gate", "rows", "failures", "skipped", "seconds")
    print(format_table(header, [_part_line(*item) for item in results.items()]))


_TIMING_HEADER = ("op", "case", "dtype", "method", "us", "us/call", "GB/s", "of copy")
_DECODING_HEADER = ("tokens/s", "over plain", "length", "outside", "equal")


def _timing_lines(result: Result) -> Iterator[tuple[Any, ...]]:
    for row in (row for row in result.get("rows", []) if "microseconds" in row):
        times = (f"{row['microseconds']:.1f}", f"{row['call_microseconds']:.1f}")
        speeds = (f"{row['gigabytes_per_second']:.0f}", f"{row['share_of_copy']:.2f}")
        yield row["op"], row["case"], row["dtype"], row["method"], *times, *speeds


def _graph_lines(result: Result) -> Iterator[tuple[Any, ...]]:
    for row in (row for row in result.get("rows", []) if "microseconds" in row):
        times = (f"{row[name]:.1f}" for name in ("microseconds", "floor_microseconds"))
        yield row["what"], row["batch"], *times, f"{row['share_of_copy']:.2f}"


def _decoding_lines(result: Result) -> Iterator[tuple[Any, ...]]:
    for row in result.get("rows", []):
        over = "-" if row["speedup_over_plain"] is None else f"{row['speedup_over_plain']:.2f}x"
        speeds = (f"{row['tokens_per_second']:.1f}", over, f"{row['mean_acceptance_length']:.2f}")
        shares = (f"{row['share_outside_forwards']:.1%}", f"{row['equal_share']:.1%}")
        acceptance = "-" if row["acceptance"] is None else row["acceptance"]
        yield row["method"], row["batch"], row["drafter"] or "-", acceptance, *speeds, *shares


def _drafter_lines(result: Result) -> Iterator[tuple[Any, ...]]:
    for row in result.get("rows", []):
        drafting = f"{1e3 * row['seconds_drafting'] / max(1, row['num_steps']):.2f}"
        speeds = (f"{row['tokens_per_second']:.1f}", f"{row['mean_acceptance_length']:.2f}", drafting)
        yield row["what"], *speeds, row["draft_graphs"], f"{row['equal']} of {row['outputs']}"


def _rank_lines(result: Result) -> Iterator[tuple[Any, ...]]:
    for row in result.get("rows", []):
        speeds = (f"{row['tokens_per_second']:.1f}", f"{row['mean_acceptance_length']:.2f}")
        yield row["what"], *speeds, row["draft_graphs"], f"{row['equal']} of {row['outputs']}"


def _variant_lines(result: Result) -> Iterator[tuple[Any, ...]]:
    for row in (row for row in result.get("rows", []) if "microseconds" in row):
        equal = "yes" if all(row["equal_bits"].values()) else "no"
        yield row["what"], row["variant"], f"{row['microseconds']:.1f}", f"{row['speedup']:.3f}x", equal


def _part_line(name: str, result: Result) -> tuple[Any, ...]:
    counts = [len(result.get(what, [])) for what in ("rows", "failures", "skipped")]
    gate = "-" if result["status"] == "skipped" else "red" if is_red(result) else "green"
    return name, result["status"], gate, *counts, f"{result['seconds']:.1f}"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write gpu.json")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all parts (default: %(default)s)")
    parser.add_argument(
        "--parts", type=report.names, default=[], metavar="PART,...", help=f"of {','.join(p.name for p in TASKS)}"
    )
    parser.add_argument("--kernels", type=Path, metavar="FILE", help="compiled kernels, read and then written")
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to try the check itself")
    args = parser.parse_args(argv)
    unknown = set(args.parts) - {task.name for task in TASKS}
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in TASKS)}")
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu --smoke tries the check itself, at tiny sizes")
    return args


def _recorder(record: Record) -> Callable[[str, Result], None]:
    """Record results of tasks, and print when a task has ended, in case this process is ended."""

    def keep(task: str, result: Result) -> None:
        record.keep(task, result)
        if "seconds" in result and "status" in result:
            print(f"{task}: {result['status']} after {result['seconds']:.0f} s", file=sys.stderr, flush=True)

    return keep


def main(argv: list[str] | None = None) -> int:
    """Run all tasks; return the exit status."""
    args = parse_args(argv)
    began = monotonic()
    settings = Settings(args.device, args.smoke)
    record = Record(args.out, {"device": args.device, "smoke": args.smoke, "budget_seconds": args.budget})
    if args.kernels is not None and args.kernels.exists():
        record.note(kernels_unpacked=kernel_pack.unpack(args.kernels))
    first = run_tasks([Task("environment", environment, 1)], settings, args.budget, inline, record.keep)
    # On a CPU no kernel hangs or breaks a device context, and starting processes takes longer than the tasks.
    runner, at_once = (inline, 1) if torch.device(args.device).type == "cpu" else (isolated, GATES_AT_ONCE)
    budget = max(0.0, args.budget - (monotonic() - began))
    tasks = [task for task in TASKS if not args.parts or task.name in args.parts]
    results = first | run_tasks(tasks, settings, budget, runner, _recorder(record), at_once)
    red = [name for name, result in results.items() if is_red(result)]
    record.note(seconds=monotonic() - began, red=red)
    if args.kernels is not None:
        record.note(kernels_packed_bytes=kernel_pack.pack(args.kernels))
    print_tables(results)
    short = [name for name, result in results.items() if result["status"] == "skipped" or result.get("skipped")]
    print(f"\n{record.path}: {'red: ' + ', '.join(red) if red else 'no gate is red'}", end="")
    print(f"; no time for all of {', '.join(short)}" if short else "")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
