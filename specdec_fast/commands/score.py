"""Score the texts of a JSON-lines file: the log-probability of every token, without decoding."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from specdec_fast.commands.common import (
    add_backend_options,
    add_batch_options,
    add_deterministic_option,
    add_device_map,
    add_quantization_options,
    add_target_options,
    add_tp_size,
    backend_settings,
)
from specdec_fast.commands.line_results import write_results
from specdec_fast.commands.prompt_files import read_prompts
from specdec_fast.commands.request_options import add_chat_options, chat_options
from specdec_fast.commands.result_files import add_result_options, reserved_output
from specdec_fast.config import EngineConfig
from specdec_fast.engine.output import score_of
from specdec_fast.results import GenerationOutput
from specdec_fast.sampling_params import scoring_params


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_target_options(parser)
    parser.add_argument("--prompts", required=True, type=Path, metavar="FILE.jsonl", help="one JSON object per line")
    add_result_options(parser)
    parser.add_argument(
        "--top-logprobs",
        type=int,
        default=0,
        metavar="K",
        help="also write the K most likely tokens at every place (default: 0)",
    )
    add_chat_options(parser)
    add_batch_options(parser)
    parser.add_argument(
        "--max-prefill-tokens", type=int, default=None, metavar="N", help="tokens per step, at most (default: all)"
    )
    add_deterministic_option(parser)
    add_tp_size(parser)
    add_device_map(parser)
    add_backend_options(parser)
    add_quantization_options(parser, has_draft=False)


def run(args: argparse.Namespace) -> int:
    """Score every valid line; report every invalid line by its number. Exit status 1 if there is an invalid line."""
    lines = read_prompts(args.prompts)
    options = chat_options(args)
    config = EngineConfig(
        method=args.method,
        max_batch_size=args.batch_size,
        max_prefill_tokens=args.max_prefill_tokens,
        dtype=args.dtype,
        tp_size=args.tp_size,
        device_map=args.device_map,
        deterministic=not args.no_deterministic,
        quantization=args.quantization,
        **backend_settings(args),
    )
    params = scoring_params(args.top_logprobs)  # refuses wrong values before the model is loaded
    with reserved_output(args, args.prompts):
        return write_results(args, lines, None, config, params, options, _record)


def _record(output: GenerationOutput) -> dict[str, Any]:
    score = score_of(output)
    record: dict[str, Any] = {"token_ids": score.token_ids, "logprobs": score.logprobs, "ranks": score.ranks}
    return record if score.top_logprobs is None else record | {"top_logprobs": score.top_logprobs}
