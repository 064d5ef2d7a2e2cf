"""Formats whose arguments are plain texts between marks: Qwen3-Coder, GLM, MiniMax, DeepSeek-V3.2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec_fast.server.tool_calls.formats.argument_elements import parameters_of
from specdec_fast.server.tool_calls.formats.argument_types import ANY_TYPE, TEXT, argument_json, is_value
from specdec_fast.server.tool_calls.formats.base import Taken, Tool, ToolCall, ToolFormat
from specdec_fast.server.tool_calls.formats.json_text import after_space, json_at, quoted
from specdec_fast.server.tool_calls.formats.sections import SectionFormat
from specdec_fast.server.tool_calls.formats.tag_elements import any_of, list_of, sequence, with_lead


@dataclass(frozen=True)
class Marks:
    """What stands around the arguments of a call. Values are texts as they are, so they may look like marks.

    Attributes:
        begin: what is written before a value; ``{name}`` is the parameter's, ``{is_text}`` ``true`` or ``false``.
        head: reads that; its first group is the name, and the second, if it has one, ``is_text``.
        end: what ends a value.
        after: what is written behind that.
        call_end: reads what ends a call, behind the last value.
        last_call_end: reads that at the end of an answer, where less may stand.
        has_line_ends: whether a line end stands before and behind each value, which is no part of it.
    """

    begin: str
    head: re.Pattern[str]
    end: str
    after: str
    call_end: re.Pattern[str]
    last_call_end: re.Pattern[str]
    has_line_ends: bool = False

    def read(self, text: str, place: int, types: dict[str, frozenset[str]], is_last: bool) -> tuple[str, int] | None:
        """Return the arguments that begin at a place, as JSON, and where the call ends; None if it is not complete.

        Args:
            text: of an answer.
            place: behind the name of the function.
            types: which values each parameter may have; empty if the function is not known.
            is_last: whether no more text comes.
        """
        call_end = self.last_call_end if is_last else self.call_end
        arguments: dict[str, str] = {}
        while True:
            place = after_space(text, place)
            if (end := call_end.match(text, place)) is not None:
                members = (f"{quoted(name)}: {value}" for name, value in arguments.items())
                return f"{{{', '.join(members)}}}", end.end()
            head = self.head.match(text, place)
            if head is None:
                return None
            name = head[1].strip()
            allowed = types.get(name, ANY_TYPE)
            if head.re.groups > 1:  # the model says whether it is a text
                allowed = TEXT if head[2] == "true" else allowed - TEXT
            found = self._value(text, head.end(), allowed) or self._text(text, head.end(), allowed, types, call_end)
            if found is None:
                return None
            arguments[name], place = found

    def _value(self, text: str, place: int, types: frozenset[str]) -> tuple[str, int] | None:
        """Return the value at a place that is JSON, which may contain the mark of its end, and where that ends."""
        found = None if types == TEXT else json_at(text, place)
        if found is None or not is_value(found.kind, types):
            return None
        end = after_space(text, found.stop)
        return (found.text, end + len(self.end)) if text.startswith(self.end, end) else None

    def _text(
        self, text: str, place: int, types: frozenset[str], known: dict[str, Any], call_end: re.Pattern[str]
    ) -> tuple[str, int] | None:
        """Return the value at a place, up to a mark behind which a known parameter or the end of the call stands."""
        end = place - 1
        while (end := text.find(self.end, end + 1)) >= 0:
            behind = after_space(text, end + len(self.end))
            head = self.head.match(text, behind)
            is_next = head is not None and (not known or head[1].strip() in known)
            if is_next or call_end.match(text, behind) is not None:
                value = text[place:end]
                if self.has_line_ends:
                    value = value.removeprefix("\n").removesuffix("\n")
                return argument_json(value, types), end + len(self.end)
        return None

    def elements(self, schema: Any) -> dict[str, Any]:
        """Return the element of the arguments that follow a schema; raise GrammarError if they cannot be guaranteed."""
        has_types = self.head.groups > 1
        found = []
        for each in parameters_of(schema, self.end, has_types):
            kinds = [("true", each.texts), ("false", each.values)]
            tags = [self._tag(each.name, word, elements) for word, elements in kinds if elements]
            if not has_types:
                tags = [self._tag(each.name, "", each.texts + each.values)]
            tag = any_of(tags)
            found.append(tag if each.is_required else {"type": "optional", "content": tag})
        return sequence(*found)

    def call(self, around: tuple[str, str], tool: Tool) -> dict[str, Any]:
        """Return the tag of a call; ``around``: what is written before the arguments, with ``{name}``, and behind."""
        begin, end = around
        content = self.elements(tool.parameters)
        return {"type": "tag", "begin": begin.format(name=tool.name), "content": content, "end": end}

    def _tag(self, name: str, is_text: str, elements: list[dict[str, Any]]) -> dict[str, Any]:
        begin = self.begin.format(name=name, is_text=is_text)
        end = ("\n" if self.has_line_ends else "") + self.end + self.after
        return {"type": "tag", "begin": begin, "content": any_of(elements), "end": end}


class TaggedFormat(ToolFormat):
    """A call of its own, with arguments between marks.

    Attributes:
        head: reads the beginning of a call; its group is the name of the function.
        open_head: reads what may be the beginning of that.
        arguments: marks of the arguments.
        call: what is written before the arguments, with ``{name}``, and behind them.
        separator: what is written between calls.
        lead: text that the template writes before a call; a forced answer may have it.
        excludes: what no text beside calls may contain where calls are forced.
    """

    head: re.Pattern[str]
    open_head: re.Pattern[str]
    arguments: Marks
    call: tuple[str, str]
    separator: str = "\n"
    lead: str = ""
    excludes: tuple[str, ...] = ()

    def take(self, text: str, is_last: bool, tools: Sequence[Tool] = ()) -> Taken | None:
        head = self.head.match(text)
        if head is None:
            if not is_last and self.open_head.fullmatch(text) is not None:
                return None
            mark = next(mark for mark in self.marks if text.startswith(mark))
            return Taken([], len(mark))
        found = self.arguments.read(text, head.end(), _types(tools, head[1]), is_last)
        if found is not None:
            arguments, stop = found
            return Taken([ToolCall(head[1], arguments)], stop)
        place = after_space(text, head.end())
        if place < len(text) and text[place] != "<":  # the mark is only mentioned
            return Taken([], head.end())
        if not is_last:
            return None
        next_call = self.head.search(text, head.end())
        return Taken([], len(text) if next_call is None else next_call.start())

    def calls(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        return with_lead(self.lead, list_of([self._tag(tool) for tool in tools], self.separator, most))

    def free_text(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        return super().free_text(tools, most) | {"excludes": list(self.excludes)}

    def _tag(self, tool: Tool) -> dict[str, Any]:
        return self.arguments.call(self.call, tool)


class QwenCoderFormat(TaggedFormat):
    """``<function=NAME>`` with ``<parameter=KEY>``: Qwen3-Coder, Qwen3.5, Nemotron 3 and others.

    The models sometimes leave out ``<tool_call>``.
    """

    marks = ("<tool_call>", "<function=")
    head = re.compile(r"(?:<tool_call>\s*)?<function=([\w.-]+)>")
    open_head = re.compile(r"<tool_call>\s*(<(f(u(n(c(t(i(o(n(=[\w.-]*)?)?)?)?)?)?)?)?)?)?|<function=[\w.-]*")
    arguments = Marks(
        begin="<parameter={name}>\n",
        head=re.compile(r"<parameter=([^>\n]+)>"),
        end="</parameter>",
        after="\n",
        call_end=re.compile(r"</function>\s*</tool_call>"),
        last_call_end=re.compile(r"</function>(\s*</tool_call>)?"),
        has_line_ends=True,
    )
    call = ("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>")
    excludes = ("<function=",)


class GlmFormat(TaggedFormat):
    """``<tool_call>NAME`` with ``<arg_key>KEY</arg_key>`` and ``<arg_value>VALUE</arg_value>``: GLM-4.5 and 4.6."""

    marks = ("<tool_call>",)
    head = re.compile(r"<tool_call>\s*([\w.-]+)\s*(?=<arg_key>|</tool_call>)")
    open_head = re.compile(
        r"<tool_call>\s*([\w.-]+\s*)?(<(a(r(g(_(k(ey?)?)?)?)?)?|/(t(o(o(l(_(c(a(ll?)?)?)?)?)?)?)?)?)?)?"
    )
    arguments = Marks(
        begin="<arg_key>{name}</arg_key>\n<arg_value>",
        head=re.compile(r"<arg_key>([^<]+)</arg_key>\s*<arg_value>"),
        end="</arg_value>",
        after="\n",
        call_end=re.compile(r"</tool_call>"),
        last_call_end=re.compile(r"</tool_call>"),
    )
    call = ("<tool_call>{name}\n", "</tool_call>")
    lead = "\n"


class Glm47Format(GlmFormat):
    """As GLM-4.5, without line ends: GLM-4.7 and 5."""

    arguments = Marks(
        begin="<arg_key>{name}</arg_key><arg_value>",
        head=GlmFormat.arguments.head,
        end="</arg_value>",
        after="",
        call_end=GlmFormat.arguments.call_end,
        last_call_end=GlmFormat.arguments.last_call_end,
    )
    call = ("<tool_call>{name}", "</tool_call>")
    separator = ""
    lead = ""


class InvokeFormat(SectionFormat):
    """Calls in a section, with arguments between marks.

    Attributes:
        head: reads the beginning of a call; its group is the name of the function.
        arguments: marks of the arguments.
        call: what is written before the arguments, with ``{name}``, and behind them.
    """

    head: re.Pattern[str]
    arguments: Marks
    call: tuple[str, str]

    def _read_call(self, text: str, place: int, is_last: bool, tools: Sequence[Tool]) -> tuple[ToolCall, int] | None:
        head = self.head.match(text, place)
        found = None if head is None else self.arguments.read(text, head.end(), _types(tools, head[1]), is_last)
        return None if head is None or found is None else (ToolCall(head[1], found[0]), found[1])

    def _tag(self, tool: Tool) -> dict[str, Any]:
        return self.arguments.call(self.call, tool)


class MiniMaxFormat(InvokeFormat):
    """``<invoke name="NAME">`` with ``<parameter name="KEY">VALUE</parameter>``: MiniMax-M2."""

    section = ("<minimax:tool_call>", "</minimax:tool_call>")
    call_begin = "<invoke name="
    spaces = ("\n", "\n", "\n")
    lead = "\n"
    head = re.compile(r'<invoke name="([\w.-]+)">')
    arguments = Marks(
        begin='<parameter name="{name}">',
        head=re.compile(r'<parameter name="([^"\n]+)">'),
        end="</parameter>",
        after="\n",
        call_end=re.compile(r"</invoke>(?=\s*(?:<invoke name=|</minimax:tool_call>))"),
        last_call_end=re.compile(r"</invoke>"),
    )
    call = ('<invoke name="{name}">\n', "</invoke>")


class DeepSeekV32Format(InvokeFormat):
    """DSML, with ``<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>``: DeepSeek-V3.2."""

    section = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    call_begin = "<｜DSML｜invoke name="
    spaces = ("\n", "\n", "\n")
    lead = "\n\n"
    head = re.compile(r'<｜DSML｜invoke name="([\w.-]+)">')
    arguments = Marks(
        begin='<｜DSML｜parameter name="{name}" string="{is_text}">',
        head=re.compile(r'<｜DSML｜parameter name="([^"\n]+)" string="(true|false)">'),
        end="</｜DSML｜parameter>",
        after="\n",
        call_end=re.compile(r"</｜DSML｜invoke>(?=\s*(?:<｜DSML｜invoke name=|</｜DSML｜(?:function|tool)_calls>))"),
        last_call_end=re.compile(r"</｜DSML｜invoke>"),
    )
    call = ('<｜DSML｜invoke name="{name}">\n', "</｜DSML｜invoke>")


class DeepSeekV4Format(DeepSeekV32Format):
    """As DeepSeek-V3.2, in a section of another name: DeepSeek-V4."""

    section = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")


def _types(tools: Sequence[Tool], name: str) -> dict[str, frozenset[str]]:
    """Return which values each parameter of a function may have; nothing if the function is not known."""
    return next((tool.types for tool in tools if tool.name == name), {})
