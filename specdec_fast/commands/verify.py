"""Report whether every token equals plain decoding, on your own models."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec_fast.commands.common import (
    add_backend_options,
    add_pair_options,
    draft_of,
    format_table,
    read_prompts,
)
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import NAMED_DRAFTERS
from specdec_fast.engine import Engine
from specdec_fast.equivalence import Comparison, compare, transformers_greedy, transformers_greedy_batch
from specdec_fast.errors import ConfigError
from specdec_fast.loading import load_model
from specdec_fast.params import SamplingParams
from specdec_fast.requests import RequestBuilder
from specdec_fast.schedulers import SCHEDULERS
from specdec_fast.sequence import Sequence

_PLAIN = "autoregressive"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_pair_options(parser)
    methods = [_PLAIN, *SCHEDULERS]
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods, help="default: all")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4, 8], metavar="N", help="default: 1 4 8")
    parser.add_argument("--num-draft-tokens", nargs="+", type=int, default=[5], metavar="K", help="default: 5")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (default: 128)")
    parser.add_argument("--dtype", default="float32", help="of both models (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as well")
    add_backend_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report. Exit status 1 if an output of the engine differs from ``transformers`` at batch 1."""
    config = EngineConfig(dtype=args.dtype, device=args.device, backend=args.backend)
    plain = Engine(args.target, None, config)
    target = plain.target.model
    requests = _requests(args, RequestBuilder(plain.target, plain.tokenizer))
    prompts = [request.token_ids for request in requests]
    limits = [request.num_remaining for request in requests]  # max_new_tokens, or what the positions leave
    expected = [transformers_greedy(target, prompt, n) for prompt, n in zip(prompts, limits, strict=True)]
    draft = _load_draft(args, plain.target.layout.device)
    comparisons = [
        compare(setting, target, prompts, _decode(args, plain, draft, setting, prompts), expected)
        for setting in _settings(args.methods, args.batch_sizes, args.num_draft_tokens)
    ]
    noise = [_noise_floor(target, batch_size, prompts, limits, expected) for batch_size in args.batch_sizes]
    _print_report(args, comparisons, noise, len(prompts))
    if args.json:
        args.json.write_text(json.dumps(_as_json(args, comparisons, noise, len(prompts)), indent=1) + "\n")
    return 0 if all(c.exact_match == 1 for c in comparisons) else 1


def _requests(args: argparse.Namespace, builder: RequestBuilder) -> list[Sequence]:
    """Check and encode every line; here a bad one ends the command, because a report on the rest would mislead."""
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    requests = []
    for line in read_prompts(args.prompts):
        request = builder.build(line.number, line.prompt, params)
        problem = line.problem or request.error
        if problem is not None:
            raise ConfigError(f"{args.prompts.name}, line {line.number}: {problem}")
        requests.append(request)
    return requests


def _settings(methods: list[str], batch_sizes: list[int], ks: list[int]) -> list[tuple[str, int, int | None]]:
    return [
        (method, batch_size, k)
        for method in methods
        for batch_size in batch_sizes
        for k in ([None] if method == _PLAIN else ks)
    ]


def _load_draft(args: argparse.Namespace, device: torch.device) -> PreTrainedModel | str | None:
    """Load a draft model once for all settings; a named drafter stays a name."""
    name = draft_of(args.draft)
    is_model = name is not None and name not in NAMED_DRAFTERS
    return load_model(name, EngineConfig(dtype=args.dtype).dtype, device) if is_model else name  # type: ignore[arg-type]


def _decode(
    args: argparse.Namespace,
    loaded: Engine,
    draft: PreTrainedModel | str | None,
    setting: tuple[str, int, int | None],
    prompts: list[list[int]],
) -> list[list[int]]:
    """Decode all prompts in one setting, with the target and tokenizer that ``loaded`` holds already."""
    method, batch_size, k = setting
    plain = method == _PLAIN
    config = EngineConfig(
        method="eqspec" if plain else method,
        max_batch_size=batch_size,
        num_draft_tokens=k or 0,
        dtype=args.dtype,
        backend=args.backend,
    )
    engine = Engine(loaded.target.model, None if plain else draft, config, tokenizer=loaded.tokenizer)
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=args.max_new_tokens))
    return [output.raise_for_error().token_ids for output in outputs]


def _noise_floor(
    target: PreTrainedModel, batch_size: int, prompts: list[list[int]], limits: list[int], expected: list[list[int]]
) -> Comparison:
    """Compare plain *batched* decoding in transformers with its own batch 1."""
    outputs: list[list[int]] = []
    reachable: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        chunk = slice(start, start + batch_size)
        # generate() has one limit per batch: texts are compared up to the one that all of its prompts can reach
        limit = min(limits[chunk])
        outputs += transformers_greedy_batch(target, prompts[chunk], limit)
        reachable += [tokens[:limit] for tokens in expected[chunk]]
    return compare(("transformers", batch_size, None), target, prompts, outputs, reachable)


def _print_report(
    args: argparse.Namespace, comparisons: list[Comparison], noise: list[Comparison], num_prompts: int
) -> None:
    print(f"{num_prompts} prompts, {args.max_new_tokens} new tokens at most, {args.dtype}; ", end="")
    print("reference: transformers generate(), batch 1\n")
    rows = []
    for c in [*comparisons, *noise]:
        first = min(c.divergences, key=lambda d: d.position, default=None)
        where = f"prompt {first.index}, token {first.position}, gap {first.gap:.1e}" if first else "-"
        k = "-" if c.num_draft_tokens is None else c.num_draft_tokens
        rows.append((c.method, c.batch_size, k, f"{c.exact_match:.1%}", where))
    print(format_table(("method", "batch", "K", "exact match", "earliest divergence"), rows))
    print("\n'autoregressive' is the engine without a draft.", end="")
    print(" 'transformers' is the noise floor: plain batched generate(), no speculation, against its own batch 1.")


def _as_json(
    args: argparse.Namespace, comparisons: list[Comparison], noise: list[Comparison], num_prompts: int
) -> dict[str, Any]:
    return {
        "target": args.target,
        "draft": args.draft,
        "dtype": args.dtype,
        "prompts": num_prompts,
        "max_new_tokens": args.max_new_tokens,
        "comparisons": [comparison.as_dict() for comparison in comparisons],
        "noise_floor": [comparison.as_dict() for comparison in noise],
    }
