"""What the fields of a body ask an answer to follow: ``response_format``, ``structured_outputs``, tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError

from specdec_fast.errors import GrammarError
from specdec_fast.server.tool_calls.formats import Tool, ToolFormat
from specdec_fast.server.tool_calls.formats.tag_elements import any_of, json_element, text_element
from specdec_fast.structured_outputs.parameters import StructuredOutputs
from specdec_fast.structured_outputs.schemas import check_schema

_FUNCTION_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MOST_WHITESPACE = 20  # characters in a row in JSON beside calls
_CHOICES = (None, "auto", "required")
_CALLS_NOTHING = (None, "none", "auto")  # if there are no tools
_RESPONSE_TYPES = "'text', 'json_object', 'json_schema' or 'structural_tag'"


def wrong(field: str, reason: str) -> PydanticCustomError:
    """Return the error of a field of a body, which pydantic reports."""
    return PydanticCustomError("unsupported", "{param}: {reason}", {"param": field, "reason": reason})


@dataclass(frozen=True)
class ToolChoice:
    """Which functions an answer may call, and whether it must.

    Attributes:
        tools: functions that it may call; of a named function, only that one.
        is_required: whether it must call one.
        is_strict: whether the arguments of a call must follow the function's schema, although no call is required.
        most: 1, if there may be one call only; None: any number.
    """

    tools: tuple[Tool, ...]
    is_required: bool
    is_strict: bool
    most: int | None


def tool_choice_of(tools: Any, choice: Any, parallel: bool | None) -> ToolChoice | None:
    """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls``; None if no function may be called.

    Raises:
        PydanticCustomError: one of them is wrong.
    """
    if not tools:
        if isinstance(choice, dict) or choice not in _CALLS_NOTHING:
            raise wrong("tool_choice", f"it is {choice!r:.80}, but there are no tools; send tools")
        return None
    functions = [_function(index, tool) for index, tool in enumerate(tools)]
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        raise wrong("tools", f"two functions have one name, of {', '.join(names):.200}; rename one")
    if choice == "none":
        return None
    is_named = isinstance(choice, dict)
    if is_named:
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or name not in names:
            raise wrong("tool_choice", f"{choice!r:.80} names no function; expected one of {', '.join(names):.200}")
        functions = [each for each in functions if each["name"] == name]
    elif choice not in _CHOICES:
        raise wrong("tool_choice", f"it is {choice!r:.80}; expected 'none', 'auto', 'required' or a function")
    is_required = is_named or choice == "required"
    is_strict = any(each.get("strict") is True for each in functions)
    found = tuple(Tool(each["name"], each.get("parameters") or {"type": "object"}) for each in functions)
    return ToolChoice(found, is_required, is_strict, 1 if is_named or parallel is False else None)


def _function(index: int, tool: Any) -> dict[str, Any]:
    place = f"tools.{index}"
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise wrong("tools", f"{place} is {tool!r:.80}; expected {{'type': 'function', 'function': {{...}}}}")
    name = function.get("name")
    if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
        raise wrong(
            "tools", f"{place}.function.name is {name!r:.80}; expected 1 to 64 letters, digits, '_', '-' or '.'"
        )
    if not isinstance(function.get("parameters") or {}, dict):
        raise wrong("tools", f"{place}.function.parameters is no JSON schema; expected an object")
    return function


def constraint_of(
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None,
    choice: ToolChoice | None,
    tool_format: ToolFormat | None,
) -> StructuredOutputs | None:
    """Return what an answer must follow; None if nothing.

    Args:
        response_format: of OpenAI's API.
        structured_outputs: of vLLM's API, the fields of StructuredOutputs.
        choice: which functions may be called; None: none.
        tool_format: how the model writes calls; it is known if functions may be called.

    Raises:
        GrammarError: a field is wrong, or two contradict each other.
    """
    asked = None if structured_outputs is None else StructuredOutputs.of(structured_outputs)
    element = _response_element(response_format)
    if asked is not None and element is not None:
        raise GrammarError("structured_outputs: response_format is given, too; send one of them.")
    must_follow = choice is not None and (choice.is_required or choice.is_strict or element is not None)
    if choice is None or tool_format is None or not must_follow:
        return _of_content(asked, element, tool_format)
    if asked is not None:
        raise GrammarError("structured_outputs: calls of tools are constrained, too; send tool_choice='none'.")
    for index, tool in enumerate(choice.tools):
        _check_parameters(index, tool, tool_format)
    tools = list(choice.tools)
    if choice.is_required:
        found = tool_format.calls(tools, choice.most)
    elif element is not None:
        found = {"type": "or", "elements": [tool_format.calls(tools, choice.most), tool_format.content(element)]}
    else:
        found = tool_format.free_text(tools, choice.most)
    return StructuredOutputs(structural_tag=_tag(found))


def _of_content(
    asked: StructuredOutputs | None, element: dict[str, Any] | None, tool_format: ToolFormat | None
) -> StructuredOutputs | None:
    """Return what an answer must follow that calls nothing."""
    if tool_format is not None and tool_format.reads_every_answer:
        element = _element_of(asked) if asked is not None else element
        return None if element is None else StructuredOutputs(structural_tag=_tag(tool_format.content(element)))
    if element is None:
        return asked
    if element["type"] == "json_schema":
        return StructuredOutputs(json=element["json_schema"])
    return StructuredOutputs(structural_tag=_tag(element))


def _element_of(asked: StructuredOutputs) -> dict[str, Any]:
    """Return ``structured_outputs`` as an element of a structural tag."""
    if asked.disable_any_whitespace:
        raise GrammarError(
            "structured_outputs: disable_any_whitespace is not supported where a model writes answers in channels; "
            "leave it out."
        )
    if asked.kind == "json":
        return _json_of(json.loads(asked.text))
    if asked.kind == "json_object":
        return _json_of({"type": "object"})
    if asked.kind == "choice":
        return any_of([text_element(text) for text in json.loads(asked.text)])
    if asked.kind == "structural_tag":
        return dict(json.loads(asked.text).get("format") or {})
    return {"type": asked.kind, "pattern" if asked.kind == "regex" else "grammar": asked.text}


def _tag(element: Mapping[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": element})


def _response_element(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return ``response_format`` as an element of a structural tag; None if any text will do."""
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return _json_of({"type": "object"})
    if kind == "json_schema":
        given = response_format.get("json_schema")
        schema = given.get("schema") if isinstance(given, dict) else None
        if not isinstance(schema, dict):
            raise GrammarError(
                f"response_format: json_schema is {given!r:.80}; expected {{'name': ..., 'schema': {{...}}}}."
            )
        check_schema(schema)
        return _json_of(schema)
    if kind == "structural_tag" and isinstance(response_format.get("format"), dict):
        return dict(response_format["format"])
    raise GrammarError(f"response_format: its type is {kind!r:.80}; expected {_RESPONSE_TYPES}.")


def _json_of(schema: dict[str, Any]) -> dict[str, Any]:
    return json_element(schema, _MOST_WHITESPACE)


def _check_parameters(index: int, tool: Tool, tool_format: ToolFormat) -> None:
    try:
        check_schema(tool.parameters)
        tool_format.check(tool)
    except GrammarError as error:
        reason = str(error).partition("json at ")[2]
        raise GrammarError(f"tools.{index}.function.parameters: {reason}", error.place) from None


def tools_as_sent(tools: Sequence[Any] | None, choice: ToolChoice | None) -> list[Any] | None:
    """Return the tools that the chat template shows; None if none may be called."""
    return list(tools) if tools and choice is not None else None
