"""A roofline model of a step on a GPU, computed from the forward programs of a pair. Nothing is run or timed.

A kernel takes ``max(bytes / bandwidth, operations / peak)`` and 2 microseconds for its launch. Two ways of running a
forward are modelled (``model_step_/kernels.py``): *present*, PyTorch's kernels in a CUDA graph; and *fused*, the
launches of the program (``program/triton/executor.py``): one kernel for each fusion of row operations, and one for the
linears of one input. A verification has K + 1 rows of every sequence, a draft forward and a plain step one; each
contains the choice of its tokens. Work on the host, and rows that the draft model catches up, are not modelled. Gains
are over plain decoding in the same way, at an acceptance for every draft token.

With ``--quantization``, plain steps and verifications of the target with quantised weights are modelled, too, *fused*
alone: each quantised linear is a launch of its own, and one more rounds its rows if its mode says so. Their gains are
over the same forward with weights of ``--dtype``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.pairs import PAIRS
from bench.common.report import DTYPES, integers, names, write_json
from bench.model_step_.devices import DEVICES, device_named
from bench.model_step_.kernels import FUSED, PRESENT, Batch, Kernel, forward_kernels
from bench.model_step_.recording import WEIGHTS, Recorded, record
from specdec_fast.commands.common import format_table
from specdec_fast.errors import ConfigError, SpecDecError
from specdec_fast.planner.costs import Device

WAYS = (PRESENT, FUSED)


@dataclass(frozen=True)
class Forward:
    """One forward in one way.

    Attributes:
        name: ``"plain step"``, ``"verify"`` or ``"draft forward"``.
        way: one of ``WAYS``.
        kernels: in their order.

    """

    name: str
    way: str
    kernels: Sequence[Kernel]

    def row(self, device: Device) -> dict[str, Any]:
        """Return launches, bytes, operations and milliseconds; ``floor`` is without launches, all kernels as one."""
        num_bytes, flops = sum(k.num_bytes for k in self.kernels), sum(k.flops for k in self.kernels)
        return {
            "forward": self.name,
            "way": self.way,
            "launches": sum(k.launches for k in self.kernels),
            "gigabytes": num_bytes / 1e9,
            "gigaflops": flops / 1e9,
            "milliseconds": 1e3 * sum(k.seconds(device) for k in self.kernels),
            "floor_milliseconds": 1e3 * max(num_bytes / device.bandwidth, flops / device.peak),
        }


def recorded_pair(name: str, dtype: str) -> tuple[Recorded, Recorded]:
    """Record target and draft of a pair.

    Raises:
        ConfigError: the pair is unknown.

    """
    if name not in PAIRS:
        raise ConfigError(f"pair {name!r} is unknown; known are {', '.join(PAIRS)}.")
    pair = PAIRS[name]
    target, draft = (record(shape, pair.vocab_size, DTYPES[dtype]) for shape in (pair.target, pair.draft))
    return target, draft


def forwards_of(
    models: tuple[Recorded, Recorded], batch_size: int, num_draft_tokens: int, context: int
) -> list[Forward]:
    """Return the forwards of plain and speculative steps, in all ways."""
    target, draft = models
    one, many = Batch(batch_size, 1, context), Batch(batch_size, num_draft_tokens + 1, context)
    shapes = (("plain step", target, one), ("verify", target, many), ("draft forward", draft, one))
    return [Forward(name, way, forward_kernels(model, rows, way)) for way in WAYS for name, model, rows in shapes]


def steps_of(rows: Sequence[dict[str, Any]], num_draft_tokens: int, acceptance: float) -> list[dict[str, Any]]:
    """Return the milliseconds of a speculative step in each way, and its gain over plain steps."""
    emitted = sum(acceptance**depth for depth in range(num_draft_tokens + 1))
    found = []
    for way in WAYS:
        times = {row["forward"]: row["milliseconds"] for row in rows if row["way"] == way}
        step = times["verify"] + num_draft_tokens * times["draft forward"]
        found.append({"way": way, "step_milliseconds": step, "gain": emitted * times["plain step"] / step})
    return found


def quantized_rows(args: argparse.Namespace, device: Device, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fused forwards of the target with each kind of quantised weights, and their gains."""
    pair, found = PAIRS[args.pair], []
    for weights in args.quantization:
        target = record(pair.target, pair.vocab_size, DTYPES[args.dtype], weights)
        for batch in batches:
            before = {row["forward"]: row["milliseconds"] for row in batch["forwards"] if row["way"] == FUSED}
            for name, rows_each in (("plain step", 1), ("verify", args.num_draft_tokens + 1)):
                rows = Batch(batch["batch_size"], rows_each, args.context)
                row = Forward(name, FUSED, forward_kernels(target, rows, FUSED)).row(device)
                gain = before[name] / row["milliseconds"]
                found.append({"batch_size": rows.batch_size, "weights": weights, **row, "gain": gain})
    return found


def kernel_rows(forward: Forward, device: Device) -> list[list[str]]:
    """Return a line of text for each kind of kernel: launches, bytes, operations, time of all its launches."""
    kinds: dict[str, list[Kernel]] = {}
    for kernel in forward.kernels:
        kinds.setdefault(kernel.name, []).append(kernel)
    return [
        [
            name,
            str(sum(k.launches for k in kernels)),
            f"{sum(k.num_bytes for k in kernels) / 1e6:.1f}",
            f"{sum(k.flops for k in kernels) / 1e9:.2f}",
            f"{1e6 * sum(k.seconds(device) for k in kernels):.1f}",
        ]
        for name, kernels in kinds.items()
    ]


def model_step(args: argparse.Namespace) -> dict[str, Any]:
    """Compute and print the tables; return the report.

    Raises:
        ConfigError: a pair or device is unknown, or a number is out of range.

    """
    if min(args.batch) < 1 or args.num_draft_tokens < 1 or args.context <= args.num_draft_tokens:
        raise ConfigError("--batch and --num-draft-tokens are from 1 on, and --context is larger than the latter.")
    device = device_named(args.device)
    device = Device(1e9 * args.bandwidth if args.bandwidth else device.bandwidth, device.peak)
    models, batches = recorded_pair(args.pair, args.dtype), []
    for batch_size in args.batch:
        forwards = forwards_of(models, batch_size, args.num_draft_tokens, args.context)
        rows = [forward.row(device) for forward in forwards]
        steps = steps_of(rows, args.num_draft_tokens, args.acceptance)
        batches.append({"batch_size": batch_size, "forwards": rows, "steps": steps})
        if args.kernels:
            for forward in forwards:
                print(f"\n{forward.name}, {forward.way}, batch {batch_size}")
                print(format_table(("kernel", "launches", "MB", "GFLOP", "us"), kernel_rows(forward, device)))
    print_table(batches)
    quantized = quantized_rows(args, device, batches)
    if quantized:
        print_quantized(quantized)
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "kernels")}
    figures = {"bandwidth": device.bandwidth, "batches": batches, "quantized": quantized}
    return {"bench": "model_step", "computed": True, **settings, **figures}


def print_table(batches: Sequence[dict[str, Any]]) -> None:
    """Print one line per batch size, forward and way, then one per batch size and way."""
    keys = ("gigabytes", "gigaflops", "milliseconds", "floor_milliseconds")
    lines = [
        [batch["batch_size"], row["forward"], row["way"], row["launches"], *(f"{row[key]:.2f}" for key in keys)]
        for batch in batches
        for row in batch["forwards"]
    ]
    print(format_table(("batch", "forward", "way", "launches", "GB", "GFLOP", "ms", "floor ms"), lines))
    lines = [
        [batch["batch_size"], step["way"], f"{step['step_milliseconds']:.2f}", f"{step['gain']:.2f}x"]
        for batch in batches
        for step in batch["steps"]
    ]
    print(format_table(("batch", "way", "speculative step ms", "over plain steps"), lines))


def print_quantized(rows: Sequence[dict[str, Any]]) -> None:
    """Print one line per kind of weights, batch size and forward."""
    keys = ("gigabytes", "milliseconds", "floor_milliseconds")
    lines = [
        [row["batch_size"], row["forward"], row["weights"], row["launches"], *(f"{row[key]:.2f}" for key in keys),
         f"{row['gain']:.2f}x"]
        for row in rows
    ]  # fmt: skip
    header = ("batch", "forward, fused", "weights", "launches", "GB", "ms", "floor ms", "over unquantised")
    print(format_table(header, lines))


def main(argv: list[str] | None = None) -> None:
    """Compute, print the tables, end in one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.model_step", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pair", default="qwen3-8b", help=f"of {', '.join(PAIRS)} (default: %(default)s)")
    parser.add_argument("--batch", type=integers, default=[1, 8, 32], metavar="B,B", help="default: 1,8,32")
    parser.add_argument("--num-draft-tokens", type=int, default=5, metavar="K")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="KV positions (default: %(default)s)")
    parser.add_argument("--device", default="h200", help=f"of {', '.join(DEVICES)} (default: %(default)s)")
    parser.add_argument("--bandwidth", type=float, metavar="GB/s", help="instead of the data sheet's")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--quantization", type=names, default=[], metavar="NAME,...", help=f"of the target: {', '.join(WEIGHTS)}"
    )
    parser.add_argument("--acceptance", type=float, default=0.8, help="of each draft token (default: %(default)s)")
    parser.add_argument("--kernels", action="store_true", help="also print the kernels of every forward")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args(argv)
    try:
        report = model_step(args)
    except SpecDecError as error:
        parser.error(str(error))
    write_json(report, args.json)


if __name__ == "__main__":
    main()
