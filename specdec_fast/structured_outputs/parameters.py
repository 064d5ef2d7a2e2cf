"""What the text of a request must follow: :class:`StructuredOutputs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from specdec_fast.errors import GrammarError
from specdec_fast.structured_outputs.schemas import check_schema

MOST_CHARACTERS = 131_072  # of a schema, an expression, a grammar, or all choices together
_DEEPEST = 64  # levels of lists and objects in a schema
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputs:
    """What the text of a request must follow. Exactly one of the fields before ``disable_any_whitespace`` is given.

    The names are those of vLLM. Every token is chosen among those with which the text can still be completed, and EOS
    and ``stop_token_ids`` only where it is complete. So a text that ends with the reason ``"stop"`` follows what was
    asked for, unless a stop string ended it; one that ends with ``"length"`` is the beginning of such a text.

    Attributes:
        json: a JSON schema: its text, a dictionary, or a pydantic model class. Properties come in the order of the
            schema, and no others than it names, unless it has ``additionalProperties``. Keywords that cannot be
            guaranteed are refused (``docs/structured_outputs.md``).
        regex: a regular expression that the whole text matches.
        choice: texts, one of which the text is.
        grammar: a grammar in EBNF, as llama.cpp's GBNF; the text follows its rule ``root``.
        json_object: True: any JSON object.
        structural_tag: parts of a text, in the format of xgrammar's structural tags: its text, or a dictionary.
        disable_any_whitespace: write JSON as ``json.dumps`` does, with one space after each comma and colon. By default
            the model may put whitespace wherever JSON allows it.

    Raises:
        GrammarError: none or several of the fields are given, one has a wrong type or is too large, or a schema has a
            keyword that is wrong or that cannot be guaranteed; the message names the place.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise _error(f"given: {', '.join(given) or 'nothing'}; expected exactly one of {', '.join(_KINDS)}.")
        if not isinstance(self.disable_any_whitespace, bool):
            raise _error(f"disable_any_whitespace={self.disable_any_whitespace!r:.80}; expected True or False.")
        read = {"json": _schema, "choice": _choices, "json_object": _true, "structural_tag": _object}
        kind = given[0]
        object.__setattr__(self, kind, read.get(kind, _text)(kind, getattr(self, kind)))
        size = len(self.text)
        if size > MOST_CHARACTERS:
            raise _error(f"{kind} has {size} characters; expected at most {MOST_CHARACTERS}.")

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """What is given, as text; choices as a JSON list."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value)

    @classmethod
    def of(cls, value: Any) -> StructuredOutputs:
        """Accept an instance, or a mapping of its fields.

        Raises:
            GrammarError: the value is neither, or a field is unknown or wrong.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise _error(f"it is a {type(value).__name__}; expected a mapping such as {{'json': {{...}}}}.")
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in value if name not in known]:
            raise _error(f"unknown field {unknown[0]!r:.80}; expected one of {', '.join(known)}.")
        return cls(**value)


def _error(message: str, place: str | None = None) -> GrammarError:
    return GrammarError(f"structured_outputs: {message}", place)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _error(f"{name} is {value!r:.80}; expected a text that is not empty.")
    return value


def _true(name: str, value: Any) -> bool:
    if value is not True:
        raise _error(f"json_object is {value!r:.80}; expected True.")
    return True


def _choices(name: str, value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    if not is_list or not all(isinstance(item, str) and item for item in value):
        raise _error(f"choice is {value!r:.80}; expected a list of texts that are not empty.")
    return tuple(value)


def _schema(name: str, value: Any) -> str:
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    schema = _parsed(name, value)
    check_schema(schema)
    return json.dumps(schema)


def _object(name: str, value: Any) -> str:
    tag = _parsed(name, value)
    if not isinstance(tag, dict):
        raise _error(f"{name} is {value!r:.80}; expected a JSON object.")
    return json.dumps(tag)


def _parsed(name: str, value: Any) -> Any:
    """Return a JSON value from its text, or the copy of one, which nothing can change afterwards."""
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        raise _error(f"{name} has {len(value)} characters; expected at most {MOST_CHARACTERS}.")
    try:
        found = json.loads(value if isinstance(value, str) else json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        kind = "a text" if isinstance(value, str) else f"a {type(value).__name__}"
        raise _error(f"{name} is {kind} that is no JSON value: {error}.") from None
    if (depth := _depth(found)) > _DEEPEST:
        raise _error(f"{name} has {depth} levels of lists and objects; expected at most {_DEEPEST}.")
    return found


def _depth(value: Any) -> int:
    """Return how deep lists and objects are nested; without recursion, for any depth that ``json`` reads."""
    deepest = 0
    pending = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, (list, dict)):
            deepest = max(deepest, depth)
            pending += [(child, depth + 1) for child in (item.values() if isinstance(item, dict) else item)]
    return deepest
