"""The parts of structural tags that formats share."""

from __future__ import annotations

from typing import Any

_MOST_WHITESPACE = 1  # characters in a row in arguments; models learn calls without line ends


def json_element(schema: Any, most_whitespace: int = _MOST_WHITESPACE) -> dict[str, Any]:
    """Return a JSON value that follows a schema, with at most so many characters of whitespace in a row."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": most_whitespace}


def json_tag(begin: str, schema: Any, end: str) -> dict[str, Any]:
    """Return a call whose arguments are JSON."""
    return {"type": "tag", "begin": begin, "content": json_element(schema), "end": end}


def text_element(value: str) -> dict[str, Any]:
    """Return one text."""
    return {"type": "const_string", "value": value}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    """Return elements one after the other."""
    return {"type": "sequence", "elements": list(elements)} if elements else text_element("")


def with_lead(lead: str, element: dict[str, Any]) -> dict[str, Any]:
    """Return an element before which a text may stand, or none if the text is empty."""
    return sequence({"type": "optional", "content": text_element(lead)}, element) if lead else sequence(element)


def any_of(elements: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one of several elements."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def list_of(tags: list[dict[str, Any]], separator: str, most: int | None) -> dict[str, Any]:
    """Return one tag or more, ``most`` at most (1, or None: any number)."""
    found = {"type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True}
    return found | {"stop_after_first": most == 1}
