"""Drafters of one target: tokens per step, and speed over plain decoding.

Every drafter decodes the same prompts, interleaved, and its outputs must equal plain decoding's. Ratios are medians of
ratios within a repeat. "tokens/step" and "drafted/step" count per sequence, "drafting" is the share of the time spent
drafting, and "ms/step" that time per step. By default the bundled target decodes with its draft model, its EAGLE-3
drafter and prompt lookup.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench.common import report
from bench.common.measurement import DraftTree, Measurement, MethodSetting, Runs, measure
from bench.common.timing import median_ratio
from specdec_fast import Engine, EngineConfig, SamplingParams
from specdec_fast.assets import demo_pair
from specdec_fast.commands.common import add_drafter_options, draft_tokenizer, format_table
from specdec_fast.commands.prompt_files import read_prompts
from specdec_fast.drafters import configs_for, draft_tokenizers_for
from specdec_fast.drafters.suffix.drafter import SuffixDrafter
from specdec_fast.models.loading import load_model

PLAIN = "none"


def run(engine: Engine, prompts: list[Any], params: list[SamplingParams]) -> Measurement:
    """Decode all prompts once."""
    if isinstance(engine.drafter, SuffixDrafter):
        engine.drafter.clear()  # earlier repeats had the same outputs
    started = perf_counter()
    outputs = engine.generate(prompts, params, progress=False)
    seconds = perf_counter() - started
    tokens = [output.raise_for_error().token_ids for output in outputs]
    stats = engine.last_run
    return Measurement(tokens, seconds, stats.timer.seconds, 0, stats.num_steps, stats.decoding)


def settings_of(args: argparse.Namespace) -> Iterator[MethodSetting]:
    """Yield plain decoding and every drafter, at every batch size, tree and K."""
    dtype = report.DTYPES[args.dtype]
    target = load_model(args.target, dtype, None if args.device is None else torch.device(args.device))
    lines = read_prompts(args.prompts)[: args.num_prompts or None]
    prompts = [line.prompt for line in lines]
    params = [
        SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=i)
        for i in range(len(prompts))
    ]
    shared = EngineConfig(dtype=dtype, tap_layers=args.tap_layers, enforce_eager=args.enforce_eager)
    drafters = (PLAIN, *args.drafts)
    tokenizers = draft_tokenizers_for(drafters, draft_tokenizer(args))
    configs = [configs_for(drafters, replace(shared, draft_tree=tree)) for tree in args.draft_tree or [None]]
    for batch_size in args.batch_sizes:
        for draft, tokenizer, *own in zip(drafters, tokenizers, *configs, strict=True):
            # A drafter that reads no draft_tree has one config for all trees, and runs once.
            for config in dict.fromkeys(own):
                for k in args.num_draft_tokens if draft != PLAIN else [0]:
                    config_of_k = replace(config, max_batch_size=batch_size, num_draft_tokens=k)
                    engine = Engine(target, draft, config_of_k, draft_tokenizer=tokenizer)
                    decode = partial(run, engine, prompts, params)
                    yield MethodSetting(draft, batch_size, decode, k, draft_tree=config.draft_tree)


def rows_of(runs: Runs) -> list[dict[str, Any]]:
    """Return one row per setting."""
    plain = {setting.batch_size: own for setting, own in runs.items() if setting.name == PLAIN}
    rows = []
    for setting, own in runs.items():
        decoding, baseline = own[0].decoding, plain[setting.batch_size]
        assert decoding is not None
        speeds, base = ([m.tokens_per_second for m in each] for each in (own, baseline))
        rows.append(
            {
                "drafter": setting.name,
                "batch_size": setting.batch_size,
                "num_draft_tokens": setting.num_draft_tokens,
                "draft_tree": setting.draft_tree,
                "tokens_per_step": decoding.mean_acceptance_length,
                "draft_tokens_per_step": decoding.num_draft_tokens / max(1, decoding.num_drafts),
                "accepted_per_position": decoding.accepted_per_position,
                "num_drafts": decoding.num_drafts,
                "tokens_per_second": median(speeds),
                "speedup_over_plain": median_ratio(speeds, base),
                "draft_seconds": median(m.stage_seconds.get("draft", 0.0) for m in own),
                "draft_ms_per_step": median(1e3 * m.stage_seconds.get("draft", 0.0) / m.num_steps for m in own),
                "seconds": median(m.seconds for m in own),
            }
        )
    return rows


def print_table(rows: list[dict[str, Any]], folder: Path) -> None:
    """Print one line per setting; drafters in ``folder``, the bundled pair's, have short names."""
    per_step = ("tokens/step", "drafted/step")
    header = ("drafter", "batch", "K", "tree", *per_step, "tokens/s", "x plain", "drafting", "ms/step")
    lines = [
        (
            row["drafter"].removeprefix("eagle3:").removeprefix(f"{folder}/"),
            row["batch_size"],
            row["num_draft_tokens"],
            tree_name(row["draft_tree"]),
            f"{row['tokens_per_step']:.2f}",
            f"{row['draft_tokens_per_step']:.1f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup_over_plain']:.2f}",
            f"{row['draft_seconds'] / row['seconds']:.0%}",
            f"{row['draft_ms_per_step']:.2f}",
        )
        for row in rows
    ]
    print(format_table(header, lines))


def tree_name(tree: DraftTree | None) -> str:
    """Return a short name for the table; ``-`` is the drafter's own tree, or none."""
    return "-" if tree is None else f"{len(tree)} paths" if isinstance(tree, tuple) else str(tree)


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    folder = demo_pair()
    parser = argparse.ArgumentParser(prog="python -m bench.drafters", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", default=str(folder / "target"), help="name or folder (default: the bundled one)")
    bundled = [str(folder / "draft"), f"eagle3:{folder / 'eagle3'}", "ngram"]
    parser.add_argument("--drafts", nargs="+", default=bundled, help="as --draft of specdec-fast")
    add_drafter_options(parser, several_trees=True)
    parser.add_argument("--prompts", type=Path, default=folder / "prompts.jsonl", metavar="FILE.jsonl")
    parser.add_argument("--num-prompts", type=int, default=0, metavar="N", help="the first N; 0 (default) is all")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--batch-sizes", type=report.integers, default=[1, 8])
    parser.add_argument(
        "--num-draft-tokens", type=report.draft_tokens, default=[5], metavar="K", help="such as 3,5,auto"
    )
    parser.add_argument("--dtype", choices=list(report.DTYPES), default="float32", help="default: %(default)s")
    parser.add_argument("--device", help="cpu, cuda, ... (default: CUDA if there is a device)")
    parser.add_argument("--enforce-eager", action="store_true", help="PyTorch runs all forwards, also the drafters'")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats (default: 3)")
    parser.add_argument("--threads", type=int, help="threads of torch and of the C++ ops (default: torch's own choice)")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, end in one JSON line."""
    args = options().parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = rows_of(measure(list(settings_of(args)), args.repeats))
    print_table(rows, demo_pair())
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    names = ("dtype", "temperature", "max_new_tokens", "tap_layers", "enforce_eager")
    described = {name: getattr(args, name) for name in names}
    report.write_json({"machine": report.machine(device), **described, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
