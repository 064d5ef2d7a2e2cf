"""Rules, per kind of tokenizer, for the part of a text that may change when tokens are added."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

_DIGITS = "0123456789abcdefABCDEF"
_BYTE_TOKENS = [
    f"<0x{high}{low}>" for high in _DIGITS + "+" for low in _DIGITS
]  # tokens that ByteFallback decodes to a byte
# Steps of a decoder that depend on one token alone, and on whether it is the first or the last one.
_BY_TOKEN = {"Replace", "Strip", "Metaspace", "WordPiece", "BPEDecoder"}
_JOINS = {"Fuse", "ByteLevel"}  # steps that join all tokens to one text


@dataclass(frozen=True)
class DecodingRule:
    """The part of a text that a tokenizer's ``decode`` may change when tokens are added."""

    waits: bool = False  # whether the tokenizer is unknown, so that the whole text may change until the last token
    # ids of single bytes. A run of them is decoded together, so one more byte may change the whole run
    # (``ByteFallback``).
    byte_ids: frozenset[int] = frozenset()
    special_ids: frozenset[int] = frozenset()  # ids that have no text
    backend: Any = None  # the ``tokenizers.Tokenizer`` if one decodes; it ignores ids that it does not know
    # whether spaces before punctuation are removed from the text (``clean_up_tokenization_spaces``)
    cleans: bool = False

    def visible(self, token_ids: list[int]) -> list[int]:
        """Return the ids that have text."""
        if self.backend is None:
            return token_ids
        known = self.backend.id_to_token
        return [token for token in token_ids if token not in self.special_ids and known(token) is not None]


_KNOWN: WeakKeyDictionary[Any, tuple[int, DecodingRule]] = WeakKeyDictionary()


def rule_of(tokenizer: Any) -> DecodingRule:
    """Return the rule of a tokenizer.

    One that is not of transformers is assumed to only append text when tokens are added, except after the bytes of an
    incomplete character. One of transformers waits if it is written in Python, or if its decoder is not listed here.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return DecodingRule(waits=isinstance(tokenizer, PreTrainedTokenizer))
    size, rule = _KNOWN.get(tokenizer, (-1, DecodingRule()))
    if size != len(tokenizer):  # a new tokenizer, or one that got more tokens
        rule = _rule_of_fast(tokenizer)
        _KNOWN[tokenizer] = (len(tokenizer), rule)
    return rule


def _rule_of_fast(tokenizer: Any) -> DecodingRule:
    kind = type(tokenizer)
    backend = tokenizer.backend_tokenizer
    is_plain = (
        kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
        and kind.clean_up_tokenization is PreTrainedTokenizerBase.clean_up_tokenization
        and not {"decode", "_decode", "clean_up_tokenization"} & set(vars(tokenizer))
    )
    steps = steps_of(backend.decoder)  # none: tokens joined by spaces
    if not is_plain or not _is_known(steps):
        return DecodingRule(waits=True)
    special = frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special)
    byte_ids: frozenset[int] = frozenset()
    if "ByteFallback" in {step["type"] for step in steps}:
        ids = map(backend.token_to_id, _BYTE_TOKENS)
        byte_ids = frozenset(token for token in ids if token is not None) - special
    return DecodingRule(False, byte_ids, special, backend, _cleans(tokenizer))


def steps_of(component: Any) -> list[dict[str, Any]]:
    """Return the states of the steps of a decoder, normalizer or pre-tokenizer of ``tokenizers``; none of None."""
    return [] if component is None else _flat(json.loads(component.__getstate__()))


def _flat(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    parts = next(value for value in state.values() if isinstance(value, list))
    return [step for part in parts for step in _flat(part)]


def _is_known(steps: list[dict[str, Any]]) -> bool:
    """Return whether adding tokens changes only the end of a text."""
    names = [step["type"] for step in steps]
    joined = next((i for i, name in enumerate(names) if name in _JOINS), len(names))
    before = names[:joined]
    after = steps[joined + 1 :]
    # The steps after the join change the whole text; only one that strips its beginning is known.
    strips = all(step["type"] == "Fuse" or (step["type"] == "Strip" and step["stop"] == 0) for step in after)
    return set(before) <= _BY_TOKEN | {"ByteFallback"} and strips


def _cleans(tokenizer: Any) -> bool:
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    forced = tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    return forced or type(tokenizer.backend_tokenizer.model).__name__ != "BPE"
