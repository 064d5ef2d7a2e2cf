"""Which format of calls a model has, and the texts of the tokens that end its answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specdec_fast.errors import ConfigError
from specdec_fast.server.tool_calls.formats import FORMATS, ToolFormat, format_of_template


class CallReading:
    """How calls in a model's answers are read.

    Args:
        name: of a format, a key of ``FORMATS``; None: the one that the tokenizer's chat template shows.
        tokenizer: the target's; None if none is known.
        eos_ids: the target's EOS ids.
        chat_template: in place of the tokenizer's; None: the tokenizer's.

    Attributes:
        format: of calls; None if it is not known.
        ends: texts of the tokens that end an answer.

    Raises:
        ConfigError: there is no format of this name.
    """

    def __init__(
        self, name: str | None, tokenizer: Any | None, eos_ids: Iterable[int], chat_template: str | None = None
    ) -> None:
        expect_format(name)
        template = chat_template or getattr(tokenizer, "chat_template", None) or ""
        self.format: ToolFormat | None = FORMATS[name]() if name else format_of_template(str(template))
        decode = getattr(tokenizer, "decode", None)
        if self.format is not None and _special_texts(tokenizer).intersection(self.format.marks):
            self.format.has_special_tokens = True
        self.ends = [str(decode([token])) for token in eos_ids] if callable(decode) and self.format is not None else []


def _special_texts(tokenizer: Any | None) -> set[str]:
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {word.content for word in added.values() if word.special}


def expect_format(name: str | None) -> None:
    """Raise ConfigError unless a name is that of a format, or None."""
    if name is not None and name not in FORMATS:
        raise ConfigError(f"tool_call_parser={name!r:.80}: expected one of {', '.join(FORMATS)}, or None.")
