"""Answer a batch file of OpenAI's API: chat completions and completions, one request per line."""

from __future__ import annotations

import argparse
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from specdec_fast.commands.common import (
    add_engine_options,
    add_pair_options,
    draft_tokenizer,
    engine_config,
    report_choice,
)
from specdec_fast.commands.prompt_files import BadLineError, parse_json, read_lines
from specdec_fast.commands.request_options import (
    add_chat_options,
    add_generation_config_option,
    chat_options,
    default_params,
)
from specdec_fast.commands.result_files import ResultFile, add_result_options, report_interrupt, reserved_output
from specdec_fast.commands.structured_options import add_answer_format_options
from specdec_fast.config import EngineConfig
from specdec_fast.engine.engine import Engine
from specdec_fast.engine.output import Progress
from specdec_fast.errors import SpecDecError
from specdec_fast.results import GenerationOutput
from specdec_fast.sampling_params import CHAT_ANSWER_TOKENS, OPENAI_DEFAULTS, SamplingParams
from specdec_fast.server.answer_format import AnswerFormat
from specdec_fast.server.answers import Answer, ChatAnswer, CompletionAnswer
from specdec_fast.server.problems import Problem, problem_of, unknown_model, validation_problem
from specdec_fast.server.protocol import ChatBody, CompletionBody, RequestBody

_OK = 200
_ID_PREFIX = "batch_req_"  # of a result


class _Endpoint(NamedTuple):
    body: type[RequestBody]
    answer: type[Answer]


_URLS = {
    "/v1/chat/completions": _Endpoint(ChatBody, ChatAnswer),
    "/v1/completions": _Endpoint(CompletionBody, CompletionAnswer),
}


@dataclass
class BatchLine:
    """One line of a batch file."""

    number: int  # of the line, from 1
    custom_id: str | None = None  # None if the line has none
    endpoint: _Endpoint | None = None  # what its URL says
    body: RequestBody | None = None  # of the request, checked; None if there is a problem
    problem: Problem | None = None  # why the request is not answered
    code: str | None = None  # of a line that is no request at all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_pair_options(parser)
    parser.add_argument("--input", required=True, type=Path, metavar="FILE.jsonl", help="one request per line")
    add_result_options(parser)
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names that requests may give for the model (default: --target)",
    )
    add_chat_options(parser)
    add_answer_format_options(parser)
    add_generation_config_option(parser)
    add_engine_options(parser)
    parser.set_defaults(max_new_tokens=CHAT_ANSWER_TOKENS)


def run(args: argparse.Namespace) -> int:
    """Answer every request; report every line that has no answer. Exit status 1 if there is one."""
    lines = read_batch(args.input, args.served_model_name or [args.target])
    options = chat_options(args)
    config = engine_config(args, args.dtype).for_service()
    SamplingParams(max_new_tokens=args.max_new_tokens)
    with reserved_output(args, args.input):
        return _answer(args, lines, options, config)


def _answer(args: argparse.Namespace, lines: list[BatchLine], options: dict[str, Any], config: EngineConfig) -> int:
    numbers = {line.custom_id: line.number for line in reversed(lines) if line.custom_id is not None}
    beginning = f'{{"id": "{_ID_PREFIX}'.encode()
    results = ResultFile(args.output, args.resume, lambda record: _number_of(record, numbers), beginning)
    rest = [line for line in lines if line.number not in results.done]
    good = [line for line in rest if line.problem is None]
    engine = Engine(args.target, args.draft, config, draft_tokenizer=draft_tokenizer(args)) if good else None
    if engine is not None:
        report_choice(engine)
    answer_format = _answer_format(args, engine, options.get("chat_template"))
    defaults = default_params(args, engine) if engine else OPENAI_DEFAULTS
    num_failed = 0
    try:
        with results, Progress(len(good), None) as bar:
            for line, outputs in _served(engine, rest, defaults, options, answer_format):
                record, failure = _record(line, outputs, engine.tokenizer if engine else None, answer_format)
                if failure is not None:
                    num_failed += 1
                    print(f"{args.input.name}, line {line.number}: {failure}", file=sys.stderr)
                results.add(line.number, record)
                if outputs:
                    bar.update(sum(len(output.token_ids) for output in outputs), True)
    except KeyboardInterrupt:
        return report_interrupt("batch", args.output, len(results.done), len(lines))
    return 1 if num_failed else 0


def _answer_format(args: argparse.Namespace, engine: Engine | None, chat_template: str | None) -> AnswerFormat:
    names = {"tool_call_parser": args.tool_call_parser, "reasoning_parser": args.reasoning_parser}
    if engine is None:
        return AnswerFormat(None, (), **names)
    return AnswerFormat(engine.tokenizer, engine.target.eos_token_ids, **names, chat_template=chat_template)


def read_batch(path: Path, model_names: list[str]) -> list[BatchLine]:
    """Read and check a batch file, whose requests may give one of ``model_names``. Raises ConfigError if empty."""
    lines = []
    seen = set()
    for number, text in enumerate(read_lines(path), start=1):
        line = _parse_line(number, text, model_names)
        if line.custom_id in seen:
            message = f"custom_id {line.custom_id!r} is that of an earlier line"
            line = BatchLine(number, line.custom_id, problem=Problem(400, message), code="duplicate_custom_id")
        if line.custom_id is not None:
            seen.add(line.custom_id)
        lines.append(line)
    return lines


def _parse_line(number: int, text: bytes, model_names: list[str]) -> BatchLine:
    try:
        record = parse_json(text)
    except BadLineError as error:
        return BatchLine(number, problem=Problem(400, str(error)), code="invalid_json_line")
    fields = record if isinstance(record, dict) else {}
    custom_id = fields.get("custom_id")
    url = fields.get("url")
    body = fields.get("body")
    line = BatchLine(number, custom_id if isinstance(custom_id, str) and custom_id else None)
    wrong = [
        message
        for is_right, message in (
            (isinstance(record, dict), "expected an object"),
            (line.custom_id is not None, f"custom_id is {custom_id!r:.80}; expected a string"),
            (fields.get("method") == "POST", f"method is {fields.get('method')!r:.80}; expected 'POST'"),
            (isinstance(url, str) and url in _URLS, f"url is {url!r:.80}; expected one of {', '.join(_URLS)}"),
            (isinstance(body, dict), f"body is a {type(body).__name__}; expected an object"),
        )
        if not is_right
    ]
    if wrong:
        line.problem = Problem(400, f"{wrong[0]}.")
        line.code = "invalid_request"
        return line
    line.endpoint = _URLS[fields["url"]]
    try:
        line.body = line.endpoint.body.model_validate(body)
    except ValidationError as error:
        line.problem = validation_problem(error.errors())
        return line
    if line.body.model is None:
        line.body.model = model_names[0]
    if line.body.model not in model_names:
        line.problem = unknown_model(line.body.model, model_names)
    elif line.body.stream:
        line.problem = Problem(400, "stream: a batch has whole answers only; leave it out.", param="stream")
    return line


def _served(
    engine: Engine | None,
    lines: list[BatchLine],
    defaults: SamplingParams,
    options: dict[str, Any],
    answer_format: AnswerFormat,
) -> Iterator[tuple[BatchLine, list[GenerationOutput]]]:
    """Yield every line as soon as it can be answered: without outputs if it has a problem, else with one per choice."""
    choices: list[tuple[list[int], SamplingParams]] = []
    owners: list[BatchLine] = []
    missing: dict[int, int] = {}  # by number of the line
    for line in lines:
        of_line = _choices(engine, line, defaults, options, answer_format)
        if line.problem is not None:
            yield line, []
        choices += of_line
        owners += [line] * len(of_line)
        missing[line.number] = len(of_line)
    outputs: dict[int, list[GenerationOutput]] = defaultdict(list)
    prompts = [prompt for prompt, _ in choices]
    params = [each for _, each in choices]
    for output in engine.as_completed(prompts, params) if engine else ():
        line = owners[output.index]
        outputs[line.number].append(output)
        missing[line.number] -= 1
        if not missing[line.number]:
            yield line, sorted(outputs.pop(line.number), key=attrgetter("index"))


def _choices(
    engine: Engine | None,
    line: BatchLine,
    defaults: SamplingParams,
    options: dict[str, Any],
    answer_format: AnswerFormat,
) -> list[tuple[list[int], SamplingParams]]:
    if engine is None or line.body is None or line.problem is not None:
        return []
    requested = line.body.prompt_options()
    variables = {**options.get("chat_template_kwargs", {}), **requested.get("chat_template_kwargs", {})}
    try:
        merged = {**options, **requested, "chat_template_kwargs": variables}
        ids = [engine.encode(prompt, **merged) for prompt in line.body.prompts]
        requests = line.body.constrained(line.body.requests(defaults), answer_format)
        num_each = line.body.n or 1
        return [(ids[i // num_each], choice) for i, (_, choice) in enumerate(requests)]
    except SpecDecError as error:
        line.problem = problem_of(error)
        return []


def _record(
    line: BatchLine, outputs: list[GenerationOutput], tokenizer: Any | None, answer_format: AnswerFormat
) -> tuple[dict[str, Any], str | None]:
    record = {"id": f"{_ID_PREFIX}{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": None, "error": None}
    failure = None if line.problem is None else line.problem.message
    if line.code is not None and line.problem is not None:
        error = {"code": line.code, "message": line.problem.message, "param": None, "line": line.number}
        return record | {"error": error}, failure
    request_id = uuid.uuid4().hex
    status = _OK
    body = {}
    if line.problem is None and line.endpoint is not None and line.body is not None:
        try:
            answer = line.endpoint.answer(line.body, request_id, line.body.model or "", tokenizer)
            answer.read_as(answer_format)
            body = answer.whole(outputs)
        except SpecDecError as error:
            failure = str(error)
            line.problem = problem_of(error)
    if line.problem is not None:
        status = line.problem.status
        body = line.problem.body()
    return record | {"response": {"status_code": status, "request_id": request_id, "body": body}}, failure


def _number_of(record: Any, numbers: dict[str, int]) -> int | None:
    """Return the line of an answered request; None if it is to be tried again."""
    if not isinstance(record, dict) or not {"custom_id", "response", "error"} <= record.keys():
        raise BadLineError("not a result of a batch")
    custom_id = record["custom_id"]
    response = record["response"]
    if custom_id is None:  # of a line that is no request
        return None
    if not isinstance(custom_id, str) or custom_id not in numbers:
        raise BadLineError(f"no line of the input has the custom_id {custom_id!r:.80}")
    is_answered = isinstance(response, dict) and response.get("status_code") == _OK
    return numbers[custom_id] if is_answered else None
