"""The masks of ``SamplingParams``: tokens that are always forbidden, a least number of tokens, and forbidden words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from specdec_fast.errors import InvalidPromptError, MissingTokenizerError, UnknownTokenError
from specdec_fast.request.prompts import encode_words
from specdec_fast.request.token_masks import TokenMask, forbid, row_of
from specdec_fast.sampling_params import SamplingParams

_MANY = 32  # last tokens of words with one beginning, from which on a row of bits is faster


def masks_of(
    params: SamplingParams, prompt: Many[int], stop_ids: Iterable[int], tokenizer: Any | None, vocab_size: int
) -> list[TokenMask]:
    """Return the masks of a request; an empty list if it may emit every token.

    Args:
        params: its parameters, of which token ids are checked here.
        prompt: its token ids.
        stop_ids: that end it.
        tokenizer: for bad words that are strings; None: none is known.
        vocab_size: of the target.

    Raises:
        UnknownTokenError: a token id is outside the vocabulary, or a word has no tokens.
        MissingTokenizerError: a bad word is a string, and there is no tokenizer.
    """
    _expect_known("logit_bias", params.logit_bias, vocab_size)
    masks: list[TokenMask] = []
    if params.allowed_token_ids is not None:
        _expect_known("allowed_token_ids", params.allowed_token_ids, vocab_size)
        masks.append(FixedMask(row_of(params.allowed_token_ids, vocab_size)))
    words = _words_of(params, tokenizer)
    _expect_known("bad_words", (token for word in words for token in word), vocab_size)
    if single := {word[0] for word in words if len(word) == 1}:
        masks.append(FixedMask(~row_of(single, vocab_size)))
    if several := [word for word in words if len(word) > 1]:
        masks.append(ForbiddenWords(several, prompt, vocab_size))
    if params.min_tokens:
        masks.append(LeastTokens(params.min_tokens, stop_ids, vocab_size))
    return masks


def _expect_known(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    wrong = next((token for token in token_ids if token >= vocab_size), None)
    if wrong is not None:
        raise UnknownTokenError(
            f"{name}: token id {wrong} is outside the target's vocabulary; expected 0 to {vocab_size - 1}."
        )


def _words_of(params: SamplingParams, tokenizer: Any | None) -> list[tuple[int, ...]]:
    """Return the bad words as token ids; a string has those at the beginning of a text and those behind a space."""
    words: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if isinstance(word, tuple):
            words[word] = None
            continue
        if tokenizer is None:
            raise MissingTokenizerError(
                f"bad_words has {word!r:.80}, but no tokenizer is known for this target; pass tokenizer=..., or words "
                "as lists of token ids."
            )
        try:
            found = encode_words(tokenizer, (word.lstrip(), " " + word.lstrip()))
        except InvalidPromptError as error:
            raise UnknownTokenError(f"bad_words: the tokenizer cannot encode {word!r:.80}: {error}") from error
        words |= dict.fromkeys(found)
    return list(words)


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
        self._row = ~row_of((token for token in stop_ids if token < vocab_size), vocab_size)  # others are never emitted

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
        # by the last token but one: the tokens before the last one, and those that may not follow them
        endings: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for word in words:
            endings[tuple(word[:-1])].add(word[-1])
        self._endings: dict[int, list[tuple[list[int], set[int] | np.ndarray]]] = defaultdict(list)
        for before, last in endings.items():
            # a row has the size of the vocabulary, so only few beginnings may have one
            others = ~row_of(last, vocab_size) if len(last) > _MANY else last
            self._endings[before[-1]].append((list(before), others))
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
            if self._tokens[-len(before) :] != before:
                continue
            if isinstance(others, np.ndarray):
                row &= others
            else:
                for token in others:
                    forbid(row, token)
