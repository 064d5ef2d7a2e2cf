"""Ends the reasoning of one request in time: :class:`ReasoningMask`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from specdec_fast.request.token_bytes import character_length, complete
from specdec_fast.request.token_masks import WORD_BITS, TokenMask, row_of
from specdec_fast.structured_outputs.reasoning import Reasoning, ReasoningState, overlap
from specdec_fast.structured_outputs.token_texts import TokenTexts

_LONGEST_PART = 3  # bytes of a character that is not complete


class _Place(NamedTuple):
    """Where the text of a request stands."""

    state: ReasoningState
    text: bytes  # AHEAD: all of it, without whitespace before it; BEGUN: its last bytes; ENDED: none
    num_tokens: int  # of the reasoning


class ReasoningMask(TokenMask):
    """Allows only the text that ends the reasoning once it has ``max_tokens``, and within it no id that ends a request.

    xgrammar can count the tokens of a rule as well. But what it then allows depends on the places at which it was asked
    before, so drafting would change the text; and where an answer may be any text, it may also be reasoning without a
    limit.

    Args:
        reasoning: how the request reasons.
        state: where its prompt leaves the model.
        tokens: of its tokenizer.
        stop_ids: ids that end the request. One whose text has the end of the reasoning is allowed in it.
        vocab_size: of the target.
        encode: returns the token ids of a text.
    """

    reads_tokens = True

    def __init__(
        self,
        reasoning: Reasoning,
        state: ReasoningState,
        tokens: TokenTexts,
        stop_ids: Collection[int],
        vocab_size: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        self._reasoning = reasoning
        self._begin = reasoning.begin.lstrip()
        self._end = reasoning.end.encode(errors="replace")
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._encode = encode
        stops = [token for token in stop_ids if 0 <= token < vocab_size and self._end not in tokens.texts[token]]
        self._without_stops = ~row_of(stops, vocab_size)
        self._rows: dict[bytes | int, np.ndarray] = {}  # by the text that must follow, or the bytes of a character
        self._places = [_Place(state, b"", 0)]  # behind the prompt, and behind every token since

    def advance(self, token: int) -> bool:
        row = self._row()
        if row is not None and not row[token // WORD_BITS] >> token % WORD_BITS & 1:
            return False
        self._places.append(self._behind(self._places[-1], self._tokens.texts[token]))
        return True

    def rollback(self, count: int) -> None:
        del self._places[len(self._places) - count :]

    def fill(self, row: np.ndarray) -> None:
        if (allowed := self._row()) is not None:
            row &= allowed

    def forced(self, most: int) -> list[int]:
        must_follow = self._must_follow()
        if not isinstance(must_follow, bytes):
            return []
        tokens: list[int] = []
        for token in self._encode(must_follow.decode(errors="ignore"))[:most]:
            if not self.advance(token):
                break
            tokens.append(token)
        self.rollback(len(tokens))
        return tokens

    def _row(self) -> np.ndarray | None:
        """Return the tokens that may be next; None if any may."""
        if self._places[-1].state is not ReasoningState.BEGUN:
            return None
        must_follow = self._must_follow()
        if must_follow is None:
            return self._without_stops
        if must_follow not in self._rows:
            if isinstance(must_follow, int):
                found = self._tokens.continuing_character(must_follow)
            else:
                found = self._tokens.writing(must_follow)
            self._rows[must_follow] = row_of(found, self._vocab_size) & self._without_stops
        return self._rows[must_follow]

    def _must_follow(self) -> bytes | int | None:
        """Return what is missing of the end of the reasoning, or how many bytes of a character before it.

        None if the reasoning may go on, or there is none.
        """
        state, text, num_tokens = self._places[-1]
        most = self._reasoning.max_tokens
        if state is not ReasoningState.BEGUN or most is None or num_tokens < most:
            return None
        num_begun = overlap(text, self._end)
        part = text[complete(text) :]
        if len(part) > num_begun:  # of a character that is no part of the end
            return character_length(part[0]) - len(part)
        return self._end[num_begun:]

    def _behind(self, place: _Place, text: bytes) -> _Place:
        """Return the place behind the text of one more token."""
        if place.state is ReasoningState.AHEAD:
            return self._behind_beginning(place.text + text)
        if place.state is ReasoningState.BEGUN:
            return self._in_reasoning(place.text + text, place.num_tokens + 1)
        return place

    def _behind_beginning(self, text: bytes) -> _Place:
        stop = complete(text)
        begun = text[:stop].decode(errors="replace").lstrip()
        if begun.startswith(self._begin):  # by a token whose text may go on behind it
            return self._in_reasoning(begun[len(self._begin) :].encode() + text[stop:], 0)
        if self._begin.startswith(begun):
            return _Place(ReasoningState.AHEAD, begun.encode() + text[stop:], 0)
        return _Place(ReasoningState.ENDED, b"", 0)

    def _in_reasoning(self, text: bytes, num_tokens: int) -> _Place:
        if self._end in text:
            return _Place(ReasoningState.ENDED, b"", num_tokens)
        return _Place(ReasoningState.BEGUN, text[-max(len(self._end) - 1, _LONGEST_PART) :], num_tokens)
