"""Checks of JSON schemas: what ``xgrammar`` does not guarantee is refused, with its place in the schema.

``xgrammar`` ignores keywords that it does not know, and some combinations of those that it knows. Its outputs would
then not validate. A keyword that is no part of JSON Schema is an annotation, as the standard says, and stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from specdec_fast.errors import GrammarError

_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
# Keywords of JSON Schema (2020-12 and earlier) that no output would be sure to follow.
_REFUSED = (
    "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies", "contains", "minContains",
    "maxContains", "additionalItems", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# What each type's own keywords are; they mean something only where the type is named.
OF_TYPE = {
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "exclusiveMaximum": ("integer", "number"),
    "multipleOf": ("integer",),
    "minLength": ("string",),
    "maxLength": ("string",),
    "pattern": ("string",),
    "format": ("string",),
    "items": ("array",),
    "prefixItems": ("array",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "uniqueItems": ("array",),
    "properties": ("object",),
    "required": ("object",),
    "additionalProperties": ("object",),
    "patternProperties": ("object",),
    "propertyNames": ("object",),
    "minProperties": ("object",),
    "maxProperties": ("object",),
}
_CHOOSING = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")  # each stands alone: xgrammar reads only the first
CONSTRAINTS = {*OF_TYPE, *_CHOOSING, "type"}
_MOST_VALUES = 10_000  # of an enum
_MOST_PROPERTIES = 1_000  # of an object
_MOST_REPEATS = 10_000  # of minLength, maxItems and the like


def check_schema(schema: Any) -> None:
    """Check a schema, given as a JSON value.

    Raises:
        GrammarError: a keyword is wrong or cannot be guaranteed; ``place`` is its JSON pointer.
    """
    _Schema(schema).check(schema, "#")


class _Schema:
    """A whole schema, for the references in it."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._checked = {"#"}  # references whose schemas have been checked, or are being checked

    def check(self, schema: Any, place: str) -> None:
        """Check one schema and all in it."""
        if schema is True:
            return
        if schema is False:
            raise _wrong(place, "the schema false allows nothing")
        if not isinstance(schema, dict):
            raise _wrong(place, f"a schema is {schema!r:.80}; expected an object")
        for name in _REFUSED:
            if name in schema and not (name.startswith("unevaluated") and isinstance(schema[name], bool)):
                raise _wrong(f"{place}/{name}", f"{name!r} is not supported; leave it out, or state it another way")
        choosing = [name for name in _CHOOSING if name in schema]
        self._check_types(schema, place)
        if choosing:
            self._check_choosing(schema, place, choosing[0])
        else:
            self._check_own(schema, place)
        for name in ("$defs", "definitions"):
            for key, value in _mapping(schema, name, place).items():
                self.check(value, f"{place}/{name}/{_escaped(key)}")

    def _check_types(self, schema: dict[str, Any], place: str) -> None:
        for name in _types_of(schema, place):
            if name not in _TYPES:
                raise _wrong(f"{place}/type", f"{name!r:.80} is no type; expected one of {', '.join(_TYPES)}")

    def _check_choosing(self, schema: dict[str, Any], place: str, name: str) -> None:
        value = schema[name]
        others = [other for other in schema if other in CONSTRAINTS and other != name]
        if name in ("enum", "const"):
            others = [other for other in others if other != "type"]
            values = value if name == "enum" else [value]
            if not isinstance(values, list) or not 1 <= len(values) <= _MOST_VALUES:
                raise _wrong(f"{place}/enum", f"it is {value!r:.80}; expected a list of 1 to {_MOST_VALUES} values")
            types = _types_of(schema, place)
            wrong = [each for each in values if types and not any(_has_type(each, kind) for kind in types)]
            if wrong:
                raise _wrong(f"{place}/{name}", f"the value {wrong[0]!r:.80} is not of the type {' or '.join(types)}")
        if others:
            raise _wrong(
                f"{place}/{others[0]}", f"{others[0]!r} beside {name!r} is not supported; put it into what that names"
            )
        if name == "$ref":
            self._check_reference(value, f"{place}/$ref")
        elif name in ("anyOf", "oneOf", "allOf"):
            self._check_branches(value, place, name)

    def _check_reference(self, reference: Any, place: str) -> None:
        passed = []
        target = self._referred(reference, place)
        while isinstance(target, dict) and "$ref" in target:
            passed.append(target["$ref"])
            if passed.count(target["$ref"]) > 1:
                raise _wrong(place, f"{reference!r:.80} refers to itself, so it allows nothing")
            target = self._referred(target["$ref"], place)
        if reference not in self._checked:
            self._checked.add(reference)
            self.check(self._referred(reference, place), reference)

    def _check_branches(self, branches: Any, place: str, name: str) -> None:
        if not isinstance(branches, list) or not branches:
            raise _wrong(f"{place}/{name}", f"it is {branches!r:.80}; expected a list of schemas")
        if name == "allOf" and len(branches) > 1:
            raise _wrong(f"{place}/allOf", "allOf of several schemas is not supported; write one schema")
        for index, branch in enumerate(branches):
            self.check(branch, f"{place}/{name}/{index}")
        if name == "oneOf":
            self._expect_disjoint(branches, f"{place}/oneOf")

    def _expect_disjoint(self, branches: list[Any], place: str) -> None:
        """Check that no value can match two branches: their types differ, or a required property's constants do."""
        resolved = [self._resolved(branch) for branch in branches]
        for second, later in enumerate(resolved):
            for first, earlier in enumerate(resolved[:second]):
                if not _are_disjoint(earlier, later, self):
                    raise _wrong(
                        f"{place}/{second}",
                        f"a value may match branches {first} and {second} of oneOf; use anyOf, or give both a required "
                        "property with different constants",
                    )

    def _resolved(self, schema: Any) -> dict[str, Any]:
        for _ in range(_MOST_PROPERTIES):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._referred(schema["$ref"], "#")
        return schema if isinstance(schema, dict) else {}

    def constants(self, schema: Any) -> list[Any] | None:
        """Return the values that a schema allows, if it names them."""
        found = self._resolved(schema)
        values = [found["const"]] if "const" in found else found.get("enum")
        return values if isinstance(values, list) else None

    def _referred(self, reference: Any, place: str) -> Any:
        if not isinstance(reference, str) or not re.fullmatch(r"#(/[^/~%]+)*", reference):
            raise _wrong(place, f"{reference!r:.80} is no reference within the schema, such as '#/$defs/name'")
        found = self._root
        for part in reference.split("/")[1:]:
            key = unquote(part)
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise _wrong(place, f"{reference!r:.80} refers to nothing")
        return found

    def _check_own(self, schema: dict[str, Any], place: str) -> None:
        types = _types_of(schema, place)
        for name, of in OF_TYPE.items():
            if name not in schema or (name == "additionalProperties" and schema[name] is True):
                continue
            if not types and name in ("properties", "required", "items", "prefixItems", "additionalProperties"):
                continue  # xgrammar takes the type from these
            if not any(kind in of for kind in types):
                raise _wrong(f"{place}/{name}", f"{name!r} needs the type {' or '.join(of)} beside it")
        self._check_string(schema, place)
        self._check_numbers(schema, place, types)
        self._check_array(schema, place)
        self._check_object(schema, place)

    def _check_string(self, schema: dict[str, Any], place: str) -> None:
        _check_bounds(schema, place, "minLength", "maxLength")
        for name in ("pattern", "format"):
            if name in schema and not isinstance(schema[name], str):
                raise _wrong(f"{place}/{name}", f"it is {schema[name]!r:.80}; expected a text")
            if name in schema and ("minLength" in schema or "maxLength" in schema):
                raise _wrong(f"{place}/{name}", f"{name!r} beside minLength or maxLength is not supported")
        if "pattern" in schema and "format" in schema:
            raise _wrong(f"{place}/format", "'format' beside 'pattern' is not supported")

    def _check_numbers(self, schema: dict[str, Any], place: str, types: list[str]) -> None:
        given = {name: schema[name] for name in _LIMITS if name in schema}
        for name, value in given.items():
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise _wrong(f"{place}/{name}", f"it is {value!r:.80}; expected a number")
            if "integer" in types and value != int(value):
                raise _wrong(f"{place}/{name}", f"it is {value!r:.80}; expected a whole number for integers")
        multiple = schema.get("multipleOf", 1)
        if not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1:
            raise _wrong(f"{place}/multipleOf", f"it is {multiple!r:.80}; expected a whole number above 0")
        if multiple != 1 and ("number" in types or given):
            raise _wrong(f"{place}/multipleOf", "'multipleOf' is supported for integers without limits only")

    def _check_array(self, schema: dict[str, Any], place: str) -> None:
        _check_bounds(schema, place, "minItems", "maxItems")
        if schema.get("uniqueItems", False) is not False:
            raise _wrong(f"{place}/uniqueItems", "'uniqueItems' is not supported; leave it out")
        items = schema.get("items", True)
        if items is not False:
            self.check(items, f"{place}/items")
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            raise _wrong(f"{place}/prefixItems", f"it is {prefix!r:.80}; expected a list of schemas")
        for index, item in enumerate(prefix):
            self.check(item, f"{place}/prefixItems/{index}")

    def _check_object(self, schema: dict[str, Any], place: str) -> None:
        _check_bounds(schema, place, "minProperties", "maxProperties")
        properties = _mapping(schema, "properties", place)
        if len(properties) > _MOST_PROPERTIES:
            raise _wrong(f"{place}/properties", f"{len(properties)} properties; expected at most {_MOST_PROPERTIES}")
        for group in ("properties", "patternProperties"):
            for key, value in _mapping(schema, group, place).items():
                self.check(value, f"{place}/{group}/{_escaped(key)}")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _wrong(f"{place}/required", f"it is {required!r:.80}; expected a list of names")
        if missing := [name for name in required if name not in properties]:
            raise _wrong(f"{place}/required", f"{missing[0]!r:.80} is not among the properties; name it there")
        if not isinstance(schema.get("additionalProperties", True), bool):
            self.check(schema["additionalProperties"], f"{place}/additionalProperties")
        if "propertyNames" in schema:
            names = _mapping(schema, "propertyNames", place)
            self.check({"type": "string", **names}, f"{place}/propertyNames")


def _are_disjoint(first: dict[str, Any], second: dict[str, Any], whole: _Schema) -> bool:
    one = {"number" if kind == "integer" else kind for kind in _types_of(first, "#")}
    other = {"number" if kind == "integer" else kind for kind in _types_of(second, "#")}
    if one and other and not one & other:
        return True
    values = (whole.constants(first), whole.constants(second))
    if values[0] is not None and values[1] is not None:
        return _differ(values[0], values[1])
    if one != {"object"} or other != {"object"}:
        return False
    for name in set(first.get("required", [])) & set(second.get("required", [])):
        own = [whole.constants(each.get("properties", {}).get(name)) for each in (first, second)]
        if own[0] is not None and own[1] is not None and _differ(own[0], own[1]):
            return True
    return False


def _differ(first: list[Any], second: list[Any]) -> bool:
    return not any(value == other for value in first for other in second)


def _check_bounds(schema: Mapping[str, Any], place: str, least: str, most: str) -> None:
    for name in (least, most):
        value = schema.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_REPEATS:
            raise _wrong(f"{place}/{name}", f"it is {value!r:.80}; expected an integer from 0 to {_MOST_REPEATS}")
    if most in schema and schema[most] < schema.get(least, 0):
        raise _wrong(f"{place}/{most}", f"{most} is less than {least}, so nothing is allowed")


def _types_of(schema: Mapping[str, Any], place: str) -> list[str]:
    given = schema.get("type", [])
    types = [given] if isinstance(given, str) else given
    if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
        raise _wrong(f"{place}/type", f"{given!r:.80} is no type; expected one of {', '.join(_TYPES)}")
    return types


def _has_type(value: Any, name: str) -> bool:
    kinds: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    if name in kinds:
        return isinstance(value, kinds[name])
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and (name == "number" or value == int(value))


def _mapping(schema: Mapping[str, Any], name: str, place: str) -> dict[str, Any]:
    value = schema.get(name, {})
    if not isinstance(value, dict):
        raise _wrong(f"{place}/{name}", f"it is {value!r:.80}; expected an object of schemas")
    return value


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _wrong(place: str, message: str) -> GrammarError:
    return GrammarError(f"structured_outputs: json at {place}: {message}.", place)
