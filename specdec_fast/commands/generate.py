"""Decode the prompts of a JSON-lines file into another one."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec_fast.commands.common import add_engine_options, add_pair_options, draft_tokenizer, engine_config
from specdec_fast.commands.line_results import write_results
from specdec_fast.commands.prompt_files import read_prompts
from specdec_fast.commands.request_options import (
    add_chat_options,
    add_output_options,
    add_sampling_options,
    chat_options,
    output_params,
    sampling_params,
)
from specdec_fast.commands.result_files import add_result_options, reserved_output
from specdec_fast.commands.structured_options import add_structured_options, reasoning, structured_outputs
from specdec_fast.results import GenerationOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_pair_options(parser)
    parser.add_argument("--prompts", required=True, type=Path, metavar="FILE.jsonl", help="one JSON object per line")
    add_result_options(parser)
    add_chat_options(parser)
    add_sampling_options(parser, "line")
    add_output_options(parser)
    add_structured_options(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Decode every valid line; report every invalid line by its number. Exit status 1 if there is an invalid line."""
    lines = read_prompts(args.prompts)
    options = chat_options(args)
    config = engine_config(args, args.dtype)
    # wrong values are refused before the models are loaded
    sampling = sampling_params(args, **output_params(args))
    common = replace(sampling, structured_outputs=structured_outputs(args), reasoning=reasoning(args))
    tokenizer = draft_tokenizer(args)
    with reserved_output(args, args.prompts):
        return write_results(args, lines, args.draft, config, common, options, _record, tokenizer)


def _record(output: GenerationOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "mean_acceptance_length": round(output.stats.mean_acceptance_length, 3),
    }
    scores = ("seed", "logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs", "prompt_ranks")
    return record | {name: value for name in scores if (value := getattr(output, name)) is not None}
