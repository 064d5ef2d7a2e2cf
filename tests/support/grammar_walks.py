"""Texts that a grammar allows, token by token, chosen at random; they look for what a reader may mistake."""

from __future__ import annotations

from random import Random

import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

_MOST_TOKENS = 400


class Walker:
    """Writes texts that masks allow.

    Args:
        tokenizer: whose tokens the masks allow.
        vocab_size: number of its ids.
        eos: the token that ends a text.
        marks: texts that are tried inside of values, such as what ends one.
    """

    def __init__(self, tokenizer, vocab_size, eos, marks):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = eos
        self._marks = [tokenizer(mark, add_special_tokens=False).input_ids for mark in marks]
        # xgrammar counts a surrogate, whose first byte this is, as one character of a JSON string; it decodes to three.
        self._left_out = {token for token, word in _bytes_of(tokenizer).items() if b"\xed" in word}
        self._ends = [tokenizer(text, add_special_tokens=False).input_ids for text in ('"', "}", "]", "0", "true", "x")]

    def text(self, masks, seed, begin="", num_free=60):
        """Return one text that follows all masks; its first tokens are free, the others hurry to its end.

        It begins with ``begin``. If it comes to no end, return None.
        """
        random = Random(seed)
        tokens = self._taken(masks, self._tokenizer(begin, add_special_tokens=False).input_ids)
        assert self._tokenizer.decode(tokens) == begin
        while len(tokens) < _MOST_TOKENS:
            allowed = self._allowed(masks)
            assert len(allowed), f"nothing may follow {self._tokenizer.decode(tokens)!r}"
            hurries = len(tokens) >= num_free
            if self._eos in allowed and (hurries or random.random() < 0.5):
                return self._tokenizer.decode(tokens)
            attempts = [*self._marks, *self._ends] if hurries else self._marks
            if hurries or random.random() < 0.3:
                attempts = random.sample(attempts, len(attempts))
                taken = next((part for part in (self._taken(masks, each) for each in attempts) if part), [])
                tokens += taken
                if taken:
                    continue
            token = int(random.choice(list(allowed)))
            assert all(mask.advance(token) for mask in masks)
            if token == self._eos:
                return self._tokenizer.decode(tokens)
            tokens.append(token)
        return None

    def _allowed(self, masks):
        row = np.full(-(-self._vocab_size // 32), -1, np.int32)
        for mask in masks:
            mask.fill(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: self._vocab_size]
        return set(np.flatnonzero(bits).tolist()) - self._left_out

    @staticmethod
    def _taken(masks, attempt):
        """Follow as many tokens of an attempt as all masks allow, and return them."""
        taken = []
        for token in attempt:
            followed = [mask for mask in masks if mask.advance(token)]
            if len(followed) < len(masks):
                for mask in followed:
                    mask.rollback(1)
                break
            taken.append(token)
        return taken


def _bytes_of(tokenizer):
    """Return the bytes of each token of a tokenizer over bytes."""
    codes = {character: code for code, character in bytes_to_unicode().items()}
    vocabulary = tokenizer.get_vocab().items()
    return {token: bytes(codes[each] for each in word if each in codes) for word, token in vocabulary}
