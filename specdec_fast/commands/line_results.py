"""Results of a prompt file: one for every text of every line, written as soon as it is there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specdec_fast.commands.common import report_choice
from specdec_fast.commands.prompt_files import BadLineError, PromptLine
from specdec_fast.commands.result_files import ResultFile, report_interrupt
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import AUTO_DRAFT
from specdec_fast.engine.engine import Engine
from specdec_fast.engine.output import Progress
from specdec_fast.results import GenerationOutput
from specdec_fast.sampling_params import SamplingParams


def write_results(
    args: argparse.Namespace,
    lines: list[PromptLine],
    draft: str | None,
    config: EngineConfig,
    common: SamplingParams,
    options: dict[str, Any],
    record_of: Callable[[GenerationOutput], dict[str, Any]],
    draft_tokenizer: Any | None = None,
) -> int:
    """Serve every valid line, and report every invalid one by its number.

    Args:
        args: of a command with the options of ``add_result_options``, ``--prompts`` and ``--target``.
        lines: of the prompt file.
        draft: the drafter.
        config: of the engine.
        common: the parameters of all lines. Text i of line l samples with ``seed + (l - 1) * n + i + 1``, i from 0 and
            l from 1.
        options: how prompts become token ids.
        record_of: returns what is written of an output, beside its line, choice and error.
        draft_tokenizer: of a draft model; None: the one in its folder.

    Returns:
        The exit status: 0, 1 if a line could not be served, or that of an interrupt.
    """
    n = common.n
    results = ResultFile(args.output, args.resume, lambda record: _number_of(record, lines, n), b'{"line": ')
    rest = [line for line in lines if not results.done.issuperset(_numbers(line, n))]
    good = [line for line in rest if line.problem is None]
    params = [common.with_seed_offset((line.number - 1) * n + 1) for line in good]
    if draft == AUTO_DRAFT and good:
        config = replace(config, max_batch_size=min(config.max_batch_size, len(good) * n))
    engine = Engine(args.target, draft, config, draft_tokenizer=draft_tokenizer) if good else None
    if engine is not None:
        report_choice(engine)
    num_bad = 0

    def write(line: PromptLine, choice: int, record: dict[str, Any]) -> None:
        nonlocal num_bad
        if "error" in record:
            num_bad += 1
            print(f"{args.prompts.name}, line {line.number}: {record['error']}", file=sys.stderr)
        place = {"line": line.number, **line.copied} | ({"choice": choice} if n > 1 else {})
        results.add(_numbers(line, n)[choice], {**place, **record})

    try:
        with results, Progress(len(good) * n, None) as bar:
            for line in rest:
                if line.problem is not None:
                    write(line, 0, {"error": line.problem})
            for output in engine.as_completed([line.prompt for line in good], params, **options) if engine else ():
                error = {} if output.error is None else {"error": str(output.error)}
                write(good[output.index], output.choice, record_of(output) | error)
                bar.update(len(output.token_ids), True)
    except KeyboardInterrupt:
        return report_interrupt(args.command, args.output, len(results.done), len(lines) * n)
    return 1 if num_bad else 0


def _numbers(line: PromptLine, n: int) -> range:
    """Return the numbers of the results of a line, in the order of the file."""
    return range((line.number - 1) * n + 1, line.number * n + 1)


def _number_of(record: Any, lines: list[PromptLine], n: int) -> int | None:
    """Return the number of a result; None if it is an error, so that its line is served again."""
    number = record.get("line") if isinstance(record, dict) else None
    if type(number) is not int or not 1 <= number <= len(lines):
        raise BadLineError(f"not a result of one of the {len(lines)} prompts")
    copied = {name: value for name, value in record.items() if name == "id"}
    if copied != lines[number - 1].copied:
        raise BadLineError(f"the result of line {number} has the id {copied.get('id')!r:.80}, and the prompt another")
    if "error" in record:
        return None
    choice = record.get("choice", 0)
    if type(choice) is not int or not 0 <= choice < n or ("choice" in record) != (n > 1):
        raise BadLineError(f"the result of line {number} is not one of {n} per line")
    return _numbers(lines[number - 1], n)[choice]
