"""How a model writes what its answers consist of: reasoning, calls of tools, and the tokens that end them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specdec_fast.errors import ConfigError
from specdec_fast.server.tool_calls.formats import FORMATS, ToolFormat, format_of_template
from specdec_fast.structured_outputs.reasoning import REASONING_FORMATS, Reasoning, reasoning_of_template, special_marks

NO_REASONING = "none"


class AnswerFormat:
    """How a model writes its answers.

    Args:
        tokenizer: the target's; None if none is known.
        eos_ids: the target's EOS ids.
        tool_call_parser: a key of ``FORMATS``; None: the format that the chat template shows.
        reasoning_parser: a key of ``REASONING_FORMATS``; ``"none"``: reasoning stays in the content; None: the format
            that the chat template shows.
        chat_template: in place of the tokenizer's; None: the tokenizer's.

    Attributes:
        template: the chat template; empty if there is none.
        calls: how the model writes calls of tools; None if it is not known.
        reasoning: how it marks reasoning; None if it is not known, or if the format of calls reads it, too.
        has_special_marks: whether special tokens mark reasoning, which texts must then keep.
        ends: texts of the tokens that end an answer.

    Raises:
        ConfigError: there is no format of this name.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        eos_ids: Iterable[int],
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        _expect_name("tool_call_parser", tool_call_parser, FORMATS)
        _expect_name("reasoning_parser", reasoning_parser, (NO_REASONING, *REASONING_FORMATS))
        self.template = str(chat_template or getattr(tokenizer, "chat_template", None) or "")
        name = tool_call_parser
        self.calls: ToolFormat | None = FORMATS[name]() if name else format_of_template(self.template)
        if self.calls is not None and _special_texts(tokenizer).intersection(self.calls.marks):
            self.calls.has_special_tokens = True
        self.reasoning: Reasoning | None = None
        if reasoning_parser is not None:
            self.reasoning = REASONING_FORMATS.get(reasoning_parser)
        elif self.calls is None or not self.calls.reads_every_answer:
            self.reasoning = reasoning_of_template(self.template)
        self.has_special_marks = _has_special_marks(tokenizer, self.reasoning)
        decode = getattr(tokenizer, "decode", None)
        may_have_ends = self.calls is not None or self.has_special_marks
        self.ends = [str(decode([token])) for token in eos_ids] if may_have_ends and callable(decode) else []


def _special_texts(tokenizer: Any | None) -> set[str]:
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {word.content for word in added.values() if word.special}


def _has_special_marks(tokenizer: Any | None, reasoning: Reasoning | None) -> bool:
    """Return whether special tokens mark reasoning; False if a tokenizer of the caller's own cannot say it."""
    if reasoning is None or not callable(tokenizer):
        return False
    try:
        return bool(special_marks(reasoning, tokenizer))
    except Exception:  # it may raise anything, and it may have no special tokens
        return False


def _expect_name(option: str, name: str | None, known: Iterable[str]) -> None:
    if name is not None and name not in known:
        raise ConfigError(f"{option}={name!r:.80}: expected one of {', '.join(known)}, or None.")
