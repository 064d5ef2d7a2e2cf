"""Which tokens a request may choose next: masks that follow its tokens, and their rows of a verification.

A mask row is ``[ceil(vocab_size / 32)]`` int32: bit ``i % 32`` of word ``i // 32`` is set if token i may be chosen, as
in xgrammar. A row whose words are all -1 forbids nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Protocol

import numpy as np

WORD_BITS = 32
ALL_ALLOWED = -1  # a word whose 32 tokens may all be chosen
UNREAD = -1  # stands for any token, where no mask reads tokens


class TokenMask(Protocol):
    """Which tokens may be next, as a state that follows the tokens of one request.

    The engine advances the state by every token that the request emits. In a step it also advances it by the draft
    tokens of each path and takes these back, so the state must not depend on anything else.

    Attributes:
        reads_tokens: whether the state depends on which tokens were emitted. False: on their number alone; then
            ``advance`` may receive ``UNREAD`` for any token, and a step on a GPU need not wait for its draft tokens.
    """

    reads_tokens: bool

    def forced(self, most: int) -> list[int]:
        """Return at most so many tokens that come next almost certainly, for a draft; none if that is not known."""
        return []

    def advance(self, token: int) -> bool:
        """Follow one more token; return False, without a change, if it may not be chosen here."""

    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens back. Tokens that were emitted are never taken back."""

    def fill(self, row: np.ndarray) -> None:
        """Clear the bits of the tokens that may not be chosen next, and leave the other bits of ``row`` as they are."""


class TokenMasks:
    """The masks of one request: a token may be chosen if all of them allow it.

    The states stay where the last question has left them, behind draft tokens of a step, and go from there to the next
    place. Rows are kept until more tokens are emitted, because a verification asks for those that drafting has seen.

    Args:
        masks: in the state of a request that has emitted nothing.
        vocab_size: of the target.

    Attributes:
        vocab_size: as passed.
        reads_tokens: whether a mask depends on which tokens were emitted.
    """

    def __init__(self, masks: Iterable[TokenMask], vocab_size: int) -> None:
        self._masks = list(masks)
        self._num_emitted = 0  # tokens that the states have followed for good
        self._path: list[int] = []  # the draft tokens that they have followed besides
        self._rows: dict[tuple[int, ...], np.ndarray | None] = {}  # by draft tokens; None: they may not be chosen
        self._forced: tuple[int, list[int]] | None = None  # what must follow the emitted tokens, and how many at most
        self._error: Exception | None = None  # of a mask, after which its state means nothing
        self.vocab_size = vocab_size
        self.reads_tokens = any(mask.reads_tokens for mask in self._masks)

    def row_behind(self, emitted: Many[int], path: Many[int]) -> np.ndarray:
        """Return the row behind draft tokens, for a drafter: a hint, which forbids nothing where nothing is known.

        ``path`` are the draft tokens; ``UNREAD`` stands for one that is not known. The caller must not write the row.
        """
        row = None
        if self._error is None and not (self.reads_tokens and UNREAD in path):
            try:
                self._follow(emitted)
                row = self._row(tuple(path))
            except Exception as error:  # the next verification reports it
                self._error = error
        return self._free_row() if row is None else row

    def completed(self, emitted: Many[int], drafted: Many[int], most: int) -> list[int]:
        """Return a chain for a draft: the beginning of ``drafted`` that may be chosen, and what must follow it.

        Args:
            emitted: all tokens that the request has emitted.
            drafted: a chain of draft tokens; none for what must follow the emitted tokens.
            most: largest number of tokens of the chain that is returned.
        """
        if self._error is not None:
            return list(drafted)
        try:
            self._follow(emitted)
            if not drafted and self._forced is not None and self._forced[0] >= most:
                return self._forced[1][:most]
            self._go_to(drafted)
            num_followed = len(self._path)
            chain = list(self._path)
            for mask in self._masks:
                if num_followed == len(chain) < most:
                    chain += mask.forced(most - num_followed)
        except Exception as error:  # the next verification reports it
            self._error = error
            return list(drafted)
        if not drafted:
            self._forced = (most, list(chain))
        return chain

    def fill_rows(self, emitted: Many[int], drafted: Many[int], parents: Many[int], rows: np.ndarray) -> None:
        """Write the rows of one sequence of a verification.

        Args:
            emitted: all tokens that the request has emitted.
            drafted: ``[n]``, its draft tokens.
            parents: ``[n]``, of each draft token the one before it, an earlier index; -1: the last emitted token.
            rows: ``[n + 1, words]`` int32, all words ``ALL_ALLOWED``; row i + 1 is that of draft token i. Rows behind a
                draft token that may not be chosen stay so: the token is rejected, so nothing is chosen there.
        """
        if self._error is not None:
            raise self._error
        self._follow(emitted)
        children: list[list[int]] = [[] for _ in rows]
        for node, parent in enumerate(parents, start=1):
            children[parent + 1].append(node)
        paths: list[tuple[int, ...]] = [()] * len(rows)
        pending = [0]  # nodes that are still to be visited, the next one last: whole paths, one after the other
        while pending:
            node = pending.pop()
            if node:
                paths[node] = (*paths[parents[node - 1] + 1], drafted[node - 1])
            if (row := self._row(paths[node])) is not None:
                rows[node] = row
                pending += children[node][::-1]

    def _follow(self, emitted: Many[int]) -> None:
        new = emitted[self._num_emitted :]
        if not new:
            return
        self._rows.clear()
        self._forced = None
        if not self._go_to(new):
            place = len(self._path)
            raise ValueError(f"a mask forbids token {new[place]}, which the request has emitted")
        self._num_emitted += len(new)
        self._path = []

    def _row(self, path: tuple[int, ...]) -> np.ndarray | None:
        """Return the row behind draft tokens; None if one of them may not be chosen."""
        if path not in self._rows:
            row = None
            if self._go_to(path):
                row = self._free_row()
                for mask in self._masks:
                    mask.fill(row)
            self._rows[path] = row
        return self._rows[path]

    def _free_row(self) -> np.ndarray:
        return np.full(num_words(self.vocab_size), ALL_ALLOWED, np.int32)

    def _go_to(self, path: Many[int]) -> bool:
        """Let the states follow these draft tokens alone, as far as they may be chosen; return whether all may."""
        known = self._path
        num_common = 0
        while num_common < min(len(known), len(path)) and known[num_common] == path[num_common]:
            num_common += 1
        if (beyond := len(known) - num_common) > 0:
            for mask in self._masks:
                mask.rollback(beyond)
            del known[num_common:]
        for token in path[num_common:]:
            if not self._advance(token):
                return False
            known.append(token)
        return True

    def _advance(self, token: int) -> bool:
        for place, mask in enumerate(self._masks):
            if not mask.advance(token):
                for before in self._masks[:place]:
                    before.rollback(1)
                return False
        return True


def num_words(vocab_size: int) -> int:
    """Return the words of a mask row."""
    return -(-vocab_size // WORD_BITS)


def forbid(row: np.ndarray, token: int) -> None:
    """Clear the bit of one token; an id that the row does not have is ignored."""
    if 0 <= token < WORD_BITS * len(row):
        row[token // WORD_BITS] &= np.int32(~np.uint32(1 << token % WORD_BITS).astype(np.int32))


def row_of(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return the row that allows these tokens and no other, ``[words]`` int32."""
    bits = np.zeros(num_words(vocab_size) * WORD_BITS, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)
