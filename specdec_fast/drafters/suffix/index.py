"""Texts of many requests, and where in them the end of another text occurs."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

SIZES = (3, 2, 1)  # tokens of the n-grams that are looked up
MOST_COPIES = 16  # latest copies of an n-gram that are kept
LONGEST_MATCH = 8  # tokens before a position that are compared


@dataclass(frozen=True)
class Copy:
    """A place in a text before which the tokens are those at the end of another text.

    Attributes:
        token_ids: the text.
        follows: the index of the token behind the copy.
        length: how many tokens before it agree, at most ``LONGEST_MATCH``.
    """

    token_ids: list[int]
    follows: int
    length: int


class SuffixIndex:
    """Finds the copies of a text's last tokens in all texts, of which the least recently used leave first.

    A table for each n in ``SIZES`` maps an n-gram to the positions behind its latest ``MOST_COPIES`` copies. A position
    is one integer: the number of the text, and the index in it. Positions in texts that have left are skipped; all
    tables are made anew when they could be as many as those that are left.

    Args:
        max_tokens: the largest number of tokens of all texts. Texts that still grow never leave.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0  # of all texts
        self._texts: OrderedDict[int, list[int]] = OrderedDict()  # by number, the least recently used first
        self._growing: set[int] = set()
        self._next = 0
        self._num_left = 0  # tokens of texts that have left since the tables were made
        self._tables: dict[int, dict[tuple[int, ...], deque[int]]] = {n: {} for n in SIZES}

    def __contains__(self, number: object) -> bool:
        """Return whether the text of this number has not left."""
        return number in self._texts

    def begin(self) -> int:
        """Return the number of a new text, which grows by ``extend``."""
        self._texts[self._next] = []
        self._next += 1
        return self._next - 1

    def extend(self, number: int, token_ids: list[int]) -> None:
        """Make ``token_ids`` the tokens of a text that has not left; they begin with those that it has.

        The last n-gram is added once a token follows it. The text does not leave before ``end``.
        """
        self._growing.add(number)
        text = self._texts[number]
        num_indexed = len(text)
        text += token_ids[num_indexed:]
        self.num_tokens += len(text) - num_indexed
        self._add_ngrams(number, num_indexed)

    def end(self, number: int) -> None:
        """Let a text grow no more for now; texts leave while there are more than ``max_tokens`` tokens."""
        self._growing.discard(number)
        self._used(number)
        for oldest in list(self._texts) if self.num_tokens > self.max_tokens else ():
            if self.num_tokens <= self.max_tokens:
                break
            if oldest not in self._growing:
                left = len(self._texts.pop(oldest))
                self.num_tokens -= left
                self._num_left += left
        if self._num_left > self.max_tokens:
            self._tables = {n: {} for n in SIZES}
            self._num_left = 0
            for each in self._texts:
                self._add_ngrams(each, 0)

    def copies(self, token_ids: list[int]) -> list[Copy]:
        """Return copies of the last tokens of ``token_ids``: those of the longest n-gram, later ones first.

        At most ``MOST_COPIES``. Their texts count as used.
        """
        found: list[Copy] = []
        for n in SIZES:
            tail = token_ids[-LONGEST_MATCH:-n][::-1]
            for position in self._positions(tuple(token_ids[-n:])) if len(token_ids) >= n else ():
                number = position >> 32
                follows = position & 0xFFFFFFFF
                text = self._texts[number]
                found.append(Copy(text, follows, n + _num_equal(text, follows - n, tail)))
                self._used(number)
            if found:
                break
        return found

    def finished(self) -> Iterator[list[int]]:
        """Yield the texts that grow no more, the least recently used first."""
        return (text for number, text in self._texts.items() if number not in self._growing)

    def _positions(self, ngram: tuple[int, ...]) -> list[int]:
        """Return the positions behind copies, the latest first, in texts that have not left."""
        known = self._tables[len(ngram)].get(ngram, ())
        return [position for position in reversed(known) if position >> 32 in self._texts]

    def _used(self, number: int) -> None:
        self._texts.move_to_end(number)

    def _add_ngrams(self, number: int, num_indexed: int) -> None:
        text = self._texts[number]
        for n, table in self._tables.items():
            for follows in range(max(n, num_indexed), len(text)):
                ngram = tuple(text[follows - n : follows])
                positions = table.get(ngram)
                if positions is None:
                    positions = table[ngram] = deque(maxlen=MOST_COPIES)
                positions.append(number << 32 | follows)


def _num_equal(text: list[int], stop: int, tail: list[int]) -> int:
    """Return how many tokens before ``stop`` agree with the first ones of ``tail``, which has the newest first."""
    before = text[max(0, stop - len(tail)) : stop][::-1]
    return next((i for i, (mine, others) in enumerate(zip(before, tail, strict=False)) if mine != others), len(before))
