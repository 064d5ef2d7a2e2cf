"""Chat prompts: messages, checked and written out by a tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec_fast.errors import (
    ChatTemplateError,
    InvalidPromptError,
    MissingChatTemplateError,
    MissingTokenizerError,
)
from specdec_fast.request.detokenizer import is_failure, lone_surrogate
from specdec_fast.request.prompt_options import PromptOptions
from specdec_fast.request.time_limit import run_within

TEMPLATE_SECONDS = 10.0  # that a chat template may take; usual ones take milliseconds
_EXPECTED = 'expected {"role": "user", "content": "..."}'


def is_chat(prompt: Any) -> bool:
    """Return whether a prompt is a list of messages, perhaps with wrong ones among them."""
    return isinstance(prompt, (list, tuple)) and any(isinstance(item, Mapping) for item in prompt)


def is_tokenized(prompt: Mapping[str, Any]) -> bool:
    """Return whether a mapping is a tokenizer's result. With a role it is a message, which may have any other field."""
    return "input_ids" in prompt and "role" not in prompt


def is_one_chat(prompts: Any) -> bool:
    """Return whether a list of prompts is a single list of messages: mappings only, and no results of a tokenizer."""
    is_list = isinstance(prompts, (list, tuple)) and len(prompts) > 0
    return is_list and all(isinstance(item, Mapping) and not is_tokenized(item) for item in prompts)


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return copies of messages whose contents are strings, or None for an assistant's.

    A message has ``role`` and ``content`` (a string, or text parts, which are joined by newlines). Raises
    InvalidPromptError if one is wrong.
    """
    return [_message(index, message) for index, message in enumerate(messages)]


def renders_apart(tokenizer: Any, options: PromptOptions) -> bool:
    """Return whether ``apply_chat_template`` can make a text whose token ids, without special tokens, are the prompt.

    Tokenizers with an ``apply_chat_template`` of their own need not make ids this way. Nor does transformers if it
    tells special tokens in messages from those of the template (``sanitize_control_tokens``).
    """
    is_known = getattr(type(tokenizer), "apply_chat_template", None) is PreTrainedTokenizerBase.apply_chat_template
    is_own = "apply_chat_template" in vars(tokenizer) if is_known else True
    return not is_own and not options.chat_template_kwargs.get("sanitize_control_tokens")


def apply_chat_template(
    tokenizer: Any, messages: list[dict[str, Any]], options: PromptOptions, *, tokenize: bool
) -> Any:
    """Return what the tokenizer's ``apply_chat_template`` makes of ``checked_messages``: a text, or (``tokenize``) ids.

    Raises:
        InvalidPromptError: a message holds a character that the tokenizer cannot encode.
        MissingTokenizerError: no tokenizer is known.
        MissingChatTemplateError: the tokenizer has no chat template.
        ChatTemplateError: the template fails or takes too long.
    """
    if tokenizer is None:
        raise MissingTokenizerError(
            "the prompt is a list of messages, but no tokenizer is known for this target; pass tokenizer=..., or token "
            "ids."
        )
    keywords: dict[str, Any] = {"add_generation_prompt": options.opens_answer, "tokenize": tokenize}
    if options.continue_final_message:
        keywords["continue_final_message"] = True
    if options.chat_template is not None:
        keywords["chat_template"] = options.chat_template
    if options.tools:
        keywords["tools"] = list(options.tools)
    if lacks_chat_template(tokenizer, options.chat_template):
        raise MissingChatTemplateError(
            "the prompt is a list of messages, but the tokenizer has no chat template; pass chat_template=..., set "
            "tokenizer.chat_template, or pass the prompt as a string."
        )
    written = partial(_written, tokenizer, messages, keywords | dict(options.chat_template_kwargs))
    try:
        return run_within(TEMPLATE_SECONDS, written)
    except BaseException as error:  # a template raises errors of Jinja, and whatever its expressions raise
        if not is_failure(error):
            raise
        if tokenize and (hint := surrogate_in(messages)) is not None:
            apply_chat_template(tokenizer, messages, options, tokenize=False)  # raises if the template is what failed
            raise InvalidPromptError(f"the tokenizer cannot encode {hint}: {type(error).__name__}: {error}") from error
        raise ChatTemplateError(
            f"the chat template cannot write the messages: {type(error).__name__}: {error}; correct the messages, "
            "chat_template_kwargs or the template."
        ) from error


def _written(tokenizer: Any, messages: list[dict[str, Any]], keywords: dict[str, Any]) -> Any:
    """Return what the template makes of messages; the arguments of their tool calls are mappings, as most expect.

    OpenAI's API has them as JSON in a string. The templates of DeepSeek-V3 join that to a text, which a mapping fails.
    """
    with_mappings = [_with_mappings(message) for message in messages]
    try:
        return tokenizer.apply_chat_template(with_mappings, **keywords)
    except Exception:
        if with_mappings != messages:
            with suppress(Exception):
                return tokenizer.apply_chat_template(messages, **keywords)
        raise


def _with_mappings(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]} if isinstance(calls, list) else message


def _parsed_call(call: Any) -> Any:
    """Return a tool call whose arguments are a mapping, or the call itself if they are no JSON of an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        parsed = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):  # a model may have written anything
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call


def surrogate_in(messages: list[dict[str, Any]]) -> str | None:
    """Name the first message whose role or content has half of a surrogate pair; None if there is none."""
    for index, message in enumerate(messages):
        for name in ("role", "content"):
            if (hint := lone_surrogate(message.get(name, ""))) is not None:
                return f"the {name} of message {index}, {hint}"
    return None


def lacks_chat_template(tokenizer: Any, chat_template: str | None = None) -> bool:
    """Return whether a tokenizer, with a template if one is given, cannot write messages."""
    if not callable(getattr(tokenizer, "apply_chat_template", None)):
        return True
    # Tokenizers with a format of their own (mistral-common) apply it without a template.
    takes_template = getattr(type(tokenizer), "get_chat_template", None) is PreTrainedTokenizerBase.get_chat_template
    return takes_template and not (chat_template or tokenizer.chat_template)


def _message(index: int, message: Any) -> dict[str, Any]:
    """Return a copy of a message whose content is a string, without fields that are None.

    Recent versions of transformers leave these fields out themselves. Raises InvalidPromptError if the message has no
    role, or no content that a template of texts can write.
    """
    if not isinstance(message, Mapping):
        raise InvalidPromptError(f"message {index} is a {type(message).__name__}; {_EXPECTED}.")
    role = message.get("role")
    content = message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidPromptError(f"message {index} has the role {role!r:.80}{_hint(message)}; {_EXPECTED}.")
    if isinstance(content, (list, tuple)):
        content = "\n".join(_part_text(index, number, part) for number, part in enumerate(content))
    # An answer may consist of tool calls alone.
    if not isinstance(content, str) and not (content is None and role == "assistant"):
        raise InvalidPromptError(f"message {index} has the content {content!r:.80}; {_EXPECTED}.")
    fields = {**message, "content": content}
    return {name: value for name, value in fields.items() if value is not None}


def _hint(message: Mapping[str, Any]) -> str:
    """Return what to do with a prompt of vLLM, which is a mapping; empty for a message."""
    given = [key for key in ("prompt", "prompt_token_ids") if key in message and "content" not in message]
    return f" and a field {given[0]!r}, whose value is a prompt by itself: pass that" if given else ""


def _part_text(index: int, number: int, part: Any) -> str:
    is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
    if not is_text:
        kind = f"type {part.get('type')!r:.80}" if isinstance(part, Mapping) else f"a {type(part).__name__}"
        raise InvalidPromptError(
            f'part {number} of message {index} is {kind}; expected {{"type": "text", "text": "..."}}: only texts are '
            "supported."
        )
    return part["text"]
