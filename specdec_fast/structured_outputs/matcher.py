"""One request's place in its grammar: :class:`GrammarMask`."""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time
from typing import Any

import numpy as np

from specdec_fast.errors import GrammarError

_WORD_BITS = 32
_MOST_SECONDS = 2.0  # that one mask may take, because all requests of a step wait for it


class GrammarMask:
    """Which tokens may be next, as a state that follows the tokens of one request; a ``TokenMask`` of the engine.

    Args:
        grammar: xgrammar's compiled grammar.
        end_ids: ids that end the request; they are allowed where the text is complete, and nowhere else.
        vocab_size: number of the target's ids.
        encode: returns the token ids of a text.
    """

    reads_tokens = True

    def __init__(
        self, grammar: Any, end_ids: list[int], vocab_size: int, encode: Callable[[str], list[int]] | None = None
    ) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=end_ids)
        self._encode = encode
        # A drafter may propose them; xgrammar refuses each with a line on stderr.
        self._without_text = frozenset(grammar.tokenizer_info.special_token_ids).difference(end_ids)
        self._words = np.empty((1, -(-vocab_size // _WORD_BITS)), np.int32)

    def advance(self, token: int) -> bool:
        """Follow one more token; return False, without a change, if it may not be chosen here."""
        may_follow = token not in self._without_text and not self._matcher.is_terminated()
        return may_follow and self._matcher.accept_token(token)

    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens back."""
        self._matcher.rollback(count)

    def fill(self, row: np.ndarray) -> None:
        """Clear the bits of the tokens that may not be next, of ``row [ceil(vocab_size / 32)]`` int32.

        After the token that ends the text every token may be next, because none will be.

        Raises:
            GrammarError: it took so long that other requests should not wait for another one.
        """
        if self._matcher.is_terminated():
            return
        started = thread_time()
        self._matcher.fill_next_token_bitmask(self._words, 0)
        row &= self._words[0]
        if (seconds := thread_time() - started) > _MOST_SECONDS:
            raise GrammarError(
                f"structured_outputs: finding the tokens that may be next took {seconds:.1f} s, and all requests wait "
                f"for that; expected at most {_MOST_SECONDS:g} s. Ask for a simpler grammar."
            )

    def forced(self, most: int) -> list[int]:
        """Return at most so many tokens of the text that must come next, as the tokenizer would write it.

        The target may choose other tokens for the same text. At the end of the text, the only token that may end it
        belongs to them.
        """
        tokens: list[int] = []
        text = self._forced_text()
        for token in self._encode(text)[:most] if self._encode is not None and text else ():
            if not self.advance(token):
                break
            tokens.append(token)
        if len(tokens) < most and self._matcher.is_completed() and (end := self._only_token()) is not None:
            tokens.append(end)
            self.advance(end)
        if tokens:
            self.rollback(len(tokens))
        return tokens

    def allows_any(self) -> bool:
        """Return whether any token may be next."""
        return bool(self._row().any())

    def _forced_text(self) -> str:
        if self._matcher.is_terminated():
            return ""
        try:
            return str(self._matcher.find_jump_forward_string())
        except UnicodeDecodeError:  # the last token was a part of a character
            return ""

    def _only_token(self) -> int | None:
        """Return the token that may be next, if there is exactly one."""
        row = self._row()
        places = np.flatnonzero(row)
        if self._matcher.is_terminated() or len(places) != 1:
            return None
        word = int(row[places[0]]) & 0xFFFFFFFF
        return int(places[0]) * _WORD_BITS + word.bit_length() - 1 if word & (word - 1) == 0 else None

    def _row(self) -> np.ndarray:
        row = np.full(self._words.shape[1], -1, np.int32)
        self.fill(row)
        return row
