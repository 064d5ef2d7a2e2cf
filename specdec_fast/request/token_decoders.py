"""What each kind of tokenizer may still change in a text when further tokens come."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

_DIGITS = "0123456789abcdefABCDEF"
_BYTE_TOKENS = [f"<0x{high}{low}>" for high in _DIGITS + "+" for low in _DIGITS]  # what ByteFallback takes for a byte
# Steps of a decoder that look at a token alone, or at whether it is the first or the last one.
_BY_TOKEN = {"Replace", "Strip", "Metaspace", "WordPiece", "BPEDecoder"}
_JOINS = {"Fuse", "ByteLevel"}  # steps after which there is one text


@dataclass(frozen=True)
class DecodingRule:
    """What a tokenizer's ``decode`` may change in the text of some tokens when it is given more of them.

    Attributes:
        waits: nothing is known of it: all of the text may change until the last token has come.
        byte_ids: ids of single bytes that are decoded together, one run of them at a time, so that one more byte may
            change the whole run (``ByteFallback``).
        special_ids: ids that are left out of the text.
        backend: the ``tokenizers.Tokenizer``, where one decodes; it leaves out the ids that it does not know.
        cleans: spaces before punctuation are removed from the text (``clean_up_tokenization_spaces``).

    """

    waits: bool = False
    byte_ids: frozenset[int] = frozenset()
    special_ids: frozenset[int] = frozenset()
    backend: Any = None
    cleans: bool = False

    def visible(self, token_ids: list[int]) -> list[int]:
        """Return the ids that have a part in the text."""
        if self.backend is None:
            return token_ids
        known = self.backend.id_to_token
        return [token for token in token_ids if token not in self.special_ids and known(token) is not None]


_KNOWN: WeakKeyDictionary[Any, tuple[int, DecodingRule]] = WeakKeyDictionary()


def rule_of(tokenizer: Any) -> DecodingRule:
    """Return the rule of a tokenizer.

    A tokenizer that is not of transformers is taken for one whose text of some tokens begins the text of more, but
    for bytes of an incomplete character. One of transformers that is written in Python, or whose decoder is none of
    those listed here, waits.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return DecodingRule(waits=isinstance(tokenizer, PreTrainedTokenizer))
    size, rule = _KNOWN.get(tokenizer, (-1, DecodingRule()))
    if size != len(tokenizer):  # new, or tokens were added since
        rule = _rule_of_fast(tokenizer)
        _KNOWN[tokenizer] = (len(tokenizer), rule)
    return rule


def _rule_of_fast(tokenizer: Any) -> DecodingRule:
    kind, backend = type(tokenizer), tokenizer.backend_tokenizer
    is_plain = (
        kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
        and kind.clean_up_tokenization is PreTrainedTokenizerBase.clean_up_tokenization
        and not {"decode", "_decode", "clean_up_tokenization"} & set(vars(tokenizer))
    )
    steps = _steps(backend.decoder)
    if not is_plain or not _is_known(steps):
        return DecodingRule(waits=True)
    special = frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special)
    byte_ids: frozenset[int] = frozenset()
    if "ByteFallback" in {step["type"] for step in steps}:
        ids = map(backend.token_to_id, _BYTE_TOKENS)
        byte_ids = frozenset(token for token in ids if token is not None) - special
    return DecodingRule(False, byte_ids, special, backend, _cleans(tokenizer))


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:  # tokens with spaces between them
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _is_known(steps: list[dict[str, Any]]) -> bool:
    """Tell whether the text of some tokens, but for its end, begins the text of more."""
    names = [step["type"] for step in steps]
    joined = next((i for i, name in enumerate(names) if name in _JOINS), len(names))
    before, after = names[:joined], steps[joined + 1 :]
    # What comes after is done to the text as a whole; of that only its beginning may be stripped.
    strips = all(step["type"] == "Fuse" or (step["type"] == "Strip" and step["stop"] == 0) for step in after)
    return set(before) <= _BY_TOKEN | {"ByteFallback"} and strips


def _cleans(tokenizer: Any) -> bool:
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    forced = tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    return forced or type(tokenizer.backend_tokenizer.model).__name__ != "BPE"
