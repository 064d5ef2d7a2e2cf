"""How prompts become token ids: :class:`PromptOptions`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from specdec_fast.errors import ConfigError
from specdec_fast.sampling_params import SamplingParams

# Arguments of ``apply_chat_template`` that this library sets, or that have a field of their own below.
_NOT_FOR_TEMPLATES = {
    "conversation",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}


@dataclass(frozen=True)
class PromptOptions:
    """How the prompts of one call become token ids; given as keywords of ``generate``, ``stream`` and ``encode``.

    The names are those of vLLM. Prompts of token ids ignore all of them.

    Attributes:
        add_special_tokens: whether the tokenizer adds its special tokens, such as BOS. None: it adds them to a text
            that does not begin with the text of its BOS token; a text that does came from a chat template, which wrote
            every special token. It adds none to messages, because the template writes them; True adds them to what the
            template wrote.
        chat_template: a Jinja template for messages (or the name of one of the tokenizer's); None: the tokenizer's own.
        chat_template_kwargs: variables for the template, such as ``{"enable_thinking": False}``.
        add_generation_prompt: end messages with what opens the assistant's answer. None: unless
            ``continue_final_message``.
        continue_final_message: leave the last message open, so that the model continues it instead of answering it.
        tools: functions or JSON schemas for the template.

    Raises:
        ConfigError: a value has the wrong type, or two contradict each other.
    """

    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if self.chat_template_kwargs is None:
            object.__setattr__(self, "chat_template_kwargs", {})
        kinds: tuple[tuple[str, Any, str], ...] = (
            ("add_special_tokens", (bool, type(None)), "True, False or None"),
            ("chat_template", (str, type(None)), "a Jinja template, or None for the tokenizer's own"),
            ("chat_template_kwargs", Mapping, "a dictionary"),
            ("add_generation_prompt", (bool, type(None)), "True, False or None"),
            ("continue_final_message", bool, "True or False"),
            ("tools", (list, tuple, type(None)), "a list, or None"),
        )
        for name, kind, expected in kinds:
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name}={getattr(self, name)!r:.80}: expected {expected}.")
        if self.continue_final_message and self.add_generation_prompt:
            raise ConfigError(
                "continue_final_message and add_generation_prompt are both True; the last message is either continued "
                "or answered."
            )
        if taken := sorted(_NOT_FOR_TEMPLATES & set(self.chat_template_kwargs)):
            raise ConfigError(f"chat_template_kwargs has {', '.join(taken)}; expected variables of the template only.")

    @property
    def opens_answer(self) -> bool:
        """Whether messages end with what opens the assistant's answer."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any]) -> PromptOptions:
        """Build options from keyword arguments.

        Raises:
            ConfigError: a keyword is unknown; the message lists the known ones.
        """
        for name in keywords:
            if name not in PROMPT_KEYWORDS:
                raise unknown_keyword(name, PROMPT_KEYWORDS)
        return cls(**keywords)


PROMPT_KEYWORDS = tuple(option.name for option in fields(PromptOptions))
_REQUEST_KEYWORDS = {parameter.name for parameter in fields(SamplingParams)}


def unknown_keyword(name: str, known: Sequence[str]) -> ConfigError:
    """Return the error of a keyword that a call does not have: where it belongs, or similar and known ones."""
    if name in _REQUEST_KEYWORDS:
        return ConfigError(f"{name!r} belongs to a request; pass params=SamplingParams({name}=...).")
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return ConfigError(f"unknown keyword {name!r}.{hint} Known: {', '.join(known)}.")
