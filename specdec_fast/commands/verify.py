"""Report whether every token equals plain decoding, on your own models."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from specdec_fast.commands.common import (
    add_backend_options,
    add_drafter_options,
    add_quantization_options,
    backend_settings,
    draft_tokenizer,
    drafter_names,
    drawing,
    expect_writable,
    format_table,
    num_draft_tokens,
    quantization_settings,
)
from specdec_fast.commands.prompt_files import read_prompts
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import NO_DRAFT
from specdec_fast.engine.input import RequestBuilder
from specdec_fast.equivalence.compare import Comparison
from specdec_fast.equivalence.report import GREEDY, PLAIN, Matrix, Report
from specdec_fast.equivalence.report import run as run_matrix
from specdec_fast.errors import ConfigError
from specdec_fast.models.loading import load_model
from specdec_fast.ops import resolve
from specdec_fast.request.detokenizer import load_tokenizer
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.sampling_params import SamplingParams
from specdec_fast.schedulers import SCHEDULERS
from specdec_fast.speculation_length import LENGTH_POLICIES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--target", required=True, help="name or folder of a Hugging Face causal model")
    parser.add_argument("--draft", required=True, nargs="+", help=f"the same for drafts; or {drafter_names()}")
    add_drafter_options(parser)
    parser.add_argument("--prompts", required=True, type=Path, metavar="FILE.jsonl", help="one JSON object per line")
    methods = [PLAIN, *SCHEDULERS]
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods, help="default: all")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4, 8], metavar="N", help="default: 1 4 8")
    parser.add_argument(
        "--num-draft-tokens",
        nargs="+",
        type=num_draft_tokens,
        default=[5],
        metavar="K",
        help=f"integers, or {', '.join(LENGTH_POLICIES)} (default: 5)",
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32"], metavar="D", help="default: float32")
    parser.add_argument(
        "--sampling",
        nargs="+",
        default=[GREEDY],
        metavar="S",
        help=f"{GREEDY} (default), or parameters such as temperature=0.7,top_p=0.9",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="prompt i (from 0) samples with seed N + i")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (default: 128)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after EOS, to compare longer texts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the report (needs matplotlib)")
    add_backend_options(parser)
    add_quantization_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report. Exit status 1 if an output differs from plain decoding, or in fp32 from ``transformers``."""
    matrix = matrix_of(args)
    draw = drawing(args.plot, "draw_exactness") if args.plot else None
    for path in filter(None, (args.json, args.plot)):
        expect_writable(path)
    report = run_matrix(matrix, _prompts(args, matrix), lambda text: print(text, file=sys.stderr))
    print_report(report)
    if args.json:
        header = {name: getattr(matrix, name) for name in ("target", "drafts", "dtypes")}
        header |= {"max_new_tokens": args.max_new_tokens}
        args.json.write_text(json.dumps({**header, **report.as_dict()}, indent=1) + "\n")
    if draw:
        draw(report, args.plot)
    return 0 if report.holds else 1


def matrix_of(args: argparse.Namespace) -> Matrix:
    """Make the matrix of the command line; raises ConfigError if one of the settings is out of range."""
    lists = {"dtype": args.dtypes, "max_batch_size": args.batch_sizes, "num_draft_tokens": args.num_draft_tokens}
    for name, values in lists.items():
        for value in values:
            EngineConfig.from_keywords({name: value})
    return Matrix(
        target=args.target,
        drafts=tuple(name for name in args.draft if name != NO_DRAFT),
        config=EngineConfig(
            **backend_settings(args),
            **quantization_settings(args),
            tap_layers=args.tap_layers,
            draft_tree=args.draft_tree,
        ),
        dtypes=tuple(args.dtypes),
        samplings={text: _sampling(text, args) for text in args.sampling},
        methods=tuple(args.methods),
        batch_sizes=tuple(args.batch_sizes),
        num_draft_tokens=tuple(args.num_draft_tokens),
        draft_tokenizer=draft_tokenizer(args),
    )


def _sampling(text: str, args: argparse.Namespace) -> SamplingParams:
    values: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "seed": args.seed, "ignore_eos": args.ignore_eos}
    known = {field.name for field in fields(SamplingParams)}
    for part in [] if text == GREEDY else text.split(","):
        name, _, value = part.partition("=")
        if name not in known - {"stop", "stop_token_ids"} or not value:
            raise ConfigError(f"--sampling {text}: {part!r} is no parameter; expected {GREEDY}, or temperature=0.7,...")
        values[name] = _value(value)
    return SamplingParams(**values)


def _value(text: str) -> Any:
    """Read an integer, a number or a truth value; anything else stays text, which SamplingParams refuses."""
    for read in (int, float):
        with suppress(ValueError):
            return read(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _prompts(args: argparse.Namespace, matrix: Matrix) -> list[list[int]]:
    """Check and encode every line. An invalid line ends the command, because a report on the rest would mislead."""
    config = EngineConfig(dtype=matrix.dtypes[0], device=args.device, backend=args.backend)
    model = load_model(args.target, config.dtype, config.device)  # type: ignore[arg-type]
    target = RaggedModel(model, resolve(model.device, args.backend, model.dtype), config.page_size)
    builder = RequestBuilder(target, load_tokenizer(getattr(model.config, "_name_or_path", None)))
    prompts = []
    for line in read_prompts(args.prompts):
        request = builder.build(line.number, line.prompt, SamplingParams(max_new_tokens=args.max_new_tokens))
        problem = line.problem or request.error
        if problem is not None:
            raise ConfigError(f"{args.prompts.name}, line {line.number}: {problem}")
        prompts.append(request.token_ids)
    return prompts


def print_report(report: Report) -> None:
    """Print one line per dtype, sampling and method, with a column per batch size."""
    print(
        "\nCompared with the engine's own plain decoding, one prompt at a time. Batch n: share of outputs with every\n"
        "token identical. Partial: share of tokens before the first difference. Equal bits: share of these tokens\n"
        "whose log-probabilities have the same bits. Partial and equal bits are those of the worst batch size.\n"
    )
    print(_table(report.comparisons))
    print("\nThe engine's plain greedy decoding, compared with transformers generate() at batch 1")
    print(_table(report.against_transformers))
    print("\nNegative control: PyTorch's own forwards (--enforce-eager) with determinism off, compared with it on")
    print(_table(report.control))
    if report.noise_floor:
        print("\nNoise floor: batched generate() of transformers, without speculation, compared with its own batch 1")
        print(_table(report.noise_floor))
    if report.quality:
        print("\nThe quantised target, compared with the target as loaded, on prompts and greedy texts (KL in nats)")
        header = ("dtype", "quantization", "positions", "mean KL", "largest KL", "same likeliest token")
        rows = [
            (q.dtype, q.quantization, q.num_positions, f"{q.mean_kl:.4g}", f"{q.largest_kl:.4g}", f"{q.top1:.1%}")
            for q in report.quality
        ]
        print(format_table(header, rows))
    total = len(report.comparisons)
    exact = sum(c.exact_match == 1 for c in report.comparisons)
    print(f"\n{exact} of {total} settings give exactly the tokens of plain decoding")


def _table(comparisons: list[Comparison]) -> str:
    sizes = sorted({c.setting.batch_size for c in comparisons})
    groups: dict[tuple[Any, ...], dict[int, Comparison]] = {}
    for c in comparisons:
        s = c.setting
        k = "-" if s.num_draft_tokens is None else s.num_draft_tokens
        groups.setdefault((s.dtype, s.sampling, s.method, s.drafter, k), {})[s.batch_size] = c
    rows = []
    for key, by_size in groups.items():
        shares = [f"{by_size[size].exact_match:.1%}" if size in by_size else "" for size in sizes]
        least = [f"{min(c.partial_match for c in by_size.values()):.1%}"]
        bits = [c.equal_logprobs for c in by_size.values() if c.equal_logprobs is not None]
        least.append(f"{min(bits):.1%}" if bits else "-")
        rows.append((*key, *shares, *least, _earliest(by_size)))
    header = ("dtype", "sampling", "method", "drafter", "K", *(f"batch {size}" for size in sizes))
    return format_table((*header, "partial", "equal bits", "earliest divergence"), rows)


def _earliest(comparisons: dict[int, Comparison]) -> str:
    divergences = [d for c in comparisons.values() for d in c.divergences]
    first = min(divergences, key=lambda d: d.position, default=None)
    if first is None:
        return "-"
    best, second = first.best_logits
    return f"prompt {first.index}, token {first.position}: {best:.6g}, {second:.6g} (gap {first.gap:.1e})"
