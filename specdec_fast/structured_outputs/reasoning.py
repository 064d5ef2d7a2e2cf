"""How a model writes what it thinks before its answer: :class:`Reasoning`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, TypeVar

from specdec_fast.errors import InvalidParamsError
from specdec_fast.structured_outputs.compiling import special_ids

_MOST_MARK_CHARACTERS = 256
_MOST_SPACE_TOKENS = 32  # behind a mark at the end of a prompt
MOST_REASONING_TOKENS = 2**31 - 1  # more than any text has
_Text = TypeVar("_Text", str, bytes)
_SPACE_BEFORE_ANSWER = r"\s{0,20}"  # models write line ends behind their reasoning


class ReasoningState(Enum):
    """Where the end of a prompt leaves the model."""

    AHEAD = "ahead"  # the model may begin to reason
    BEGUN = "begun"  # the prompt has begun the reasoning
    ENDED = "ended"  # the prompt has ended it: the answer begins at once


@dataclass(frozen=True)
class Reasoning:
    """The texts between which a model reasons before its answer, and how long it may.

    Attributes:
        begin: the text with which reasoning begins. The model writes it first, or the chat template does at the end of
            the prompt. A text that does not begin with it, behind such a prompt, is an answer from its first token on.
        end: the text that ends it.
        max_tokens: most tokens between both texts; behind them only the end may follow. None: no limit of its own.

    Raises:
        InvalidParamsError: a text is empty or has more than 256 characters, or ``max_tokens`` is negative.
    """

    begin: str = "<think>"
    end: str = "</think>"
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("begin", "end"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip() or len(value) > _MOST_MARK_CHARACTERS:
                raise _error(f"{name}={value!r:.80}; expected a text of 1 to {_MOST_MARK_CHARACTERS} characters")
        most = self.max_tokens
        is_count = isinstance(most, int) and not isinstance(most, bool) and 0 <= most <= MOST_REASONING_TOKENS
        if most is not None and not is_count:
            raise _error(f"max_tokens={most!r:.80}; expected an integer from 0 to {MOST_REASONING_TOKENS}, or None")

    @classmethod
    def of(cls, value: Any) -> Reasoning:
        """Accept an instance, the name of a format, or a mapping of the fields.

        Raises:
            InvalidParamsError: the value is none of these, or a field or name is unknown or wrong.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            if value not in REASONING_FORMATS:
                raise _error(f"{value!r:.80} is no format; expected one of {', '.join(REASONING_FORMATS)}, or texts")
            return REASONING_FORMATS[value]
        if not isinstance(value, Mapping):
            kind = type(value).__name__
            raise _error(f"it is a {kind}; expected the name of a format, or fields such as {{'end': '</think>'}}")
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in value if name not in known]:
            raise _error(f"unknown field {unknown[0]!r:.80}; expected one of {', '.join(known)}")
        return cls(**value)

    def state_behind(self, prompt: str, is_continued: bool = False) -> ReasoningState:
        """Return where a prompt leaves the model.

        Args:
            prompt: its text, or the end of it.
            is_continued: whether the model continues the last message, whose reasoning may be in its midst.
        """
        text = prompt.rstrip()
        begin = self.begin.strip()
        if text.endswith(self.end.strip()):
            return ReasoningState.ENDED
        if text.endswith(begin):
            return ReasoningState.BEGUN
        if is_continued and text.rfind(begin) > text.rfind(self.end.strip()):
            return ReasoningState.BEGUN
        return ReasoningState.AHEAD

    def grammar(self, state: ReasoningState) -> str | None:
        """Return what may stand before an answer, a format of xgrammar's structural tags; None if nothing may.

        It has no limit of tokens; ``ReasoningMask`` keeps that.
        """
        if state is ReasoningState.ENDED:
            return None
        elements: list[dict[str, Any]] = [
            {"type": "any_text", "excludes": [self.end]},
            {"type": "const_string", "value": self.end},
            {"type": "regex", "pattern": _SPACE_BEFORE_ANSWER},
        ]
        if state is ReasoningState.AHEAD:
            elements.insert(0, {"type": "const_string", "value": self.begin})
        reasoning = {"type": "sequence", "elements": elements}
        return json.dumps(reasoning if state is ReasoningState.BEGUN else {"type": "optional", "content": reasoning})

    def split(self, text: str, state: ReasoningState = ReasoningState.AHEAD) -> tuple[str, str]:
        """Return the reasoning and the answer of a whole text, both without whitespace around the reasoning.

        Args:
            text: what the model has written.
            state: where the prompt left it.
        """
        reader = ReasoningReader(self, state)
        return reader.add(text, is_last=True)


class ReasoningReader:
    """Takes a text in pieces, and divides it into reasoning and answer as it comes.

    Whitespace around the reasoning and before the answer that follows it belongs to neither.

    Args:
        reasoning: the texts that mark it.
        state: where the prompt left the model.
    """

    def __init__(self, reasoning: Reasoning, state: ReasoningState) -> None:
        self.reasoning = reasoning
        self._state = state
        self._held = ""  # text of which it is not certain yet what it is
        self._has_reasoning = False  # whether some was returned
        self._had_reasoning = False  # whether the text ended it
        self._has_answer = False

    @property
    def has_begun(self) -> bool:
        """Whether the text, or the prompt, has begun to reason."""
        return self._state is ReasoningState.BEGUN or self._had_reasoning

    @property
    def has_ended(self) -> bool:
        """Whether there is no more reasoning to come."""
        return self._state is ReasoningState.ENDED

    @property
    def is_plain(self) -> bool:
        """Whether all text to come is the answer's as it is."""
        return self.has_ended and (self._has_answer or not self._had_reasoning)

    def add(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """Add the next text; return the reasoning and the part of the answer that are certain now."""
        self._held += text
        if self._state is ReasoningState.AHEAD:
            self._look_for_begin(is_last)
        reasoning = self._take_reasoning(is_last) if self._state is ReasoningState.BEGUN else ""
        return reasoning, self._take_answer() if self._state is ReasoningState.ENDED else ""

    def _look_for_begin(self, is_last: bool) -> None:
        begun = self._held.lstrip()
        begin = self.reasoning.begin.lstrip()
        if begun.startswith(begin):
            self._held = begun[len(begin) :]
            self._state = ReasoningState.BEGUN
        elif is_last or not begin.startswith(begun):
            self._state = ReasoningState.ENDED

    def _take_reasoning(self, is_last: bool) -> str:
        end = self.reasoning.end
        before, mark, behind = self._held.partition(end)
        if mark:
            self._held = behind
            self._state = ReasoningState.ENDED
            self._had_reasoning = True
        else:
            certain = len(before) if is_last else len(before) - overlap(before, end)
            self._held = before[certain:]
            before = before[:certain]
            if not is_last:  # whitespace is shown when more reasoning follows
                shown = before.rstrip()
                self._held = before[len(shown) :] + self._held
                before = shown
        found = before.rstrip() if self._has_reasoning else before.strip()
        self._has_reasoning = self._has_reasoning or bool(found)
        return found

    def _take_answer(self) -> str:
        answer = self._held.lstrip() if self._had_reasoning and not self._has_answer else self._held
        self._has_answer = self._has_answer or bool(answer)
        self._held = ""
        return answer


def special_marks(reasoning: Reasoning, tokenizer: Any) -> list[str]:
    """Return the marks of reasoning that have special tokens, which a text may leave out.

    Raises ValueError if a mark has no tokens, and whatever the tokenizer raises.
    """
    special = special_ids(tokenizer)
    found = []
    for mark in (reasoning.begin, reasoning.end):
        token_ids = list(tokenizer(mark, add_special_tokens=False).input_ids)
        if not token_ids:
            raise ValueError(f"{mark!r:.80} has no tokens")
        if not special.isdisjoint(token_ids):
            found.append(mark)
    return found


def state_behind_prompt(
    reasoning: Reasoning, tokenizer: Any | None, prompt_ids: list[int], is_continued: bool = False
) -> ReasoningState:
    """Return where a prompt of token ids leaves the model; a prompt without texts has begun no reasoning."""
    if tokenizer is None:
        return ReasoningState.AHEAD
    marks = (reasoning.begin, reasoning.end)
    if is_continued:  # whether the message is in the midst of its reasoning, its whole text says
        end_of_prompt = _last_message(tokenizer, prompt_ids, marks)
    else:  # a mark stands at the end, and a token may have as little as a byte of it
        end_of_prompt = prompt_ids[-_MOST_SPACE_TOKENS - max(len(mark.encode()) for mark in marks) :]
    return reasoning.state_behind(str(tokenizer.decode(end_of_prompt)), is_continued)


def _last_message(tokenizer: Any, prompt_ids: list[int], marks: tuple[str, str]) -> list[int]:
    """Return the ids behind the last special token that is no part of a mark: most templates divide messages by them.

    Earlier messages may speak of marks.
    """
    special = special_ids(tokenizer) if hasattr(tokenizer, "all_special_ids") else set()
    for place in range(len(prompt_ids), 0, -1):
        token = prompt_ids[place - 1]
        if token in special and not any(str(tokenizer.decode([token])) in mark for mark in marks):
            return prompt_ids[place:]
    return prompt_ids


def overlap(text: _Text, mark: _Text) -> int:
    """Return how many characters, or bytes, at the end of a text begin a mark, or are all of it."""
    sizes = range(min(len(mark), len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


_THINK = Reasoning()
# By vLLM's names of its parsers; most models write the same tags.
REASONING_FORMATS: dict[str, Reasoning] = {
    "think": _THINK,
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "kimi_k2": _THINK,
    "minimax_m2": _THINK,
    "nemotron_v3": _THINK,
    "olmo3": _THINK,
    "qwen3": _THINK,
    "gemma4": Reasoning("<|channel>thought\n", "<channel|>"),
    "mistral": Reasoning("[THINK]", "[/THINK]"),
    "seed_oss": Reasoning("<seed:think>", "</seed:think>"),
}
# What a chat template says whose model reasons in a format; the first that is found.
_IN_TEMPLATES = (
    (r"<\|channel>", "gemma4"),
    (r"\[THINK\]", "mistral"),
    (r"</seed:think>", "seed_oss"),
    (r"</think>", "think"),
)


def reasoning_of_template(chat_template: str | None) -> Reasoning | None:
    """Return how the model of a chat template reasons; None if the template shows no known format."""
    for pattern, name in _IN_TEMPLATES:
        if re.search(pattern, chat_template or ""):
            return REASONING_FORMATS[name]
    return None


def _error(message: str) -> InvalidParamsError:
    return InvalidParamsError(f"reasoning: {message}.")
