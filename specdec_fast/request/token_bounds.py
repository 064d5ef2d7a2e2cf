"""A lower bound on the number of tokens of a text, without tokenising it, which may take seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdec_fast.request.token_decoders import steps_of

# Steps that remove no character, and join none, except that NFC composes characters, and that a step may be set to
# remove what it finds.
_NORMALIZERS = {"ByteLevel", "NFC", "Prepend", "Replace"}
_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}
_MOST_COMPOSED = 4  # characters that NFC composes to one: the longest canonical decomposition of Unicode
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}  # of byte fallback


@dataclass(frozen=True)
class _Bound:
    """How many characters of a text one token stands for, at most."""

    characters: int  # after normalisation
    composes: bool  # whether normalisation may make fewer characters of a text that is not ASCII
    strips: bool  # whether some token also swallows any number of spaces around it


_KNOWN: WeakKeyDictionary[Any, tuple[int, _Bound | None]] = WeakKeyDictionary()


def least_tokens(tokenizer: Any, text: str) -> int:
    """Return a number of tokens that a text has at least, special tokens not counted; 0 if nothing is known.

    Something is known of fast tokenizers that are plain BPE over bytes, or with byte fallback, and whose other steps
    remove no character. Other tokenizers may drop characters, or make one unknown token of a long word.
    """
    bound = _bound_of(tokenizer)
    if bound is None:
        return 0
    num_characters = len("".join(text.split())) if bound.strips else len(text)
    each = bound.characters * (_MOST_COMPOSED if bound.composes and not text.isascii() else 1)
    return -(-num_characters // each)


def _bound_of(tokenizer: Any) -> _Bound | None:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    size, bound = _KNOWN.get(tokenizer, (-1, None))
    if size != len(tokenizer):  # a new tokenizer, or one that got more tokens
        bound = _bound_of_fast(tokenizer) if _encodes_plainly(tokenizer) else None
        _KNOWN[tokenizer] = (len(tokenizer), bound)
    return bound


def _encodes_plainly(tokenizer: Any) -> bool:
    """Return whether nothing but the steps of ``tokenizers`` makes token ids of a text."""
    kind = type(tokenizer)
    return (
        kind.__call__ is PreTrainedTokenizerBase.__call__
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        and "_encode_plus" not in vars(tokenizer)
    )


def _bound_of_fast(tokenizer: Any) -> _Bound | None:
    backend = tokenizer.backend_tokenizer
    try:
        normalizing = steps_of(backend.normalizer)
        splitting = steps_of(backend.pre_tokenizer)
    except Exception:  # a step written in Python has no state
        return None
    if not all(map(_keeps_length, normalizing)) or not all(map(_keeps_text, splitting)):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    is_byte_level = any(step["type"] == "ByteLevel" for step in normalizing + splitting)
    if not _knows_all_characters(backend.model, vocabulary, is_byte_level):
        return None
    added = backend.get_added_tokens_decoder().values()
    # Added tokens are found in the text before or after its normalisation.
    normalized = [] if backend.normalizer is None else [backend.normalizer.normalize_str(str(t)) for t in added]
    return _Bound(
        characters=max(map(len, [*vocabulary, *normalized])),
        composes=any(step["type"] == "NFC" for step in normalizing),
        strips=any(token.lstrip or token.rstrip for token in added),
    )


def _keeps_length(step: dict[str, Any]) -> bool:
    """Return whether a step of normalisation makes a text no shorter, except by composing characters."""
    if step["type"] == "Replace":
        replaced = step["pattern"].get("String")  # otherwise a regular expression
        return replaced is not None and len(step["content"]) >= len(replaced)
    return step["type"] in _NORMALIZERS


def _keeps_text(step: dict[str, Any]) -> bool:
    return step["type"] in _PRE_TOKENIZERS and step.get("behavior") != "Removed"


def _knows_all_characters(model: Any, vocabulary: dict[str, int], is_byte_level: bool) -> bool:
    """Return whether a model makes a token, or several, of every character; others drop or join unknown ones."""
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if is_byte_level:
        return vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    return model.byte_fallback and vocabulary.keys() >= _BYTE_TOKENS
