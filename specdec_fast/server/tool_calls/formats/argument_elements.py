"""Forces arguments that a model writes as plain texts: the elements of structural tags, from a function's schema.

A text ends where its mark is, so no text may contain the mark. ``xgrammar``'s own styles for such formats keep the mark
out of free texts only, not out of those that follow a pattern or a length. What cannot be guaranteed is refused.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from specdec_fast.errors import GrammarError
from specdec_fast.server.tool_calls.formats.argument_types import (
    ANY_TYPE,
    argument_json,
    resolve,
    types_of,
)
from specdec_fast.server.tool_calls.formats.narrow_patterns import BEGIN, NEVER, narrowed
from specdec_fast.server.tool_calls.formats.tag_elements import any_of, json_element, sequence, text_element
from specdec_fast.structured_outputs.schemas import CONSTRAINTS, OF_TYPE

_NAME = re.compile(r'[^<>"\s]([^<>"\r\n\t]*[^<>"\s])?')
_UNSUPPORTED = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf", "patternProperties", "propertyNames")
_UNIT = f"([^{NEVER}]|{BEGIN}[^/{NEVER}])"  # one character or two; no mark begins in it, or at its end
# Formats whose texts, as xgrammar shapes them, have no "<". Others that it does not know are annotations.
_FORMATS = ("date", "time", "date-time", "duration", "hostname", "ipv4", "ipv6", "uri", "uri-reference", "uuid")
_REFUSED_FORMATS = ("json-pointer", "relative-json-pointer", "uri-template")
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
_EMAIL = rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL})*"


class Parameter(NamedTuple):
    """One parameter of a function, as the model must write it."""

    name: str
    is_required: bool
    texts: list[dict[str, Any]]  # elements of its values that are texts
    values: list[dict[str, Any]]  # elements of others, which are JSON


def parameters_of(schema: Any, mark: str, has_types: bool) -> list[Parameter]:
    """Return the parameters of a function, in the order of its schema.

    Args:
        schema: of all parameters; it is checked (``check_schema``).
        mark: what ends a value. It begins with ``</``.
        has_types: whether the model writes beside a value whether it is a text.

    Raises:
        GrammarError: what is read might not follow the schema; ``place`` is the JSON pointer.
    """
    for name in _UNSUPPORTED:
        if name in schema:
            raise _refused(f"#/{name}", f"{name!r} is not supported for all parameters together; name each of them")
    if schema.get("type", "object") != "object":
        raise _refused("#/type", f"it is {schema['type']!r:.80}; the arguments of a function are an object")
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if schema.get("minProperties", 0) > len(set(required)):
        raise _refused("#/minProperties", "'minProperties' is not supported; name required parameters")
    if schema.get("maxProperties", len(properties)) < len(properties):
        raise _refused("#/maxProperties", "'maxProperties' is not supported; leave it out")
    found = []
    for name, each in properties.items():
        place = f"#/properties/{name}"
        if not _NAME.fullmatch(name):
            raise _refused(place, f"the name {name!r:.80} cannot be written; leave out '<', '>', quotes and line ends")
        texts, values = _Argument(schema, mark, has_types).elements(each, place)
        found.append(Parameter(name, name in required, texts, values))
    return found


class _Argument:
    """The elements of one argument.

    Args:
        root: the schema of all parameters.
        mark: what ends a value.
        has_types: whether the model writes beside a value whether it is a text.
    """

    def __init__(self, root: Any, mark: str, has_types: bool) -> None:
        self._root = root
        self._mark = mark
        self._has_types = has_types

    def elements(self, schema: Any, place: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the elements of the values that are texts, and of the others."""
        types = types_of(schema, self._root)
        if "string" not in types:
            return [], [self._json(schema, place)]
        leaves = self._leaves(schema, place, ())
        if any(not _is_limited(leaf) for leaf, _ in leaves):
            return [self._limited(0, None)], [json_element({})] if self._has_types else []
        texts = [(leaf, at) for leaf, at in leaves if types_of(leaf, self._root) == {"string"}]
        others = [(leaf, at) for leaf, at in leaves if types_of(leaf, self._root) != {"string"}]
        if others and not self._has_types:
            self._expect_distinct(texts, others, types)
        return [self._text(leaf, at) for leaf, at in texts], [self._json(leaf, at) for leaf, at in others]

    def _leaves(self, schema: Any, place: str, passed: tuple[str, ...]) -> list[tuple[dict[str, Any], str]]:
        """Return schemas without branches that together allow what a schema allows, and their places."""
        if not isinstance(schema, dict):
            return [({}, place)]
        if "$ref" in schema:
            reference = schema["$ref"]
            if reference in passed:
                raise _refused(place, f"{reference!r:.80} contains itself, and it may be a text; leave one of both out")
            return self._leaves(resolve(reference, self._root), place, (*passed, reference))
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            texts = [value for value in values if isinstance(value, str)]
            others = [value for value in values if not isinstance(value, str)]
            return [({"enum": part}, place) for part in (texts, others) if part]
        for name in ("anyOf", "oneOf", "allOf"):
            if name in schema:
                places = [f"{place}/{name}/{index}" for index in range(len(schema[name]))]
                return [
                    leaf for one, at in zip(schema[name], places, strict=True) for leaf in self._leaves(one, at, passed)
                ]
        types = schema.get("type", [])
        if isinstance(types, str) or not types:
            return [(schema, place)]
        return [({**_of_type(schema, one), "type": one}, place) for one in types]

    def _expect_distinct(self, texts: list[Any], others: list[Any], types: frozenset[str]) -> None:
        """Check that what is read from a text follows the schema, although the text may be JSON of another type."""
        for leaf, place in texts:
            for value in leaf.get("enum", ()):
                if json.loads(argument_json(value, types)) != value:
                    raise _refused(place, f"the text {value!r:.80} would be read as a value of another type")
        if all("enum" in leaf for leaf, _ in texts):
            return
        for leaf, place in others:
            if CONSTRAINTS.intersection(leaf) != {"type"}:
                raise _refused(
                    place,
                    "beside other values, any text may be written, and one that looks like such a value is read as it; "
                    "leave out the limits of this value, or name the texts in 'enum'",
                )

    def _text(self, leaf: dict[str, Any], place: str) -> dict[str, Any]:
        if "enum" in leaf:
            for value in leaf["enum"]:
                if self._mark in value:
                    raise _refused(place, f"the text {value!r:.80} contains {self._mark}, which ends a value")
            return any_of([text_element(value) for value in leaf["enum"]])
        if "pattern" in leaf:
            try:
                return {"type": "regex", "pattern": narrowed(leaf["pattern"])}
            except ValueError as error:
                raise _refused(
                    f"{place}/pattern", f"'pattern' is not supported here: {error}; a text ends with {self._mark}"
                ) from None
        if "format" in leaf:
            return self._formatted(leaf["format"], f"{place}/format")
        return self._limited(leaf.get("minLength", 0), leaf.get("maxLength"))

    def _limited(self, least: int, most: int | None) -> dict[str, Any]:
        """Return texts of a number of characters. Where ``most`` is given, those with a ``<`` may have half as many."""
        if most is None:
            begin = [{"type": "regex", "pattern": f"{_UNIT}{{{least}}}"}] if least else []
            return sequence(*begin, {"type": "any_text", "excludes": [self._mark]})
        texts = [{"type": "regex", "pattern": f"[^{NEVER}]{{{least},{most}}}"}]
        if most // 2 >= max(least, 1):
            texts.append({"type": "regex", "pattern": f"{_UNIT}{{{least},{most // 2}}}"})
        return any_of(texts)

    def _formatted(self, name: str, place: str) -> dict[str, Any]:
        if name == "email":
            return {"type": "regex", "pattern": _EMAIL}
        if name in _REFUSED_FORMATS:
            raise _refused(place, f"the format {name!r} is not supported here; leave it out")
        if name not in _FORMATS:
            return self._limited(0, None)
        schema = {"type": "string", "format": name}
        return {"type": "json_schema", "json_schema": schema, "style": "qwen_xml"}  # a text without quotes

    def _json(self, schema: Any, place: str) -> dict[str, Any]:
        found = schema if isinstance(schema, dict) else {}
        references = re.findall(r'"\$ref": "([^"]*)"', json.dumps(found))
        if not references:
            return json_element(found)
        named = {name: self._root[name] for name in ("$defs", "definitions") if name in self._root}
        for reference in references + re.findall(r'"\$ref": "([^"]*)"', json.dumps(named)):
            if not reference.startswith(("#/$defs/", "#/definitions/")):
                raise _refused(place, f"the reference {reference!r:.80} is not supported here; put it into '$defs'")
        return json_element(found | named)


def _of_type(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a schema without the keywords of other types."""
    return {key: value for key, value in schema.items() if name in OF_TYPE.get(key, (name,))}


def _is_limited(leaf: dict[str, Any]) -> bool:
    """Return whether a schema without branches allows some values only."""
    return types_of(leaf, leaf) != ANY_TYPE or "enum" in leaf


def _refused(place: str, message: str) -> GrammarError:
    return GrammarError(f"structured_outputs: json at {place}: {message}.", place)
