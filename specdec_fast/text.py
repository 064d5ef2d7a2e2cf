"""Tokenizers at the two ends: prompts in, text out."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

_INCOMPLETE = "\ufffd"  # what a decoder puts where a character's bytes have not all arrived


def load_tokenizer(name: str | None) -> Any | None:
    """Load the tokenizer that stands beside a model; None if there is none (a model built in memory, say)."""
    if not name:
        return None
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):
        return None


def same_vocabulary(first: Any, second: Any) -> bool:
    """Tell whether two tokenizers mean the same words by the same ids, special and added tokens left aside."""

    def words(tokenizer: Any) -> dict[str, int]:
        added = set(tokenizer.added_tokens_decoder)
        return {word: token for word, token in tokenizer.get_vocab().items() if token not in added}

    return words(first) == words(second)


class Detokenizer:
    """Turns a growing list of token ids into text, piece by piece.

    A piece ends where the text is certain: bytes of a character that is not complete yet are held back, the text
    before them is not. Only the tokens since the last certain place are decoded again, so a long text costs no more
    per token than a short one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        # Tokens before `_context` are done with. Those up to `_certain` are text already given out; they are
        # decoded once more with what follows, because a tokenizer may join words differently at a beginning.
        self._context = 0
        self._certain = 0
        self._num_given = 0  # characters given out of the tokens after `_certain`, whose last one is incomplete

    def add(self, token_ids: list[int], last: bool = False) -> str:
        """Take new tokens; return the text that became certain (all that is left if they are the ``last``)."""
        self._token_ids += token_ids
        known = self._decode(self._context, self._certain)
        text = self._decode(self._context, len(self._token_ids))[len(known) :]
        given, self._num_given = self._num_given, 0
        if last or (text and not text.endswith(_INCOMPLETE)):
            self._context, self._certain = self._certain, len(self._token_ids)
            return text[given:]
        certain = text.rstrip(_INCOMPLETE)
        self._num_given = max(given, len(certain))
        return certain[given:]

    def _decode(self, start: int, stop: int) -> str:
        if start == stop:
            return ""
        return self._tokenizer.decode(self._token_ids[start:stop], skip_special_tokens=True)
