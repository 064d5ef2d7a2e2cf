"""Reads the caller's prompts, of every kind, and encodes each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

from specdec_fast.errors import ConfigError, InvalidPromptError
from specdec_fast.request.chat import (
    apply_chat_template,
    checked_messages,
    is_chat,
    is_one_chat,
    is_tokenized,
    renders_apart,
    surrogate_in,
)
from specdec_fast.request.detokenizer import lone_surrogate, tokenizer_failures
from specdec_fast.request.prompt_options import PromptOptions

_BYTES = (bytes, bytearray, memoryview)


def as_prompt_list(prompts: Any) -> list[Any]:
    """Return the prompts of a call: a list of prompts, one prompt, or the mapping that a tokenizer returns.

    One prompt is a string, a flat list of ids, or a flat list of messages. So a list of mappings is one chat, unless
    one has ``input_ids`` and no ``role``; a list of lists of messages is one chat per list. An empty list is no prompt;
    an empty tensor of numbers is one prompt without tokens.

    Raises:
        ConfigError: ``prompts`` is none of these, or a padded tensor without its attention mask.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        return _unpadded(prompts)
    if isinstance(prompts, (*_BYTES, set, frozenset)):
        hint = "decode() it to a string" if isinstance(prompts, _BYTES) else "it has no order; pass a list"
        raise ConfigError(f"prompts is a {type(prompts).__name__}: {hint}.")
    dimensions = getattr(prompts, "ndim", None)
    if dimensions == 2:
        raise ConfigError(
            "prompts is a 2-D tensor, which does not say which ids are padding; pass one list of token ids per prompt, "
            "or the tokenizer's whole result (input_ids and attention_mask)."
        )
    try:
        items = as_list(prompts) if dimensions == 1 else list(prompts)
    except TypeError:
        raise ConfigError(
            f"prompts is a {type(prompts).__name__}; expected a list of strings, of lists of token ids, "
            "or of lists of messages."
        ) from None
    is_ids = _is_vector(prompts) or (items and all(isinstance(item, Integral) for item in items))
    return [items] if is_ids or is_one_chat(items) else items


def _is_vector(value: Any) -> bool:
    """Return whether a value is a 1-D tensor or array of numbers; an array of texts or lists is none."""
    return getattr(value, "ndim", None) == 1 and getattr(value.dtype, "kind", "i") in "iuf"


def _unpadded(encoding: Mapping[str, Any]) -> list[Any]:
    if not is_tokenized(encoding):
        hint = "put the message into a list" if "role" in encoding else "expected a list, or input_ids"
        raise ConfigError(f"prompts is a mapping of {', '.join(map(repr, encoding))}; {hint}.")
    ids = as_list(encoding["input_ids"])
    mask = as_list(encoding.get("attention_mask"))
    is_list = isinstance(ids, (list, tuple))
    if _is_vector(encoding["input_ids"]) or (is_list and ids and isinstance(ids[0], Integral)):
        ids = [ids]
        mask = None if mask is None else [mask]
    if not is_list or not isinstance(mask, (list, tuple, type(None))):
        kinds = f"input_ids is a {type(ids).__name__}, attention_mask a {type(mask).__name__}"
        raise ConfigError(f"{kinds}; expected lists of prompts, or tensors.")
    if mask is None:
        return list(ids)
    if len(mask) != len(ids):
        raise ConfigError(f"attention_mask has {len(mask)} rows, input_ids has {len(ids)}; expected as many.")
    return [_without_padding(i, *(as_list(row) for row in rows)) for i, rows in enumerate(zip(ids, mask, strict=True))]


def _without_padding(index: int, ids: Any, mask: Any) -> list[Any]:
    lists = isinstance(ids, (list, tuple)) and isinstance(mask, (list, tuple))
    if not lists or len(ids) != len(mask) or any(not isinstance(bit, Integral) or bit not in (0, 1) for bit in mask):
        raise ConfigError(
            f"attention_mask of prompt {index} is {mask!r:.80}; expected one 0 or 1 for each of its input_ids, "
            f"{ids!r:.80}."
        )
    return [token for token, is_kept in zip(ids, mask, strict=True) if is_kept]


def as_list(value: Any) -> Any:
    """Return a tensor or an array as nested lists, other values unchanged. Raises ConfigError on the meta device."""
    try:
        return value.tolist() if hasattr(value, "tolist") else value
    except Exception as error:
        raise ConfigError(f"a {type(value).__name__} among the prompts cannot be read: {error}") from error


def encode_prompt(
    tokenizer: Any | None,
    prompt: Any,
    options: PromptOptions,
    expect_text: Callable[[str], None],
) -> list[int]:
    """Return the token ids of one prompt: a string, ids, a list of messages, or a tokenizer's result for one prompt.

    ``expect_text`` is called with a text before it is encoded, which may take seconds; it may raise. Raises a subclass
    of RequestError that says why the prompt has no token ids.
    """
    if isinstance(prompt, str):
        expect_text(prompt)
        return _encode_text(tokenizer, prompt, options.add_special_tokens)
    if isinstance(prompt, Mapping):
        return _as_ids(_only_row(prompt))
    if not is_chat(prompt):
        return _as_ids(prompt)
    messages = checked_messages(prompt)
    if options.add_special_tokens or renders_apart(tokenizer, options):
        text = apply_chat_template(tokenizer, messages, options, tokenize=False)
        if not text:
            return []
        expect_text(text)
        return _encode_text(tokenizer, text, bool(options.add_special_tokens), surrogate_in(messages))
    encoded = apply_chat_template(tokenizer, messages, options, tokenize=True)
    return _as_ids(encoded["input_ids"] if isinstance(encoded, Mapping) else encoded)


def _encode_text(
    tokenizer: Any | None, text: str, add_special_tokens: bool | None, wrong_part: str | None = None
) -> list[int]:
    """Encode a text; ``wrong_part`` names what of it cannot be encoded, if that is known."""
    if not text:
        raise InvalidPromptError("the prompt is an empty string; pass at least one character.")
    if tokenizer is None:
        raise InvalidPromptError(
            "the prompt is a string, but no tokenizer is known for this target; pass tokenizer=..., or token ids."
        )
    failure = f"the tokenizer cannot encode {wrong_part or 'the prompt'}"
    if wrong_part is None and (hint := lone_surrogate(text)) is not None:
        failure += f", {hint}"
    with tokenizer_failures(InvalidPromptError, failure):
        if add_special_tokens is not None:
            return _as_ids(tokenizer(text, add_special_tokens=add_special_tokens).input_ids)
        bos_text = getattr(tokenizer, "bos_token", None)
        if bos_text and text.startswith(bos_text):
            token_ids = _as_ids(tokenizer(text, add_special_tokens=False).input_ids)
            if token_ids[:1] == [tokenizer.bos_token_id]:
                return token_ids
        return _as_ids(tokenizer(text).input_ids)


def encode_words(tokenizer: Any, words: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the token ids of each word, without special tokens. Raises InvalidPromptError if a word has none."""
    found = []
    for word in words:
        with tokenizer_failures(InvalidPromptError, "the tokenizer failed"):
            token_ids = _as_ids(tokenizer(word, add_special_tokens=False).input_ids)
        if not token_ids:
            raise InvalidPromptError("it has no tokens")
        found.append(tuple(token_ids))
    return found


def _only_row(encoding: Mapping[str, Any]) -> Any:
    if not is_tokenized(encoding):
        raise InvalidPromptError(
            f"the prompt is a mapping of {', '.join(map(repr, encoding))}; expected a list of messages, such as "
            '[{"role": "user", "content": "..."}], or the result of a tokenizer (input_ids).'
        )
    try:
        rows = _unpadded(encoding)
    except ConfigError as error:
        raise InvalidPromptError(str(error)) from error
    if len(rows) > 1:
        raise InvalidPromptError(f"the prompt is the result of a tokenizer for {len(rows)} texts; expected one.")
    return rows[0] if rows else []


def _as_ids(prompt: Any) -> list[int]:
    try:
        ids: Any = None if isinstance(prompt, _BYTES) else as_list(prompt)
    except ConfigError as error:
        raise InvalidPromptError(str(error)) from error
    is_list = isinstance(ids, Sequence)  # a range is one, too
    if not is_list or not all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
        kind = type(prompt).__name__
        hint = "; decode() it first" if isinstance(prompt, _BYTES) else ""
        raise InvalidPromptError(
            f"the prompt is a {kind} that is neither a string, nor a flat list of token ids, nor a list of "
            f"messages{hint}."
        )
    return [int(token) for token in ids]
