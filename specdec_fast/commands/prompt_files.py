"""Prompt files: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from specdec_fast.errors import ConfigError
from specdec_fast.sampling_params import SamplingParams

_REQUEST_FIELDS = {parameter.name for parameter in fields(SamplingParams)}
_KINDS = ("prompt", "prompt_ids", "messages")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class PromptLine:
    """One line of a prompt file: a prompt, or the reason why it has none."""

    number: int  # of the line, from 1
    prompt: Any  # as Engine.generate expects one
    problem: str | None = None  # what is wrong with the line
    copied: dict[str, Any] = field(default_factory=dict)  # fields that its result has too: id, if the line has one


class BadLineError(ValueError):
    """A line is not what its file should have."""


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a file, without the blank ones at its end; raises ConfigError if it has none."""
    lines = path.read_bytes().removeprefix(_BYTE_ORDER_MARK).rstrip().split(b"\n")
    if lines == [b""]:
        raise ConfigError(f"{path.name} has no lines; expected one JSON object per line.")
    return lines


def parse_json(line: bytes) -> Any:
    """Return the value of one line; raises BadLineError if the line is not UTF-8 text, or not JSON."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLineError(f"not UTF-8 text ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise BadLineError(f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, or too many brackets
        raise BadLineError(f"not JSON that can be read ({error})") from None


def read_prompts(path: Path) -> list[PromptLine]:
    """Read ``{"prompt": TEXT}``, ``{"prompt_ids": [IDS]}`` or ``{"messages": [MESSAGES]}`` per line.

    A line without any must be one of Spec-Bench's question file, ``{"turns": [TEXT, ...]}``: its first turn is the
    prompt, without a chat template. Other fields are ignored, except ``id``, which is copied, and those of
    SamplingParams, which are errors: without them the output would be that of another request. Blank lines at the end
    do not count. Raises ConfigError if the file is empty.
    """
    return [_parse_line(number, line) for number, line in enumerate(read_lines(path), start=1)]


def _parse_line(number: int, line: bytes) -> PromptLine:
    copied: dict[str, Any] = {}
    try:
        record = parse_json(line)
        copied = {"id": record["id"]} if isinstance(record, dict) and "id" in record else {}
        return PromptLine(number, _prompt_of(record), None, copied)
    except BadLineError as error:
        return PromptLine(number, None, str(error), copied)


def _prompt_of(record: Any) -> Any:
    names = set(record) if isinstance(record, dict) else set()
    if misplaced := names & _REQUEST_FIELDS:
        raise BadLineError(f"{', '.join(sorted(misplaced))} cannot be set per line; use the options")
    known = [name for name in _KINDS if name in names] or ["turns"]
    if len(known) != 1 or known[0] not in names:
        raise BadLineError('expected an object with either "prompt", "prompt_ids" or "messages", or with "turns"')
    return _PARSERS[known[0]](record[known[0]])


def _parse_prompt(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise BadLineError(f'"prompt" is a {type(value).__name__}; expected a string')


def _parse_prompt_ids(value: Any) -> list[int]:
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise BadLineError('"prompt_ids" is not a list of integers')


def _parse_messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return value
    raise BadLineError('"messages" is not a list of objects')


def _parse_turns(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], str):
        return value[0]
    raise BadLineError('"turns" is not a list that begins with a string')


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "prompt": _parse_prompt,
    "prompt_ids": _parse_prompt_ids,
    "messages": _parse_messages,
    "turns": _parse_turns,
}
