"""The cost of realignment: Python repad loops, a vectorised gather, the fused op in place, and the engine, without any.

The benchmark measures the KV moves of one step on caches of real models' shapes, then whole decoding runs of the
bundled pair. It reports a speed only if all methods leave the same KV entries and all runs emit the same tokens.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging

from bench.common import report
from bench.common.subprocesses import in_subprocess
from bench.common.workload import add_workload_options, check_workload, load
from bench.engine_.methods import Bench
from bench.realign_.decoding import accepted_counts, method_settings, step_rows
from bench.realign_.memory import extra_bytes
from bench.realign_.methods import CPU, PUBLISHED, Shape, Step, check, draw_steps, layers_that_fit, measure, methods
from specdec_fast.commands.common import format_table
from specdec_fast.errors import BackendError
from specdec_fast.ops import AUTO, BACKENDS, resolve

DEMO = "demo-pair"
SHARE_OF_MEMORY = 0.8  # share of the available memory; the models and the allocator need the rest
GIB = 1 << 30


def available_bytes() -> int:
    """Return the available memory, by the system's own estimate; 4 GiB if it has none."""
    meminfo = Path("/proc/meminfo")  # Linux only
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE) if meminfo.exists() else None
    return int(SHARE_OF_MEMORY * int(found[1]) * 1024) if found else 4 * GIB


def shapes(args: argparse.Namespace, bench: Bench) -> list[Shape]:
    """Return the caches of the options; that of the bundled target has the dtype in which it decodes."""
    published = [Shape(*sizes, report.DTYPES[args.cache_dtype]) for sizes in PUBLISHED]
    demo = Shape.of(DEMO, bench.target.config, bench.target.dtype)
    return [shape for shape in (*published, demo) if shape.name in args.shapes]


def _measure(backend: str, shape: Shape, num_layers: int, steps: list[Step]) -> list[dict[str, Any]]:
    realign_kv_ = resolve(CPU, backend).realign_kv_
    return measure(methods(realign_kv_), realign_kv_, shape, num_layers, steps)


class RealignMethods:
    """The methods over shapes and batch sizes: rows of times, and the memory that each method needs."""

    def __init__(self, args: argparse.Namespace, accepted: list[int]) -> None:
        self.args, self.accepted = args, accepted
        self.repads = methods(resolve(CPU, args.backend).realign_kv_)
        self.memory_bytes = int(args.memory_gib * GIB) if args.memory_gib else available_bytes()
        self.rows: list[dict[str, Any]] = []
        self.memory: list[dict[str, Any]] = []

    def run(self, shape: Shape) -> None:
        """Measure one shape at every batch size that fits, and its memory at the largest of these."""
        fitting = []
        for batch_size in self.args.batch_sizes:
            steps = draw_steps(self.accepted, batch_size, self.args.columns, self.args.repeats)
            num_layers = layers_that_fit(shape, batch_size, steps[0].cache_columns, self.memory_bytes)
            if num_layers == 0:
                tqdm.write(f"{shape.name} at batch {batch_size}: not one layer fits; left out", file=sys.stderr)
                continue
            problem = check(self.repads, shape, num_layers, steps)
            if problem:
                sys.exit(f"{shape.name} at batch {batch_size}: {problem}; no speed is reported.")
            self.rows += in_subprocess(_measure, self.args.backend, shape, num_layers, steps)
            fitting.append((num_layers, steps[0]))
        if fitting:
            self._measure_memory(shape, *fitting[-1])

    def _measure_memory(self, shape: Shape, num_layers: int, step: Step) -> None:
        for method in self.repads:
            num_bytes = extra_bytes(method, self.args.backend, shape, num_layers, step)
            cache_bytes = num_layers * len(step.moves) * step.cache_columns * shape.bytes_per_column
            self.memory.append(
                {
                    "shape": shape.name,
                    "batch": len(step.moves),
                    "method": method,
                    "layers": num_layers,
                    "cache_bytes": cache_bytes,
                    "extra_bytes": num_bytes,
                }
            )


def print_methods(rows: list[dict[str, Any]]) -> None:
    """Print one line per shape, batch size and method."""
    header = ("shape", "layers", "batch", "method", "ms", "MB moved", "x python", "of memcpy's time", "op alone")
    print(
        format_table(
            header,
            [
                (
                    row["shape"],
                    f"{row['layers']} of {row['of_layers']}",
                    row["batch"],
                    row["method"],
                    f"{row['milliseconds']:.3f}",
                    f"{row['bytes_moved'] / 1e6:.1f}",
                    _or_dash(row["speedup_over_python"]),
                    _or_dash(row["time_over_memcpy"]),
                    _or_dash(row["op_over_memcpy"]),
                )
                for row in rows
            ],
        )
    )


def _or_dash(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def print_memory(memory: list[dict[str, Any]]) -> None:
    """Print the memory that each method needs beside the cache."""
    print("\nmemory beyond the cache, peak\n")
    lines = []
    for row in memory:
        extra = "not measured here" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 1e6:.2f}"
        lines.append((row["shape"], row["batch"], row["method"], f"{row['cache_bytes'] / 1e6:.1f}", extra))
    print(format_table(("shape", "batch", "method", "MB of cache", "MB beyond"), lines))


def print_steps(steps: list[dict[str, Any]]) -> None:
    """Print the shares of a decoding step."""
    print("\nwhole decoding steps of the pair, prefill left out; every output equals transformers at batch 1\n")
    header = ("method", "batch", "steps", "ms/step", "realign ms/step", "realign", "assemble", "KB moved/step")
    print(
        format_table(
            header,
            [
                (
                    row["method"],
                    row["batch"],
                    row["steps"],
                    f"{row['milliseconds_per_step']:.2f}",
                    f"{row['realign_milliseconds_per_step']:.3f}",
                    f"{row['realign_share']:.1%}",
                    f"{row['assemble_share']:.1%}",
                    f"{row['moved_bytes_per_step'] / 1e3:.1f}",
                )
                for row in steps
            ],
        )
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw one panel per shape: milliseconds per step over the batch size, one line per method."""
    plt = report.pyplot()
    panels = list(dict.fromkeys(row["shape"] for row in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 4), squeeze=False)
    for axis, name in zip(axes[0], panels, strict=True):
        own = [row for row in rows if row["shape"] == name]
        for method in dict.fromkeys(row["method"] for row in own):
            points = [(row["batch"], row["milliseconds"]) for row in own if row["method"] == method]
            if any(milliseconds for _, milliseconds in points):
                axis.plot(*zip(*points, strict=True), marker="o", label=method)
            else:
                axis.plot([], [], " ", label=f"{method}: moves nothing")  # a logarithmic scale has no zero
        layers = {row["layers"] for row in own}
        counted = f"{min(layers)}" if len(layers) == 1 else f"{min(layers)} to {max(layers)}"
        axis.set(xscale="log", yscale="log", xlabel="batch", ylabel="ms per step")
        axis.set_title(f"{name}: {counted} of {own[0]['of_layers']} layers")
        batches = [row["batch"] for row in own if row["method"] == own[0]["method"]]
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.xaxis.minorticks_off()
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    known = [name for name, *_ in PUBLISHED] + [DEMO]
    parser = argparse.ArgumentParser(prog="python -m bench.realign", description=(__doc__ or "").split("\n")[0])
    add_workload_options(parser)
    parser.add_argument("--num-draft-tokens", type=int, default=5, metavar="K", help="per step (default: 5)")
    parser.add_argument("--shapes", type=report.names, default=known, help=f"some of {','.join(known)} (default: all)")
    parser.add_argument("--batch-sizes", type=report.integers, default=[2, 4, 8, 16, 32])
    parser.add_argument("--columns", type=int, default=512, help="length of the longest row (default: %(default)s)")
    parser.add_argument(
        "--cache-dtype", choices=report.DTYPES, default="bfloat16", help="dtype of the large models' caches"
    )
    parser.add_argument(
        "--memory-gib", type=float, help="memory for one measurement (default: four fifths of the free memory)"
    )
    parser.add_argument("--backend", choices=[AUTO, *BACKENDS], default=AUTO, help="backend of the fused op")
    parser.add_argument(
        "--decoding-batch-sizes", type=report.integers, default=[8, 32], help="batch sizes of the decoding runs"
    )
    report.add_report_options(parser)
    args = parser.parse_args(argv)
    check_workload(parser, args)
    unknown = set(args.shapes) - set(known)
    if min(args.batch_sizes) < 2:
        parser.error("--batch-sizes: a batch of one row is never realigned; expected 2 or more")
    if unknown:
        parser.error(f"--shapes: {', '.join(sorted(unknown))}; expected some of {', '.join(known)}")
    return args


def main(argv: list[str] | None = None) -> None:
    """Check, measure, print the tables, end in one JSON line."""
    args = parse_args(argv)
    report.prepare(args)
    logging.disable_progress_bar()
    bench = Bench(load(args, 2 * max(args.decoding_batch_sizes)))
    accepted = accepted_counts(bench, args.num_draft_tokens)
    if sum(count > 0 for count in accepted) < 2:
        sys.exit(
            f"the pair accepts alike in every step ({accepted}, 0 to K draft tokens), so nothing is ever realigned."
        )
    try:
        found = RealignMethods(args, accepted)
    except BackendError as error:
        sys.exit(str(error))
    for shape in tqdm(shapes(args, bench), disable=not sys.stderr.isatty()):
        found.run(shape)
    decoders = method_settings(bench, found.repads, args.decoding_batch_sizes, args.num_draft_tokens)
    steps = step_rows(list(decoders), args.repeats)
    share = {str(b): sum((a / sum(accepted)) ** b for a in accepted) for b in args.batch_sizes}
    print(
        f"{args.columns} columns, {args.repeats} interleaved repeats, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {found.memory_bytes / GIB:.1f} GiB for one measurement; draft tokens "
        f"accepted by the pair, 0 to {args.num_draft_tokens}: {accepted}; all methods leave the same KV entries\n"
    )
    print_methods(found.rows)
    print_memory(found.memory)
    print_steps(steps)
    result = {
        "machine": report.machine(CPU),
        "repeats": args.repeats,
        "columns": args.columns,
        "memory_gib": found.memory_bytes / GIB,
        "acceptance": {"accepted_counts": accepted, "share_of_steps_that_move_nothing": share},
        "memory": found.memory,
        "steps": steps,
        "rows": found.rows,
    }
    if args.plot:
        draw(found.rows, args.plot)
    report.write_json(result, args.json)


if __name__ == "__main__":
    main()
