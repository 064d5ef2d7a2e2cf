"""Decode the prompts of a JSON-lines file into another one."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec_fast.commands.common import add_engine_options, add_pair_options, engine_config
from specdec_fast.commands.prompt_files import BadLineError, PromptLine, read_prompts
from specdec_fast.commands.request_options import (
    add_chat_options,
    add_sampling_options,
    chat_options,
    sampling_params,
)
from specdec_fast.commands.result_files import ResultFile, add_result_options, report_interrupt, reserved_output
from specdec_fast.commands.structured_options import add_structured_options, structured_outputs
from specdec_fast.config import EngineConfig
from specdec_fast.engine.engine import Engine
from specdec_fast.engine.output import Progress
from specdec_fast.results import GenerationOutput
from specdec_fast.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_pair_options(parser)
    parser.add_argument("--prompts", required=True, type=Path, metavar="FILE.jsonl", help="one JSON object per line")
    add_result_options(parser)
    add_chat_options(parser)
    add_sampling_options(parser, "line")
    add_structured_options(parser)
    parser.add_argument("--logprobs", action="store_true", help="write the log-probability of every token")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Decode every valid line; report every invalid line by its number. Exit status 1 if there is an invalid line."""
    lines = read_prompts(args.prompts)
    options = chat_options(args)
    config = engine_config(args, args.dtype)
    # wrong values are refused before the models are loaded
    common = replace(sampling_params(args, logprobs=args.logprobs), structured_outputs=structured_outputs(args))
    with reserved_output(args, args.prompts):
        return _decode(args, lines, options, config, common)


def _decode(
    args: argparse.Namespace,
    lines: list[PromptLine],
    options: dict[str, Any],
    config: EngineConfig,
    common: SamplingParams,
) -> int:
    results = ResultFile(args.output, args.resume, lambda record: _number_of(record, lines), b'{"line": ')
    rest = [line for line in lines if line.number not in results.done]
    good = [line for line in rest if line.problem is None]
    params = [common.with_seed_offset(line.number) for line in good]
    engine = Engine(args.target, args.draft, config) if good else None
    num_bad = 0

    def write(line: PromptLine, record: dict[str, Any]) -> None:
        nonlocal num_bad
        if "error" in record:
            num_bad += 1
            print(f"{args.prompts.name}, line {line.number}: {record['error']}", file=sys.stderr)
        results.add(line.number, {"line": line.number, **line.copied, **record})

    try:
        with results, Progress(len(good), None) as bar:
            for line in rest:
                if line.problem is not None:
                    write(line, {"error": line.problem})
            for output in engine.as_completed([line.prompt for line in good], params, **options) if engine else ():
                write(good[output.index], _record(output))
                bar.update(len(output.token_ids), True)
    except KeyboardInterrupt:
        return report_interrupt("generate", args.output, len(results.done), len(lines))
    return 1 if num_bad else 0


def _number_of(record: Any, lines: list[PromptLine]) -> int | None:
    """Return the input line of a result; None if it is an error, so that the line is tried again."""
    number = record.get("line") if isinstance(record, dict) else None
    if type(number) is not int or not 1 <= number <= len(lines):
        raise BadLineError(f"not a result of one of the {len(lines)} prompts")
    copied = {name: value for name, value in record.items() if name == "id"}
    if copied != lines[number - 1].copied:
        raise BadLineError(f"the result of line {number} has the id {copied.get('id')!r:.80}, and the prompt another")
    return None if "error" in record else number


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
