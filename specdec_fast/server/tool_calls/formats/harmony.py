"""The format of gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from specdec_fast.server.tool_calls.formats.base import Taken, Tool, ToolCall, ToolFormat
from specdec_fast.server.tool_calls.formats.tag_elements import json_tag, sequence, text_element


class HarmonyFormat(ToolFormat):
    """``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``: gpt-oss.

    An answer consists of messages: what is for the user in the channel ``final``, or in ``commentary`` without a
    recipient; reasoning in ``analysis``. A message ends with a special token.
    """

    marks = ("<|channel|>", "<|start|>")
    has_special_tokens = True
    reads_every_answer = True
    head = re.compile(r"(?:<\|start\|>assistant)?(?: to=([^\s<]+))?\s*<\|channel\|>(\w+)(?: to=([^\s<]+))?[^<]*"
                      r"(?:<\|constrain\|>\w+)?\s*<\|message\|>")  # fmt: skip
    ends = ("<|end|>", "<|call|>", "<|return|>")

    def take(self, text: str, is_last: bool, tools: Sequence[Tool] = ()) -> Taken | None:
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
        return self._behind_reasoning(sequence(text_element("<|channel|>final<|message|>"), element))

    def _behind_reasoning(self, element: dict[str, Any]) -> dict[str, Any]:
        reasoning = sequence(
            text_element("<|channel|>analysis<|message|>"),
            {"type": "any_text", "excludes": ["<|end|>", "<|channel|>", "<|start|>", "<|message|>"]},
            text_element("<|end|><|start|>assistant"),
        )
        return sequence({"type": "optional", "content": reasoning}, element)

    def free_text(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        triggers = ["<|channel|>commentary to="]
        return {"type": "triggered_tags", "triggers": triggers, "tags": [self._tag(tool) for tool in tools]}

    def _tag(self, tool: Tool) -> dict[str, Any]:
        begin = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
        return json_tag(begin, tool.parameters, "")
