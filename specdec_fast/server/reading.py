"""Reads the answers of chats, as they come: reasoning, content, and calls of tools."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

from specdec_fast.server.answer_format import AnswerFormat
from specdec_fast.server.tool_calls.formats import Tool, ToolCall
from specdec_fast.server.tool_calls.reading import reader_of, without_end
from specdec_fast.structured_outputs.reasoning import ReasoningReader, overlap, state_behind_prompt


class AnswerPart(NamedTuple):
    """What is certain of an answer since the part before."""

    reasoning: str
    content: str
    calls: list[ToolCall]


class AnswerReader:
    """Takes the text of one answer in pieces, and divides it.

    Args:
        answer_format: how the model writes answers.
        tokenizer: the target's; None if none is known.
        prompt_ids: the answer's prompt, which may have begun its reasoning.
        tools: functions that the answer may call.
        reads_calls: whether there may be calls, or other parts that the format of calls has.
        is_continued: whether the answer continues the last message of the prompt.

    Attributes:
        num_reasoning_tokens: tokens of the reasoning and of the texts that mark it.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        tokenizer: Any | None,
        prompt_ids: list[int],
        *,
        tools: Sequence[Tool] = (),
        reads_calls: bool = False,
        is_continued: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = [end for end in answer_format.ends if end] if answer_format.has_special_marks else []
        self._held = ""  # text that may be a part of what ends the answer
        self._calls = None
        if reads_calls and answer_format.calls is not None:
            self._calls = reader_of(answer_format.calls, answer_format.ends, tools)
        self._reasoning: ReasoningReader | None = None
        if answer_format.reasoning is not None:
            state = state_behind_prompt(answer_format.reasoning, tokenizer, prompt_ids, is_continued)
            self._reasoning = ReasoningReader(answer_format.reasoning, state)
        self._begin_ids: list[int] = []  # tokens up to the end of the reasoning
        self.num_reasoning_tokens = 0

    @property
    def num_calls(self) -> int:
        """Calls that were returned."""
        return 0 if self._calls is None else int(self._calls.num_calls)

    @property
    def is_plain(self) -> bool:
        """Whether all text to come is content."""
        return self._calls is None and not self._ends and (self._reasoning is None or self._reasoning.is_plain)

    def add(self, text: str, token_ids: Sequence[int], is_last: bool = False) -> AnswerPart:
        """Add the next text and its tokens; return what is certain now."""
        reasoning = ""
        text = self._without_end(text, is_last)
        if self._reasoning is not None:
            had_ended = self._reasoning.has_ended
            reasoning, text = self._reasoning.add(text, is_last)
            if not had_ended:
                self._count_tokens(token_ids, self._reasoning)
        if self._calls is None:
            return AnswerPart(reasoning, text, [])
        content, calls = self._calls.add(text, is_last)
        return AnswerPart(reasoning + self._calls.reasoning, content, calls)

    def _count_tokens(self, token_ids: Sequence[int], reader: ReasoningReader) -> None:
        num_before = len(self._begin_ids)
        self._begin_ids += token_ids
        if not reader.has_begun:
            return
        self.num_reasoning_tokens = len(self._begin_ids)
        if reader.has_ended and self._tokenizer is not None:
            decode = self._tokenizer.decode
            counts = range(num_before + 1, len(self._begin_ids))
            end = reader.reasoning.end
            place = bisect_left(counts, True, key=lambda count: end in str(decode(self._begin_ids[:count])))
            self.num_reasoning_tokens = num_before + 1 + place

    def _without_end(self, text: str, is_last: bool) -> str:
        """Return the text that is certain: without the token that ends the answer, where texts have special ones."""
        self._held += text
        if is_last:
            return without_end(self._held, self._ends)
        longest = max((overlap(self._held, end) for end in self._ends), default=0)
        certain = self._held[: len(self._held) - longest]
        self._held = self._held[len(certain) :]
        return certain
