"""The masks of ``SamplingParams``: tokens that are always forbidden, a least number of tokens, and forbidden words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Many

import numpy as np

from specdec_fast.request.token_masks import TokenMask, row_of


class FixedMask(TokenMask):
    """Allows the same tokens everywhere: those whose bits a row has."""

    reads_tokens = False

    def __init__(self, row: np.ndarray) -> None:
        self._row = row

    def advance(self, token: int) -> bool:
        return True

    def rollback(self, count: int) -> None:
        pass

    def fill(self, row: np.ndarray) -> None:
        row &= self._row


class LeastTokens(TokenMask):
    """Forbids tokens, those that end the request, until it has emitted a number of tokens."""

    reads_tokens = False

    def __init__(self, min_tokens: int, stop_ids: Iterable[int], vocab_size: int) -> None:
        self._missing = min_tokens
        self._row = ~row_of(stop_ids, vocab_size)

    def advance(self, token: int) -> bool:
        self._missing -= 1
        return True

    def rollback(self, count: int) -> None:
        self._missing += count

    def fill(self, row: np.ndarray) -> None:
        if self._missing > 0:
            row &= self._row


class ForbiddenWords(TokenMask):
    """Forbids the last token of each of several words, of two tokens or more, where its others have just been written.

    As in transformers, the tokens of the prompt count, too.
    """

    reads_tokens = True

    def __init__(self, words: Iterable[Many[int]], prompt: Many[int], vocab_size: int) -> None:
        # by the last token but one: the tokens before the last one, and the row of those that may follow them
        endings: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for word in words:
            endings[tuple(word[:-1])].add(word[-1])
        self._endings: dict[int, list[tuple[list[int], np.ndarray]]] = defaultdict(list)
        for before, last in endings.items():
            self._endings[before[-1]].append((list(before), ~row_of(last, vocab_size)))
        longest = max(map(len, endings))
        self._tokens = list(prompt[-longest:])

    def advance(self, token: int) -> bool:
        self._tokens.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self._tokens[len(self._tokens) - count :]

    def fill(self, row: np.ndarray) -> None:
        if not self._tokens:
            return
        for before, others in self._endings.get(self._tokens[-1], ()):
            if self._tokens[-len(before) :] == before:
                row &= others
