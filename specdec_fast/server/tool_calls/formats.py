"""How models write tool calls. A new format is a class here, named in ``FORMATS``."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

_DECODER = json.JSONDecoder(strict=False)  # models write line ends into strings
_MOST_WHITESPACE = 1  # characters in a row in arguments; models learn calls without line ends
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class ToolCall:
    """One call that a model has written."""

    name: str
    arguments: str  # JSON, as the model has written it


class Taken(NamedTuple):
    """What stands at the beginning of a text."""

    calls: list[ToolCall]
    length: int  # characters that were read


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    name: str
    parameters: Any  # a JSON schema


class ToolFormat(ABC):
    """How the models of one family write calls.

    Attributes:
        marks: texts with which calls begin.
        begins_text: whether a call is one only if nothing but whitespace stands before it.
        has_special_tokens: whether some of the marks are special tokens, which the text must then keep.
        reads_every_answer: whether answers without calls have parts that are not for the user, too.
    """

    marks: tuple[str, ...]
    begins_text: bool = False
    has_special_tokens: bool = False
    reads_every_answer: bool = False

    @abstractmethod
    def take(self, text: str, is_last: bool) -> Taken | None:
        """Read the calls at the beginning of ``text``, which begins with a mark.

        Returns:
            The calls and how much of the text they are; None if more text is needed. If no call stands there, none, and
            the length of what is content.
        """

    @abstractmethod
    def calls(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        """Return the structural tag's format of one call or more, ``most`` at most (1, or None: any number)."""

    def free_text(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        """Return the structural tag's format of any text, in which calls are as ``calls`` has them."""
        return {
            "type": "triggered_tags",
            "triggers": list(self.marks[:1]),
            "tags": [self._tag(tool) for tool in tools],
            "at_least_one": False,
            "stop_after_first": most == 1,
        }

    def content(self, element: dict[str, Any]) -> dict[str, Any]:
        """Return the structural tag's format of an answer without calls whose content follows ``element``."""
        return element

    @abstractmethod
    def _tag(self, tool: Tool) -> dict[str, Any]:
        """Return the tag of one call."""

    def call_id(self, unique: str) -> str:
        """Return the id of a call, made of 32 hexadecimal digits."""
        return f"call_{unique[:24]}"


class HermesFormat(ToolFormat):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3 and many others."""

    marks = ("<tool_call>",)
    _end = "</tool_call>"

    def take(self, text: str, is_last: bool) -> Taken | None:
        start = len(self.marks[0])
        found = _object_at(text, start)
        if found is None:
            end = text.find(self._end)
            if end < 0 and not is_last:
                return None
            return Taken([], len(text) if end < 0 else end + len(self._end))
        value, stop = found
        stop = _after_space(text, stop)
        if not text.startswith(self._end, stop):
            if not is_last and self._end.startswith(text[stop : stop + len(self._end)]):
                return None
        else:
            stop += len(self._end)
        return Taken(_calls_of([value], "arguments"), stop)

    def calls(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        return _list_of([self._tag(tool) for tool in tools], "\n", most)

    def _tag(self, tool: Tool) -> dict[str, Any]:
        begin = f'<tool_call>\n{{"name": {json.dumps(tool.name)}, "arguments": '
        return _tag(begin, tool, "}\n</tool_call>")


class LlamaFormat(ToolFormat):
    """``{"name": ..., "parameters": {...}}``, several with ``;`` between: Llama 3.1 to 3.3."""

    marks = ("{", "<|python_tag|>")
    begins_text = True
    has_special_tokens = True

    def take(self, text: str, is_last: bool) -> Taken | None:
        if not is_last:  # an answer may as well be JSON that is no call
            return None
        place = len(self.marks[1]) if text.startswith(self.marks[1]) else 0
        values = []
        while (found := _object_at(text, place)) is not None:
            value, place = found
            values.append(value)
            place = _after_space(text, place)
            place += text.startswith(";", place)
        calls = _calls_of(values, "parameters")
        is_whole = not text[place:].strip() and len(calls) == len(values)
        return Taken(calls if is_whole else [], len(text))

    def calls(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        return _list_of([self._tag(tool) for tool in tools], "; ", most)

    def free_text(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        free = {"type": "regex", "pattern": r"[^{\s][\s\S]*"}
        return {"type": "or", "elements": [self.calls(tools, most), free]}

    def _tag(self, tool: Tool) -> dict[str, Any]:
        return _tag(f'{{"name": {json.dumps(tool.name)}, "parameters": ', tool, "}")


class MistralFormat(ToolFormat):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``: Mistral, up to version 7 of its tokenizers."""

    marks = ("[TOOL_CALLS]",)
    has_special_tokens = True

    def take(self, text: str, is_last: bool) -> Taken | None:
        start = _after_space(text, len(self.marks[0]))
        found = _json_at(text, start) if text.startswith("[", start) else None
        if found is None:
            return Taken([], len(text)) if is_last or text[start : start + 1] not in ("", "[") else None
        values, stop = found
        return Taken(_calls_of(values, "arguments"), stop)

    def calls(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        calls = _list_of([self._tag(tool) for tool in tools], ", ", most)
        return _sequence(_text("[TOOL_CALLS]["), calls, _text("]"))

    def free_text(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        calls = _list_of([self._tag(tool) for tool in tools], ", ", most)
        tag = {"type": "tag", "begin": "[TOOL_CALLS][", "content": calls, "end": "]"}
        triggers = list(self.marks)
        return {"type": "triggered_tags", "triggers": triggers, "tags": [tag], "stop_after_first": True}

    def call_id(self, unique: str) -> str:
        return unique[:9]  # what Mistral's templates accept

    def _tag(self, tool: Tool) -> dict[str, Any]:
        return _tag(f'{{"name": {json.dumps(tool.name)}, "arguments": ', tool, "}")


class MistralArgumentsFormat(MistralFormat):
    """``[TOOL_CALLS]name[ARGS]{...}``, once for every call: Mistral, since version 11 of its tokenizers."""

    _head = re.compile(r"\[TOOL_CALLS\]\s*([\w.-]+?)(?:\[CALL_ID\]\w+)?\[ARGS\]")

    def take(self, text: str, is_last: bool) -> Taken | None:
        head = self._head.match(text)
        found = None if head is None else _object_at(text, head.end())
        if head is None or found is None:
            return Taken([], len(text)) if is_last else None
        value, stop = found
        return Taken([ToolCall(head[1], json.dumps(value, ensure_ascii=False))], stop)

    def calls(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        return _list_of([self._tag(tool) for tool in tools], "", most)

    def free_text(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        return ToolFormat.free_text(self, tools, most)

    def _tag(self, tool: Tool) -> dict[str, Any]:
        return _tag(f"[TOOL_CALLS]{tool.name}[ARGS]", tool, "")


class HarmonyFormat(ToolFormat):
    """``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``: gpt-oss.

    An answer consists of messages: what is for the user in the channel ``final``, or in ``commentary`` without a
    recipient; thoughts in ``analysis``, which are no part of the answer. A message ends with a special token.
    """

    marks = ("<|channel|>", "<|start|>")
    has_special_tokens = True
    reads_every_answer = True
    head = re.compile(r"(?:<\|start\|>assistant)?(?: to=([^\s<]+))?\s*<\|channel\|>(\w+)(?: to=([^\s<]+))?[^<]*"
                      r"(?:<\|constrain\|>\w+)?\s*<\|message\|>")  # fmt: skip
    ends = ("<|end|>", "<|call|>", "<|return|>")

    def take(self, text: str, is_last: bool) -> Taken | None:
        head = self.head.match(text)
        end = None if head is None else re.search("|".join(map(re.escape, self.ends)), text[head.end() :])
        if head is None or (end is None and not is_last):
            return Taken([], len(text)) if is_last else None
        body = text[head.end() :][: None if end is None else end.start()]
        stop = len(text) if end is None else head.end() + end.end()
        recipient = head[1] or head[3] or ""
        calls = [ToolCall(recipient.removeprefix("functions."), body.strip())] if recipient else []
        return Taken(calls, stop)

    def calls(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        return self._behind_reasoning({"type": "or", "elements": [self._tag(tool) for tool in tools]})

    def content(self, element: dict[str, Any]) -> dict[str, Any]:
        return self._behind_reasoning(_sequence(_text("<|channel|>final<|message|>"), element))

    def _behind_reasoning(self, element: dict[str, Any]) -> dict[str, Any]:
        reasoning = _sequence(
            _text("<|channel|>analysis<|message|>"),
            {"type": "any_text", "excludes": ["<|end|>", "<|channel|>", "<|start|>", "<|message|>"]},
            _text("<|end|><|start|>assistant"),
        )
        return _sequence({"type": "optional", "content": reasoning}, element)

    def free_text(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        triggers = ["<|channel|>commentary to="]
        return {"type": "triggered_tags", "triggers": triggers, "tags": [self._tag(tool) for tool in tools]}

    def _tag(self, tool: Tool) -> dict[str, Any]:
        begin = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
        return _tag(begin, tool, "")


FORMATS: dict[str, type[ToolFormat]] = {
    "hermes": HermesFormat,
    "qwen3": HermesFormat,
    "llama3_json": LlamaFormat,
    "mistral": MistralFormat,
    "mistral_args": MistralArgumentsFormat,
    "openai": HarmonyFormat,
}
# What a chat template says when its model writes calls in a format; the first that is found. XML inside of Hermes' tags
# (``<function=``) is another format.
_IN_TEMPLATES = (
    (r"<\|channel\|>", "openai"),
    (r"\[ARGS\]", "mistral_args"),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"<tool_call>(?![\s\S]*<function=)", "hermes"),
    (r"<\|python_tag\|>|<\|start_header_id\|>[\s\S]*\"parameters\"", "llama3_json"),
)


def format_of_template(chat_template: str | None) -> ToolFormat | None:
    """Return the format that a chat template shows; None if it shows none that is known."""
    for pattern, name in _IN_TEMPLATES:
        if re.search(pattern, chat_template or ""):
            return FORMATS[name]()
    return None


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
    start = _after_space(text, place)
    return _json_at(text, start) if text.startswith("{", start) else None


def _json_at(text: str, start: int) -> tuple[Any, int] | None:
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def _after_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return place if found is None else found.end()


def _tag(begin: str, tool: Tool, end: str) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": tool.parameters, "max_whitespace_cnt": _MOST_WHITESPACE}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _list_of(tags: list[dict[str, Any]], separator: str, most: int | None) -> dict[str, Any]:
    found = {"type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True}
    return found | {"stop_after_first": most == 1}
