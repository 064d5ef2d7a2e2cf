"""The promise, checked at length on the bundled pair: every setting emits the tokens of plain decoding at batch 1.

It writes the report of ``specdec-fast verify`` over 64 prompts with 256 tokens each, in one dtype; the cost of
determinism; and the acceptance of sampled speculation.
"""

from __future__ import annotations

import argparse
import json
import sys
from statistics import median
from typing import Any

import torch
from transformers.utils import logging

from bench.common import report
from bench.common.timing import median_ratio
from bench.engine_.acceptance import compare_acceptance
from specdec_fast.assets import demo_pair
from specdec_fast.commands.verify import print_report
from specdec_fast.config import EngineConfig
from specdec_fast.engine.engine import Engine
from specdec_fast.equivalence.report import GREEDY, PLAIN, Matrix, Report, run
from specdec_fast.models.loading import load_model
from specdec_fast.request.detokenizer import load_tokenizer
from specdec_fast.sampling_params import SamplingParams

TARGET, DRAFT = (str(demo_pair() / name) for name in ("target", "draft"))
BATCH_SIZE, NUM_DRAFT_TOKENS = 8, 5  # the setting in which cost and acceptance are measured
SAMPLED = "temperature=1.0"


def bundled_prompts() -> list[list[int]]:
    """Return the 32 bundled prompts of 8 to 201 tokens, and the first half of each: 64 texts of unequal lengths."""
    tokenizer = load_tokenizer(TARGET)
    assert tokenizer is not None
    lines = (demo_pair() / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    whole = [list(tokenizer(json.loads(line)["prompt"]).input_ids) for line in lines]
    halves = [prompt[: (len(prompt) + 1) // 2] for prompt in whole]
    return [prompt for pair in zip(whole, halves, strict=True) for prompt in pair]


def matrix_of(args: argparse.Namespace) -> Matrix:
    """Return every combination, in one dtype."""
    common: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "ignore_eos": True, "seed": 0}
    return Matrix(
        target=TARGET,
        drafts=(DRAFT, "ngram"),
        config=EngineConfig(),
        dtypes=(args.dtype,),
        samplings={
            GREEDY: SamplingParams(**common),
            SAMPLED: SamplingParams(**common, temperature=1.0),
            "temperature=0.7,top_p=0.9": SamplingParams(**common, temperature=0.7, top_p=0.9),
        },
        methods=(PLAIN, "eqspec", "exspec"),
        batch_sizes=tuple(args.batch_sizes),
        num_draft_tokens=tuple(args.num_draft_tokens),
        rounds=args.rounds,
    )


def cost_of_determinism(args: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """Decode with and without determinism, interleaved, greedily at batch 8 and K 5; exit if a token differs."""
    models = [load_model(name, report.DTYPES[args.dtype], torch.device("cpu")) for name in (TARGET, DRAFT)]
    params = SamplingParams(max_new_tokens=args.max_new_tokens, ignore_eos=True)
    settings: dict[str, Any] = {"max_batch_size": BATCH_SIZE, "num_draft_tokens": NUM_DRAFT_TOKENS}
    engines = {on: Engine(*models, **settings, deterministic=on) for on in (True, False)}
    tokens_per_second: dict[bool, list[float]] = {True: [], False: []}
    alone = [o.token_ids for o in Engine(models[0], None, max_batch_size=1).generate(prompts, params, progress=False)]
    for repeat in range(args.repeats + 1):
        for on, engine in engines.items():
            outputs = engine.generate(prompts, params, progress=False)
            if on and [o.token_ids for o in outputs] != alone:
                sys.exit("batch 8, K 5 gives other tokens than plain decoding at batch 1; no speed is reported.")
            if repeat:  # the first warms up
                tokens_per_second[on].append(sum(len(o.token_ids) for o in outputs) / engine.last_run.seconds)
    return {
        "dtype": args.dtype,
        "row_multiples": {"target": engines[True].describe()["row_multiple"]},
        "tokens_per_second": median(tokens_per_second[True]),
        "tokens_per_second_without": median(tokens_per_second[False]),
        "speed_with_over_without": median_ratio(tokens_per_second[True], tokens_per_second[False]),
    }


def sampled_acceptance(args: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """Decode at temperature 1 and compare the acceptance length with rejection sampling's."""
    target, draft = (load_model(name, report.DTYPES[args.dtype], torch.device("cpu")) for name in (TARGET, DRAFT))
    engine = Engine(target, draft, max_batch_size=BATCH_SIZE, num_draft_tokens=NUM_DRAFT_TOKENS)
    params = [
        SamplingParams(max_new_tokens=args.max_new_tokens, ignore_eos=True, temperature=1.0, seed=seed)
        for seed in range(len(prompts))
    ]
    texts = [output.token_ids for output in engine.generate(prompts, params, progress=False)]
    measured = engine.last_run.decoding.mean_acceptance_length
    return compare_acceptance(target, draft, prompts, texts, NUM_DRAFT_TOKENS, measured)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the whole matrix by default."""
    parser = argparse.ArgumentParser(prog="python -m bench.exactness", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", choices=list(report.DTYPES), default="bfloat16")
    parser.add_argument("--parts", type=report.names, default=["cost", "acceptance", "matrix"])
    parser.add_argument("--num-prompts", type=int, default=64, help="of the 64")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=16, help="largest number of batches of prompts per setting")
    parser.add_argument("--batch-sizes", type=report.integers, default=[1, 2, 5, 8, 16, 32])
    parser.add_argument("--num-draft-tokens", type=report.integers, default=[0, 1, 5, 8])
    report.add_report_options(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure the cost first, before anything else has run; exit with 1 if an output differs."""
    args = parse_args(argv)
    report.prepare(args)
    logging.disable_progress_bar()
    prompts = bundled_prompts()
    prompts = prompts[: args.num_prompts]
    result: dict[str, Any] = {
        "machine": report.machine(torch.device("cpu")),
        "prompts": len(prompts),
        "rounds": args.rounds,
        "max_new_tokens": args.max_new_tokens,
    }
    if "cost" in args.parts:
        result["determinism"] = cost_of_determinism(args, prompts)
        print(f"determinism: {result['determinism']['speed_with_over_without']:.3f} of the speed without it")
    if "acceptance" in args.parts:
        result["acceptance"] = found = sampled_acceptance(args, prompts)
        print(
            f"tokens per step at temperature 1, K {NUM_DRAFT_TOKENS}: {found['keyed_noise_tokens_per_step']:.3f}; by "
            f"rejection sampling {found['rejection_tokens_per_step']:.3f} (ratio {found['ratio']:.3f})"
        )
    found_all = Report()
    if "matrix" in args.parts:
        found_all = run(matrix_of(args), prompts, lambda text: print(text, file=sys.stderr, flush=True))
        print_report(found_all)
        result |= found_all.as_dict()
        if args.plot:
            from specdec_fast.commands.plots import draw_exactness

            draw_exactness(found_all, args.plot)
    report.write_json(result, args.json)
    sys.exit(0 if found_all.holds else 1)


if __name__ == "__main__":
    main()
