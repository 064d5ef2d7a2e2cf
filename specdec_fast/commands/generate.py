"""Decode the prompts of a JSON-lines file into another one."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec_fast.commands.common import (
    add_engine_options,
    add_pair_options,
    engine_config,
    expect_writable,
    read_prompts,
)
from specdec_fast.engine.engine import Engine
from specdec_fast.results import GenerationOutput
from specdec_fast.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_pair_options(parser)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE.jsonl", help="one result per input line")
    parser.add_argument("--dtype", default=None, help="of the weights (default: the checkpoint's)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="STRING", help="end a text before this string; repeatable"
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K most likely tokens (0: all)")
    sampling.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens with this mass"
    )
    sampling.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="drop tokens below this share of the likeliest one"
    )
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="default: 1, none")
    sampling.add_argument(
        "--seed",
        type=int,
        default=None,
        metavar="N",
        help="line i (from 1) samples with seed N + i (default: a random seed)",
    )
    parser.add_argument("--logprobs", action="store_true", help="write the log-probability of every token")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Decode every valid line; report every invalid line by its number. Exit status 1 if there is an invalid line."""
    lines = read_prompts(args.prompts)
    config = engine_config(args, args.dtype)
    params = _params(args)
    expect_writable(args.output)
    good = [line for line in lines if line.problem is None]
    each = [params if params.seed is None else replace(params, seed=params.seed + line.number) for line in good]
    outputs = iter(Engine(args.target, args.draft, config).generate([g.prompt for g in good], each))
    num_bad = 0
    with args.output.open("w", encoding="utf-8") as sink:
        for line in lines:
            record = {"error": line.problem} if line.problem else _record(next(outputs))
            if "error" in record:
                num_bad += 1
                print(f"{args.prompts.name}, line {line.number}: {record['error']}", file=sys.stderr)
            sink.write(json.dumps({"line": line.number, **record}, ensure_ascii=False) + "\n")
    return 1 if num_bad else 0


def _params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=args.stop,
        logprobs=args.logprobs,
    )


def _record(output: GenerationOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "mean_acceptance_length": round(output.stats.mean_acceptance_length, 3),
    }
    if output.seed is not None:
        record["seed"] = output.seed
    if output.logprobs is not None:
        record["logprobs"] = output.logprobs
    if output.error is not None:
        record["error"] = str(output.error)
    return record
