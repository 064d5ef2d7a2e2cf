"""JSON values in the texts of models."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, NoReturn

_SPACE = re.compile(r"\s*")


class JsonText(NamedTuple):
    """A JSON value in a text."""

    text: str  # JSON
    kind: str  # its type in a schema: "integer" if it has neither a fraction nor an exponent
    stop: int  # where it ends


def after_space(text: str, place: int) -> int:
    """Return where whitespace at a place ends."""
    found = _SPACE.match(text, place)
    return place if found is None else found.end()


def quoted(text: str) -> str:
    """Return a text as JSON."""
    return json.dumps(text, ensure_ascii=False)


def json_at(text: str, place: int) -> JsonText | None:
    """Return the JSON value at a place, after whitespace; None if none is complete there.

    Numbers keep their digits. Line ends in strings, which models write, become escapes.
    """
    start = after_space(text, place)
    try:
        try:
            value, stop = _STRICT.raw_decode(text, start)
            found = text[start:stop]
        except ValueError:
            value, stop = _LENIENT.raw_decode(text, start)
            found = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return JsonText(found, kind_of(value), stop)


def kind_of(value: Any) -> str:
    """Return the type of a value in a schema."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


# The first returns no numbers, only their types: their digits stay as they are, however many.
_STRICT = json.JSONDecoder(parse_int=lambda digits: 0, parse_float=lambda digits: 0.5, parse_constant=_no_number)
_LENIENT = json.JSONDecoder(strict=False, parse_constant=_no_number)
