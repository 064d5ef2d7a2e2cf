"""Scylla's laws (arXiv 2505.07858) at a small scale: what training tokens, layers and the batch size do to drafting.

Every point of the grid is an EAGLE-3 drafter, trained in one pass over the first tokens of texts that the target wrote,
and evaluated by decoding prompts that begin no text of the training. The laws are fitted to a part of the grid, and
predict the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from bench.common import report
from bench.laws_.plot import draw
from bench.laws_.points import Grid, GridSettings
from bench.laws_.summary import law_rows, print_laws
from bench.laws_.table import GridTable
from specdec_fast.assets import demo_pair
from specdec_fast.planner.law_table import read_laws

_BATCH_SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
_SPARE = 1.15  # texts written over those needed: the held-out ones are not learnt
_SMOKE: dict[str, Any] = {
    "layers": [1, 2],
    "training_tokens": [300, 600, 1200],
    "seeds": [0, 1],
    "batch_sizes": [1, 2, 4],
}
_SMOKE_SETTINGS: dict[str, Any] = {
    "text_tokens": 3000,
    "hidden_size": 32,
    "held_out": 12,
    "prompt_tokens": 12,
    "max_new_tokens": 9,
    "num_steps": 3,
}


def trained(args: argparse.Namespace, table: GridTable, grid: Grid) -> None:
    """Train the drafters that the table lacks; it is written after each."""
    for layers, tokens, seed in table.missing(args.layers, args.training_tokens, args.seeds):
        point = grid.point(layers, tokens, seed)
        table.add(point)
        print(f"{layers} layers, {tokens} tokens, seed {seed}: {point['accepted_tokens']:.3f} accepted", flush=True)


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.laws", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", default=str(demo_pair() / "target"), help="name or folder (default: the bundled)")
    parser.add_argument("--layers", type=report.integers, default=[1, 2, 4, 8], metavar="L,L", help="of the drafters")
    parser.add_argument(
        "--training-tokens", type=report.integers, default=[8000, 16000, 40000, 100000, 250000], metavar="T,T"
    )
    parser.add_argument("--text-tokens", type=int, metavar="N", help="of all texts (default: 1.15 of the largest T)")
    parser.add_argument("--seeds", type=report.integers, default=[0, 1], metavar="S,S")
    parser.add_argument("--batch-sizes", type=report.integers, default=_BATCH_SIZES, metavar="B,B")
    parser.add_argument("--part", choices=["train", "costs", "all"], default="all", help="(default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a grid of seconds, to try the command")
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="for texts and checkpoints")
    parser.add_argument("--json", type=Path, required=True, help="the table; a call goes on with what is in it")
    parser.add_argument("--threads", type=int, help="threads of torch and of the C++ ops (default: torch's own choice)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the result (needs matplotlib)")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Train, time forwards, fit, and end in one JSON line, which has the table and the fits."""
    args = options().parse_args(argv)
    settings = _settings(args)
    report.prepare(args)
    args.work.mkdir(parents=True, exist_ok=True)
    machine = report.machine(torch.device("cpu"))
    table = GridTable(args.json, settings, _command(argv), machine)
    grid = Grid(settings, args.work)
    if args.part != "costs":
        trained(args, table, grid)
    if args.part != "train":
        table.time_forwards(grid, args.layers, args.batch_sizes)
    laws = read_laws(table.data)
    rows = law_rows(laws, args.batch_sizes)
    print_laws(rows, laws.seed_deviation())
    if args.plot:
        draw(rows, args.plot)
    print(json.dumps(report.rounded({**table.data, "seed_deviation": laws.seed_deviation(), "laws": rows})))


def _settings(args: argparse.Namespace) -> GridSettings:
    if args.smoke:
        vars(args).update(_SMOKE)
        return GridSettings(args.target, **_SMOKE_SETTINGS)
    return GridSettings(args.target, args.text_tokens or int(max(args.training_tokens) * _SPARE))


def _command(argv: list[str] | None) -> str:
    words = sys.argv[1:] if argv is None else argv
    return " ".join(["python -m bench.laws", *words])


if __name__ == "__main__":
    main()
