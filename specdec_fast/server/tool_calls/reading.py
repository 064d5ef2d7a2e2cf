"""Reads the calls in an answer's text, as it comes."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from specdec_fast.server.tool_calls.formats import HarmonyFormat, Tool, ToolCall, ToolFormat
from specdec_fast.structured_outputs.reasoning import overlap

_SPACE_AT_END = re.compile(r"\s*\Z")


class CallReader:
    """Takes the text of one answer in pieces, and returns what is content and the calls that are complete.

    A call is returned when its last character has come. Whitespace around calls is no content. What looks like the
    beginning of a call and turns out to be none is content.

    Args:
        format: how the model writes calls.
        ends: texts of the tokens that end a request; a special token among them may stand at the end of the text.
        tools: what may be called.
    """

    def __init__(self, format: ToolFormat, ends: Collection[str] = (), tools: Sequence[Tool] = ()) -> None:
        self._format = format
        self._ends = [end for end in ends if end]
        self._tools = tools
        self._held = ""  # text that is neither content nor a call yet
        self._has_content = False
        self.num_calls = 0  # that were returned
        self.reasoning = ""  # which this format leaves to others

    def add(self, text: str, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """Add the next text; return the content and the calls that are certain now."""
        self._held += text
        if is_last:
            self._held = without_end(self._held, self._ends)
        content = ""
        calls: list[ToolCall] = []
        while self._held:
            start = self._next_mark()
            before = self._held[: len(self._held) if start is None else start]
            kept = "" if start is None and is_last and not self.num_calls else self._uncertain(before, is_last, start)
            certain = before[: len(before) - len(kept)]
            content += certain
            self._has_content = self._has_content or bool(certain.strip())
            if start is None:
                self._held = kept if not is_last else ""
                break
            self._held = self._held[len(certain) :]
            found = self._format.take(self._held[len(kept) :], is_last, self._tools)
            if found is None:
                break
            if found.calls or found.is_frame:
                calls += found.calls
                self.num_calls += len(found.calls)
                self._held = self._held[len(kept) + found.length :]
            else:
                stop = len(kept) + found.length
                content += self._held[:stop]
                self._has_content = True
                self._held = self._held[stop:]
        return content, calls

    def _next_mark(self) -> int | None:
        """Return where the next mark begins in the held text; None if there is none."""
        places = [place for mark in self._marks() if (place := self._held.find(mark)) >= 0]
        if self._format.begins_text:
            lead = len(self._held) - len(self._held.lstrip())
            places = [place for place in places if place == lead and not self._has_content]
        return min(places, default=None)

    def _marks(self) -> tuple[str, ...]:
        """Return the texts with which calls begin or end here."""
        return (*self._format.marks, *self._format.inner_marks) if self.num_calls else self._format.marks

    def _uncertain(self, before: str, is_last: bool, start: int | None) -> str:
        """Return the end of a text before a mark, or before more text, that may be no content."""
        space = _SPACE_AT_END.search(before)
        assert space is not None
        if start is not None or is_last:
            return space[0]
        longest = max(overlap(before, text) for text in (*self._marks(), *self._ends))
        if longest:
            space = _SPACE_AT_END.search(before[: len(before) - longest])
            assert space is not None
        return before[space.start() :]


class HarmonyReader:
    """As ``CallReader``, for gpt-oss: an answer is messages: content, calls, and reasoning.

    Attributes:
        reasoning: what the last ``add`` has found of it.
    """

    def __init__(self, format: HarmonyFormat, ends: Collection[str] = ()) -> None:
        self._format = format
        self._ends = [end for end in ends if end]
        self._held = ""
        self._shown = 0  # characters of the present message that were returned
        self.num_calls = 0
        self.reasoning = ""

    def add(self, text: str, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """Add the next text; return the content and the calls that are certain now."""
        self._held += text
        if is_last:
            self._held = without_end(self._held, self._ends)
        content = ""
        self.reasoning = ""
        calls: list[ToolCall] = []
        while self._held:
            head = self._format.head.match(self._held)
            if head is None:
                if is_last and "<|channel|>" not in self._held:  # the template opened a message that is no call
                    content += without_end(self._held, self._format.ends)
                break
            found = self._format.take(self._held, is_last)
            stop = len(self._held) if found is None else found.length
            if not (head[1] or head[3]):  # it is no call
                body = without_end(self._held[head.end() : stop], self._format.ends)
                longest = 0 if found is not None else max(overlap(body, end) for end in self._format.ends)
                certain = body[: len(body) - longest]
                if head[2] == "analysis":
                    self.reasoning += certain[self._shown :]
                else:
                    content += certain[self._shown :]
                self._shown = max(self._shown, len(certain))
            if found is None:
                break
            calls += found.calls
            self.num_calls += len(found.calls)
            self._held = self._held[stop:]
            self._shown = 0
        return content, calls


def reader_of(format: ToolFormat, ends: Collection[str], tools: Sequence[Tool] = ()) -> Any:
    """Return a reader of one answer's text, in which these functions may be called."""
    return HarmonyReader(format, ends) if isinstance(format, HarmonyFormat) else CallReader(format, ends, tools)


def without_end(text: str, ends: Collection[str]) -> str:
    """Return a text without the one of these ends that it has."""
    return next((text.removesuffix(end) for end in ends if text.endswith(end)), text)
