"""Every op on every backend that runs here, compared with the machine's copy bandwidth and with plain PyTorch.

The benchmark reads the registry, so it times every implementation that a declaration names. It times an implementation
only if that agrees with the torch one. Repeats are interleaved, and ratios are medians of ratios within a repeat.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from bench.common import report
from bench.common.correctness_gate import BASELINE, disagreement
from bench.common.references import prepare_reference
from bench.common.timing import Call, Clock, median_ratio
from bench.op_cases import OP_CASES, Case
from specdec_fast.commands.common import format_table
from specdec_fast.ops import BACKENDS, Op, all_ops
from specdec_fast.ops.registry import INTERPRETING

COPY_BYTES = 1 << 28  # bytes read, and as many written: more than a cache holds
COPY = "copy"
SEED = 0


@dataclass(frozen=True)
class Subject:
    """One op on one set of arguments, and the backends to compare there."""

    op: Op
    case: Case
    dtype: torch.dtype
    device: torch.device
    backends: tuple[str, ...]

    def make(self) -> dict[str, Any]:
        """Make the arguments; the same ones each time."""
        return self.case.make(torch.Generator().manual_seed(SEED), self.dtype, self.device)

    def __str__(self) -> str:
        return f"{self.op.name} {self.case.name} {_name(self.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def subjects(args: argparse.Namespace) -> Iterator[Subject]:
    """Yield the subjects of the options; the baseline always takes part."""
    device = torch.device(args.device)
    for name in args.ops:
        op = all_ops()[name]
        able = [b for b in args.backends or op.implementations if why_not(op, b, device) is None]
        backends = (BASELINE, *(b for b in able if b != BASELINE))
        of_rows = OP_CASES[name].benchmarks_of_rows
        cases = of_rows(args.rows) if of_rows and args.rows else OP_CASES[name].benchmarks
        for case in cases:
            for dtype in args.dtypes:
                if args.cases in case.name:
                    yield Subject(op, case, dtype, device, backends)


def why_not(op: Op, backend: str, device: torch.device) -> str | None:
    """Return None if ``backend`` can be timed on ``op`` and ``device`` here, else the reason."""
    if INTERPRETING and backend == "triton":
        return "TRITON_INTERPRET=1 interprets its kernels, so their speed means nothing; unset it"
    served = BACKENDS[backend].device_types
    return op.why_unavailable(backend) or (
        None if device.type in served else f"it serves {', '.join(served)}, not {device.type}"
    )


def check(subject: Subject) -> None:
    """Exit if a backend disagrees with the baseline, because a wrong result has no speed."""
    for backend in subject.backends:
        problem = disagreement(subject.op, backend, subject.make) if backend != BASELINE else None
        if problem:
            sys.exit(f"{subject} on {backend}: {problem}; no speed is reported.")


def measure(subject: Subject, clock: Clock, copy: Call, repeats: int) -> list[dict[str, Any]]:
    """Time all backends, the reference and the plain copy in turn; return a row for each except the copy."""
    args = subject.make()
    calls: dict[str, Call] = {COPY: copy}
    for backend in subject.backends:
        # Without the argument check, as an engine calls an op for all layers except the first. Repeated calls in place
        # move different numbers each time, but equally many.
        calls[backend] = partial(subject.op.load(backend, check=False), **args)
    reference = prepare_reference(subject.op.name, args)
    seconds = clock.interleave([calls | reference] * repeats)
    num_bytes = OP_CASES[subject.op.name].bytes_moved(**args)
    rows = []
    for method in (*subject.backends, *reference):
        rows.append(
            {
                "op": subject.op.name,
                "backend": method,
                "case": subject.case.name,
                "dtype": _name(subject.dtype),
                "milliseconds": 1e3 * median(seconds[method]),
                "bytes_moved": num_bytes,
                "gigabytes_per_second": num_bytes / median(seconds[method]) / 1e9,
                "share_of_copy": num_bytes / (2 * COPY_BYTES) * median_ratio(seconds[COPY], seconds[method]),
                "ratio_to_torch": median_ratio(seconds[BASELINE], seconds[method]),
                "reference": next(iter(reference), None),
                "ratio_to_reference": next((median_ratio(seconds[r], seconds[method]) for r in reference), None),
            }
        )
    return rows


def plain_copy(device: torch.device) -> Call:
    """Return a copy of ``COPY_BYTES`` between two buffers, whose bandwidth is the reference."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return partial(destination.copy_, source)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per op, case, dtype and backend; the references are marked."""
    header = ("op", "case", "dtype", "backend", "ms", "GB/s", "of copy", "x torch", "x reference")
    print(
        format_table(
            header,
            [
                (
                    row["op"],
                    row["case"],
                    row["dtype"],
                    f"({row['backend']})" if row["backend"] == row["reference"] else row["backend"],
                    f"{row['milliseconds']:.3f}",
                    f"{row['gigabytes_per_second']:.1f}",
                    f"{row['share_of_copy']:.2f}",
                    f"{row['ratio_to_torch']:.2f}",
                    "-" if row["ratio_to_reference"] is None else f"{row['ratio_to_reference']:.2f}",
                )
                for row in rows
            ],
        )
    )


def draw(result: dict[str, Any], path: Any) -> None:
    """Draw one panel per op: bandwidth of every backend, and the copy's as a dashed line."""
    plt, rows = report.pyplot(), result["rows"]
    ops = list(dict.fromkeys(row["op"] for row in rows))
    height = [1 + 0.28 * sum(row["op"] == op for row in rows) for op in ops]
    figure, axes = plt.subplots(
        len(ops), 1, figsize=(9, sum(height)), squeeze=False, gridspec_kw={"height_ratios": height}
    )
    methods = list(dict.fromkeys(row["backend"] for row in rows))
    colours = dict(zip(methods, plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for axis, op in zip(axes[:, 0], ops, strict=True):
        own = [row for row in rows if row["op"] == op]
        labels = [f"{row['case']}, {row['dtype']}: {row['backend']}" for row in own]
        axis.barh(labels, [r["gigabytes_per_second"] for r in own], color=[colours[r["backend"]] for r in own])
        axis.axvline(result["copy_gigabytes_per_second"], color="black", linestyle="--")
        axis.invert_yaxis()
        axis.set_title(op)
    axes[-1, 0].set_xlabel("GB/s (dashed: a plain copy)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; everything that can run on the CPU by default."""
    parser = argparse.ArgumentParser(prog="python -m bench.ops", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ops", type=report.names, default=list(all_ops()), help="such as verify_chain,append_kv_")
    parser.add_argument("--backends", type=report.names, help="besides torch (default: all that run here)")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--rows", type=report.integers, help="numbers of rows of linear, such as 1,8,64")
    parser.add_argument(
        "--dtypes", type=report.names, default=["bfloat16", "float32"], help=f"some of {','.join(report.DTYPES)}"
    )
    parser.add_argument("--device", default="cpu")
    report.add_report_options(parser)
    args = parser.parse_args(argv)
    named = (("--ops", args.ops, all_ops()), ("--backends", args.backends or [], BACKENDS))
    for option, asked, known in (*named, ("--dtypes", args.dtypes, report.DTYPES)):
        unknown = set(asked) - set(known)
        if unknown:
            parser.error(f"{option}: {', '.join(sorted(unknown))}; expected some of {', '.join(known)}")
    for op, backend in ((op, b) for op in args.ops for b in args.backends or []):
        reason = why_not(all_ops()[op], backend, torch.device(args.device))
        if reason:
            parser.error(f"--backends: {backend} cannot run {op} here: {reason}")
    if min(args.rows or [1]) < 1:
        parser.error(f"--rows: {min(args.rows)}; expected 1 or more")
    fixed = [op for op in args.ops if args.rows and OP_CASES[op].benchmarks_of_rows is None]
    if fixed:
        able = ", ".join(name for name, cases in OP_CASES.items() if cases.benchmarks_of_rows)
        parser.error(f"--rows: {', '.join(fixed)} cannot vary the number of rows; expected --ops {able}")
    args.dtypes = [report.DTYPES[name] for name in args.dtypes]
    return args


def main(argv: list[str] | None = None) -> None:
    """Check, measure, print the table, end in one JSON line."""
    args = parse_args(argv)
    report.prepare(args)
    device = torch.device(args.device)
    clock, copy = Clock(device), plain_copy(device)
    rows: list[dict[str, Any]] = []
    for subject in tqdm(list(subjects(args)), disable=not sys.stderr.isatty()):
        check(subject)
        rows += measure(subject, clock, copy, args.repeats)
    if not rows:
        sys.exit(f"no benchmark of {', '.join(args.ops)} has {args.cases!r} in its name.")
    copied = 2 * COPY_BYTES / median(clock.interleave([{COPY: copy}] * args.repeats)[COPY]) / 1e9
    print(
        f"{args.repeats} interleaved repeats, torch {torch.__version__}, {torch.get_num_threads()} threads on "
        f"{device.type}; a plain copy moves {copied:.1f} GB/s, read and written bytes together\n"
    )
    print_table(rows)
    result = {
        "machine": report.machine(device),
        "repeats": args.repeats,
        "copy_gigabytes_per_second": copied,
        "rows": rows,
    }
    if args.plot:
        draw(result, args.plot)
    report.write_json(result, args.json)


if __name__ == "__main__":
    main()
