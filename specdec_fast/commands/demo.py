"""Decode bundled prompts with the bundled pair, and prove every token against plain decoding."""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import perf_counter
from typing import Any

from specdec_fast.assets import demo_pair
from specdec_fast.commands.common import add_engine_options, engine_config, format_table
from specdec_fast.engine.engine import Engine
from specdec_fast.equivalence.compare import transformers_greedy
from specdec_fast.errors import ConfigError
from specdec_fast.results import GenerationOutput
from specdec_fast.sampling_params import SamplingParams

_REPEATS = 3
_WARM_UP_TOKENS = 8  # the first calls of a process set up thread pools and kernels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_engine_options(parser)
    parser.add_argument("--num-prompts", type=int, default=16, metavar="N", help="of the 32 bundled (default: 16)")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line of stdout")


def run(args: argparse.Namespace) -> int:
    """Show texts, table and verdict. Exit status 1 if a token differs."""
    lines = (demo_pair() / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    if not 1 <= args.num_prompts <= len(lines):
        raise ConfigError(f"--num-prompts {args.num_prompts}: expected 1 to {len(lines)}.")
    prompts = [json.loads(line)["prompt"] for line in lines[: args.num_prompts]]
    config = engine_config(args, "float32")
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    engine = Engine(str(demo_pair() / "target"), str(demo_pair() / "draft"), config)
    plain = Engine(engine.target.model, None, config, tokenizer=engine.tokenizer)

    for warm in (engine, plain):
        (warmed, *_) = warm.generate(prompts[:2], SamplingParams(max_new_tokens=_WARM_UP_TOKENS), progress=False)
    transformers_greedy(engine.target.model, warmed.prompt_ids, _WARM_UP_TOKENS)
    seconds: dict[str, list[float]] = {"ours": [], "plain": [], "transformers": []}
    for _ in range(_REPEATS):  # interleaved, so that other load on the machine affects all three
        outputs = engine.generate(prompts, params, progress=False)
        seconds["ours"].append(engine.last_run.seconds)
        plain.generate(prompts, params, progress=False)
        seconds["plain"].append(plain.last_run.seconds)
        started = perf_counter()
        expected = [transformers_greedy(engine.target.model, o.prompt_ids, params.max_new_tokens) for o in outputs]
        seconds["transformers"].append(perf_counter() - started)

    _print_texts(prompts, outputs)
    equal = sum(o.token_ids == e for o, e in zip(outputs, expected, strict=True))
    report = _report(args, engine, outputs, equal, {name: median(values) for name, values in seconds.items()})
    _print_table(args, report)
    print(f"\nequal to plain decoding (transformers, batch 1), every token: {equal} of {len(prompts)} prompts")
    if args.json:
        print(json.dumps(report))
    return 0 if equal == len(prompts) else 1


def _report(
    args: argparse.Namespace, engine: Engine, outputs: list[GenerationOutput], equal: int, seconds: dict[str, float]
) -> dict[str, Any]:
    num_tokens = sum(len(output.token_ids) for output in outputs)
    run_stats = engine.last_run
    return {
        "method": args.method,
        "batch_size": args.batch_size,
        "num_draft_tokens": args.num_draft_tokens,
        "prompts": len(outputs),
        "tokens": num_tokens,
        "tokens_per_second": round(num_tokens / seconds["ours"], 1),
        "plain_tokens_per_second": round(num_tokens / seconds["plain"], 1),
        "autoregressive_tokens_per_second": round(num_tokens / seconds["transformers"], 1),
        "mean_acceptance_length": round(run_stats.decoding.mean_acceptance_length, 3),
        "stage_shares": {stage: round(share, 3) for stage, share in run_stats.timer.shares().items()},
        "exact_match": equal / len(outputs),
    }


def _print_texts(prompts: list[str], outputs: list[GenerationOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        head = prompt if len(prompt) <= 100 else f"{prompt[:60]} [...] {prompt[-35:]}"
        stats = output.stats
        print(
            f"[{output.index}] {len(output.prompt_ids)} prompt tokens, {len(output.token_ids)} new in "
            f"{stats.num_steps} steps, {output.finish_reason}"
        )
        print(f"    {head!r}\n -> {output.text!r}\n")


def _print_table(args: argparse.Namespace, report: dict[str, Any]) -> None:
    base = report["autoregressive_tokens_per_second"]
    speeds = (
        ("transformers generate(), batch 1", base),
        (f"plain decoding in the engine, batch {args.batch_size}", report["plain_tokens_per_second"]),
        (f"{args.method}, batch {args.batch_size}, K {args.num_draft_tokens}", report["tokens_per_second"]),
    )
    rows = [(name, f"{speed:.0f}", f"{speed / base:.2f}x") for name, speed in speeds]
    print(format_table((f"fp32, median of {_REPEATS} interleaved runs", "tokens/s", "speed-up"), rows))
    print(f"\nacceptance length {report['mean_acceptance_length']:.2f}; share of time per stage: ", end="")
    print(", ".join(f"{stage} {share:.0%}" for stage, share in report["stage_shares"].items()))
