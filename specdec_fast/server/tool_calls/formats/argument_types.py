"""Arguments that a model writes as plain texts: which JSON value a text is, by the function's schema."""

from __future__ import annotations

from typing import Any

from specdec_fast.server.tool_calls.formats.json_text import after_space, json_at, kind_of, quoted

ANY_TYPE = frozenset({"object", "array", "string", "integer", "number", "boolean", "null"})
TEXT = frozenset({"string"})
_BRANCHES = ("anyOf", "oneOf", "allOf")
_OF_OBJECTS = {"properties", "required", "additionalProperties"}  # a schema with these needs no type
_OF_ARRAYS = {"items", "prefixItems"}
_MOST_REFERENCES = 50
# What templates that write Python's text of a value make of these.
_PYTHON_WORDS = {"True": ("boolean", "true"), "False": ("boolean", "false"), "None": ("null", "null")}


def argument_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value from its text.

    Where the schema allows nothing but texts, it is the text. Otherwise it is the JSON value that the text is, if the
    schema allows such a value beside texts or allows no texts; a text that is no JSON stays a text.
    """
    if types != TEXT:
        found = json_at(text, 0)
        if found is not None and after_space(text, found.stop) == len(text) and is_value(found.kind, types):
            return found.text
        kind, word = _PYTHON_WORDS.get(text.strip(), ("", ""))
        if kind in types and types != ANY_TYPE:
            return word
    return quoted(text)


def is_value(kind: str, types: frozenset[str]) -> bool:
    """Return whether a JSON value of a type, written as text, is that value and not a text."""
    if "string" not in types:
        return True
    return kind != "string" and (kind in types or (kind == "integer" and "number" in types))


def argument_schemas(parameters: Any) -> dict[str, Any]:
    """Return the schemas of a function's parameters by name."""
    found = _resolved(parameters, parameters)
    properties = found.get("properties") if isinstance(found, dict) else None
    return properties if isinstance(properties, dict) else {}


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """Return the types of the values that a schema allows; all of them if it does not say.

    Args:
        schema: of a parameter; it may be wrong, as one that is only shown to the model.
        root: the schema that holds it, for references.
    """
    try:
        return _types_of(schema, root, set()) or ANY_TYPE
    except RecursionError:  # nothing limits how deep a schema is that is only shown to the model
        return ANY_TYPE


def _types_of(schema: Any, root: Any, seen: set[int]) -> frozenset[str]:
    """Return the types of the values that a schema allows; none if they have been counted (``seen``: of which)."""
    found = _resolved(schema, root)
    if not isinstance(found, dict):
        return ANY_TYPE
    if id(found) in seen:
        return frozenset()
    seen.add(id(found))
    values = [found["const"]] if "const" in found else found.get("enum")
    if isinstance(values, list) and values:
        return frozenset(kind_of(value) for value in values)
    branches = next((found[name] for name in _BRANCHES if name in found), None)
    if isinstance(branches, list) and branches:
        return frozenset().union(*(_types_of(branch, root, seen) for branch in branches))
    types = found.get("type", "object" if _OF_OBJECTS & found.keys() else "array" if _OF_ARRAYS & found.keys() else [])
    named = frozenset(each for each in (types if isinstance(types, list) else [types]) if isinstance(each, str))
    return named if named and named <= ANY_TYPE else ANY_TYPE


def resolve(reference: Any, root: Any) -> Any:
    """Return the schema that a reference names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for part in reference.split("/")[1:]:
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            found = found.get(part) if isinstance(found, dict) else None
    return found


def _resolved(schema: Any, root: Any) -> Any:
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = resolve(schema["$ref"], root)
    return None
