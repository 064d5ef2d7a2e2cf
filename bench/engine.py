"""Whole decoding runs, all in one process: plain decoding, the engine, the oracle, transformers.

Repeats are interleaved: every setting once, then every setting again. The report has medians, and medians of ratios
within a repeat, because one absolute time on a shared machine says little. No speed is reported if an output differs
from the reference. In fp32 the reference is ``transformers`` at batch 1, which the engine, the oracle and assisted
generation must equal. In bf16 and fp16 it is the engine's own plain decoding at batch 1, which the engine must equal.
"""

from __future__ import annotations

import argparse
import atexit
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers.utils import logging

from bench.common import report
from bench.common.device import full_precision
from bench.common.measurement import MethodSetting, measure
from bench.common.random_eagle3 import write_random_eagle3
from bench.common.workload import Workload, add_workload_options, check_workload, load
from bench.engine_.methods import DEFAULT_METHODS, METHODS, NOT_REPLAYED, Bench
from bench.engine_.summary import print_tables, summarise
from specdec_fast.errors import SpecDecError


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the defaults are the bundled pair and its 32 prompts."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=(__doc__ or "").split("\n")[0])
    add_workload_options(parser)
    parser.add_argument(
        "--methods", type=report.names, help=f"some of {','.join(METHODS)} (default: all that --acceptance allows)"
    )
    parser.add_argument("--batch-sizes", type=report.integers, default=[1, 4, 8, 16])
    parser.add_argument(
        "--num-draft-tokens", type=report.draft_tokens, default=[5], metavar="K", help="such as 3,5,auto (default: 5)"
    )
    parser.add_argument(
        "--acceptance",
        type=report.probabilities,
        metavar="P,P",
        help="replay the target's own tokens with these probabilities in place of what the draft model proposes",
    )
    parser.add_argument(
        "--eagle3",
        type=int,
        metavar="IDS",
        help="draft with an EAGLE-3 layer of the target's hidden size, random weights and so many ids, in place of the "
        "draft model; needs --acceptance",
    )
    parser.add_argument(
        "--no-deterministic", action="store_true", help="do not pad the engine's forwards; the gate does not change"
    )
    parser.add_argument(
        "--peer-models",
        type=report.Path,
        metavar="FOLDER",
        help="folder that bench.export_pair wrote, for openvino and llama.cpp",
    )
    report.add_report_options(parser)
    parser.set_defaults(repeats=3)
    args = parser.parse_args(argv)
    check_workload(parser, args)
    args.methods = args.methods or [m for m in DEFAULT_METHODS if not (args.acceptance and m in NOT_REPLAYED)]
    _check_methods(parser, args)
    return args


def _check_methods(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if unknown := set(args.methods) - set(METHODS):
        parser.error(f"--methods: {', '.join(sorted(unknown))}; expected some of {', '.join(METHODS)}")
    if args.acceptance and (running := set(args.methods) & set(NOT_REPLAYED)):
        parser.error(
            f"--acceptance: {', '.join(sorted(running))} would run the draft model's own proposals, which cannot be "
            "replayed there; leave --acceptance out to time the draft as it is"
        )
    if args.eagle3 is not None and not args.acceptance:
        parser.error("--eagle3: its weights are random, so nothing would be accepted; add --acceptance, such as 0.8")
    if args.repeats < 1 or min(args.batch_sizes) < 1:
        parser.error("--repeats and --batch-sizes: expected 1 or more")


def make_settings(bench: Bench, args: argparse.Namespace) -> list[MethodSetting]:
    """Make all settings of the options."""
    found = bench.method_settings(args.methods, args.batch_sizes, args.num_draft_tokens, args.acceptance or [None])
    settings = list(found)
    if not settings:
        sys.exit(f"{', '.join(args.methods)} cannot be run with these batch sizes and numbers of draft tokens.")
    return settings


def _drafter(args: argparse.Namespace, workload: Workload) -> str | None:
    """Return the drafter of ``--eagle3``; its folder is left to be deleted when the process ends."""
    if args.eagle3 is None:
        return None
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    write_random_eagle3(workload.target, args.eagle3, Path(folder.name))
    return f"eagle3:{folder.name}"


def main(argv: list[str] | None = None) -> None:
    """Measure, print the tables, end in one JSON line."""
    args = parse_args(argv)
    report.prepare(args)
    full_precision()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # assisted generation warns about its own settings
    try:
        workload = load(args, 2 * max(args.batch_sizes))
        bench = Bench(workload, not args.no_deterministic, args.peer_models, _drafter(args, workload))
        settings = make_settings(bench, args)
        reference = bench.reference(settings)
    except SpecDecError as error:
        sys.exit(str(error))
    rows = summarise(measure(settings, args.repeats, reference))
    print(
        f"{workload.name}, {len(workload.prompts)} prompts of {min(map(len, workload.prompts))} to "
        f"{max(map(len, workload.prompts))} tokens ({workload.num_left_out} left out as too long), up to "
        f"{args.max_new_tokens} new tokens, {args.dtype} on {bench.target.device}, {args.repeats} interleaved repeats, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; outputs equal {reference.label} at batch 1 "
        f"(equal: share of such outputs; *: not required; own batch 1: share equal to the method's own outputs there)\n"
    )
    print_tables(rows)
    result = {
        "machine": report.machine(bench.target.device),
        "pair": workload.name,
        "prompts": len(workload.prompts),
        "prompts_left_out": workload.num_left_out,
        "prompt_tokens": sum(map(len, workload.prompts)),
        "max_new_tokens": args.max_new_tokens,
        "ignore_eos": args.ignore_eos,
        "eagle3_ids": args.eagle3,
        "dtype": args.dtype,
        "deterministic": not args.no_deterministic,
        "repeats": args.repeats,
        "reference": reference.label,
        "rows": rows,
    }
    if args.plot:
        from bench.engine_.plot import draw

        draw(rows, args.plot)
    report.write_json(result, args.json)


if __name__ == "__main__":
    main()
