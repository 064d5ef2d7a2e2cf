"""Formats of calls that are JSON, with the name of the function in it or before it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from specdec_fast.server.tool_calls.formats.base import Taken, Tool, ToolCall, ToolFormat
from specdec_fast.server.tool_calls.formats.json_text import after_space
from specdec_fast.server.tool_calls.formats.tag_elements import json_tag, list_of, sequence, text_element

_DECODER = json.JSONDecoder(strict=False)  # models write line ends into strings


class HermesFormat(ToolFormat):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3 and many others."""

    marks = ("<tool_call>",)
    _end = "</tool_call>"

    def take(self, text: str, is_last: bool, tools: Sequence[Tool] = ()) -> Taken | None:
        start = len(self.marks[0])
        found = _object_at(text, start)
        if found is None:
            end = text.find(self._end)
            if end < 0 and not is_last:
                return None
            return Taken([], len(text) if end < 0 else end + len(self._end))
        value, stop = found
        stop = after_space(text, stop)
        if not text.startswith(self._end, stop):
            if not is_last and self._end.startswith(text[stop : stop + len(self._end)]):
                return None
        else:
            stop += len(self._end)
        return Taken(_calls_of([value], "arguments"), stop)

    def calls(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        return list_of([self._tag(tool) for tool in tools], "\n", most)

    def _tag(self, tool: Tool) -> dict[str, Any]:
        begin = f'<tool_call>\n{{"name": {json.dumps(tool.name)}, "arguments": '
        return json_tag(begin, tool.parameters, "}\n</tool_call>")


class LlamaFormat(ToolFormat):
    """``{"name": ..., "parameters": {...}}``, several with ``;`` between: Llama 3.1 to 3.3."""

    marks = ("{", "<|python_tag|>")
    begins_text = True
    has_special_tokens = True

    def take(self, text: str, is_last: bool, tools: Sequence[Tool] = ()) -> Taken | None:
        if not is_last:  # an answer may as well be JSON that is no call
            return None
        place = len(self.marks[1]) if text.startswith(self.marks[1]) else 0
        values = []
        while (found := _object_at(text, place)) is not None:
            value, place = found
            values.append(value)
            place = after_space(text, place)
            place += text.startswith(";", place)
        calls = _calls_of(values, "parameters")
        is_whole = not text[place:].strip() and len(calls) == len(values)
        return Taken(calls if is_whole else [], len(text))

    def calls(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        return list_of([self._tag(tool) for tool in tools], "; ", most)

    def free_text(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        free = {"type": "regex", "pattern": r"[^{\s][\s\S]*"}
        return {"type": "or", "elements": [self.calls(tools, most), free]}

    def _tag(self, tool: Tool) -> dict[str, Any]:
        return json_tag(f'{{"name": {json.dumps(tool.name)}, "parameters": ', tool.parameters, "}")


class MistralFormat(ToolFormat):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``: Mistral, up to version 7 of its tokenizers."""

    marks = ("[TOOL_CALLS]",)
    has_special_tokens = True

    def take(self, text: str, is_last: bool, tools: Sequence[Tool] = ()) -> Taken | None:
        start = after_space(text, len(self.marks[0]))
        found = _json_at(text, start) if text.startswith("[", start) else None
        if found is None:
            return Taken([], len(text)) if is_last or text[start : start + 1] not in ("", "[") else None
        values, stop = found
        return Taken(_calls_of(values, "arguments"), stop)

    def calls(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        calls = list_of([self._tag(tool) for tool in tools], ", ", most)
        return sequence(text_element("[TOOL_CALLS]["), calls, text_element("]"))

    def free_text(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        calls = list_of([self._tag(tool) for tool in tools], ", ", most)
        tag = {"type": "tag", "begin": "[TOOL_CALLS][", "content": calls, "end": "]"}
        triggers = list(self.marks)
        return {"type": "triggered_tags", "triggers": triggers, "tags": [tag], "stop_after_first": True}

    def call_id(self, unique: str) -> str:
        return unique[:9]  # what Mistral's templates accept

    def _tag(self, tool: Tool) -> dict[str, Any]:
        return json_tag(f'{{"name": {json.dumps(tool.name)}, "arguments": ', tool.parameters, "}")


class MistralArgumentsFormat(MistralFormat):
    """``[TOOL_CALLS]name[ARGS]{...}``, once for every call: Mistral, since version 11 of its tokenizers."""

    _head = re.compile(r"\[TOOL_CALLS\]\s*([\w.-]+?)(?:\[CALL_ID\]\w+)?\[ARGS\]")

    def take(self, text: str, is_last: bool, tools: Sequence[Tool] = ()) -> Taken | None:
        head = self._head.match(text)
        found = None if head is None else _object_at(text, head.end())
        if head is None or found is None:
            return Taken([], len(text)) if is_last else None
        value, stop = found
        return Taken([ToolCall(head[1], json.dumps(value, ensure_ascii=False))], stop)

    def calls(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        return list_of([self._tag(tool) for tool in tools], "", most)

    def free_text(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        return ToolFormat.free_text(self, tools, most)

    def _tag(self, tool: Tool) -> dict[str, Any]:
        return json_tag(f"[TOOL_CALLS]{tool.name}[ARGS]", tool.parameters, "")


def _calls_of(values: Any, key: str) -> list[ToolCall]:
    """Return the calls that JSON values are; none if one of them is no call."""
    calls = []
    for value in values:
        name = value.get("name") if isinstance(value, dict) else None
        arguments = value.get(key, value.get("arguments", {})) if isinstance(value, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, (dict, str)):
            return []
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(ToolCall(name, text))
    return calls


def _object_at(text: str, place: int) -> tuple[Any, int] | None:
    """Return the JSON object at a place, after whitespace, and where it ends; None if none is complete there."""
    start = after_space(text, place)
    return _json_at(text, start) if text.startswith("{", start) else None


def _json_at(text: str, start: int) -> tuple[Any, int] | None:
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
