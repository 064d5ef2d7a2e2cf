"""Formats whose calls stand in a section between two marks: DeepSeek and Kimi, and the base of others."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from specdec_fast.server.tool_calls.formats.base import Taken, Tool, ToolCall, ToolFormat
from specdec_fast.server.tool_calls.formats.json_text import after_space, json_at
from specdec_fast.server.tool_calls.formats.tag_elements import (
    json_element,
    json_tag,
    list_of,
    sequence,
    text_element,
    with_lead,
)


class SectionFormat(ToolFormat):
    """Calls one after the other, with a mark before the first and one after the last.

    Attributes:
        section: the two marks.
        call_begin: text with which a call in the section begins.
        spaces: text after the first mark, between calls, and before the last mark.
        lead: text that the template writes before a section; a forced answer may have it.
    """

    section: tuple[str, str]
    call_begin: str
    spaces: tuple[str, str, str] = ("", "", "")
    lead: str = ""
    has_special_tokens = True

    def __init_subclass__(cls) -> None:
        if "section" in cls.__dict__:
            cls.marks = cls.section[:1]
            cls.inner_marks = (cls.call_begin, cls.section[1])

    def take(self, text: str, is_last: bool, tools: Sequence[Tool] = ()) -> Taken | None:
        begin, end = self.section
        if text.startswith(end):
            return Taken([], len(end), is_frame=True)
        place = after_space(text, len(begin)) if text.startswith(begin) else 0
        if not text.startswith(self.call_begin, place):
            may_begin = self.call_begin.startswith(text[place:])
            return None if may_begin and not is_last else Taken([], len(text) if may_begin else place)
        found = self._read_call(text, place, is_last, tools)
        if found is not None:
            call, stop = found
            return Taken([call], stop)
        if not is_last:
            return None
        stop = text.find(self.call_begin, place + len(self.call_begin))
        return Taken([], len(text) if stop < 0 else stop)

    @abstractmethod
    def _read_call(self, text: str, place: int, is_last: bool, tools: Sequence[Tool]) -> tuple[ToolCall, int] | None:
        """Return the call at a place, where ``call_begin`` stands, and where it ends; None if none is complete."""

    def calls(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        return with_lead(self.lead, self._section_of(tools, most))

    def free_text(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        tags = [self._section_of(tools, most)]
        return {"type": "triggered_tags", "triggers": list(self.marks), "tags": tags, "stop_after_first": True}

    def _section_of(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        first, between, last = self.spaces
        calls = list_of([self._tag(tool) for tool in tools], between, most)
        return {"type": "tag", "begin": self.section[0] + first, "content": calls, "end": last + self.section[1]}


class JsonSectionFormat(SectionFormat):
    """Calls in a section, with arguments that are a JSON object.

    Attributes:
        head: reads the beginning of a call; its group ``name`` is that of the function, and ``id``, if it has one, that
            of the call.
        end: reads what ends a call, behind the arguments.
    """

    head: re.Pattern[str]
    end: re.Pattern[str]

    def _read_call(self, text: str, place: int, is_last: bool, tools: Sequence[Tool]) -> tuple[ToolCall, int] | None:
        head = self.head.match(text, place)
        arguments = None if head is None else json_at(text, head.end())
        end = None if arguments is None else self.end.match(text, arguments.stop)
        if head is None or arguments is None or end is None or arguments.kind != "object":
            return None
        return ToolCall(head["name"], arguments.text, head.groupdict().get("id")), end.end()


class DeepSeekV31Format(JsonSectionFormat):
    """``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>``: DeepSeek-V3.1."""

    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call_begin = "<｜tool▁call▁begin｜>"
    head = re.compile(r"<｜tool▁call▁begin｜>\s*(?P<name>[\w.-]+)\s*<｜tool▁sep｜>")
    end = re.compile(r"\s*<｜tool▁call▁end｜>")
    _head_text = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>"
    _end_text = "<｜tool▁call▁end｜>"

    def _tag(self, tool: Tool) -> dict[str, Any]:
        return json_tag(self._head_text.format(tool.name), tool.parameters, self._end_text)


class DeepSeekV3Format(DeepSeekV31Format):
    """As DeepSeek-V3.1, with ``function<｜tool▁sep｜>NAME`` and the arguments in a fence: DeepSeek-V3 and R1."""

    spaces = ("", "\n", "")
    head = re.compile(r"<｜tool▁call▁begin｜>\s*\w*\s*<｜tool▁sep｜>\s*(?P<name>[\w.-]+)\s*```(?:json)?")
    end = re.compile(r"\s*```\s*<｜tool▁call▁end｜>")
    _head_text = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n"
    _end_text = "\n```<｜tool▁call▁end｜>"


class KimiFormat(JsonSectionFormat):
    """``<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>``: Kimi K2.

    What stands before the arguments is the id of the call; the template shows it again beside the result.
    """

    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call_begin = "<|tool_call_begin|>"
    head = re.compile(
        r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*<\|tool_call_argument_begin\|>",
        re.ASCII,
    )
    end = re.compile(r"\s*<\|tool_call_end\|>")

    def _tag(self, tool: Tool) -> dict[str, Any]:
        index = {"type": "regex", "pattern": "0|[1-9][0-9]{0,2}"}
        content = sequence(index, text_element("<|tool_call_argument_begin|>"), json_element(tool.parameters))
        begin = f"<|tool_call_begin|>functions.{tool.name}:"
        return {"type": "tag", "begin": begin, "content": content, "end": "<|tool_call_end|>"}
