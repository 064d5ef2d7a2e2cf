"""A search for many strings at once, in a text that grows (Aho and Corasick, 1975)."""

from __future__ import annotations

from array import array
from functools import lru_cache


class StringSearch:
    """An automaton whose state says how much of which string (at least one, none empty) the text ends with.

    A state is the longest end of the text that begins one of the strings. State 0 is the empty end. So a character
    costs the same whatever the number of strings. A search never changes and may be shared by requests.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        # One dictionary for all edges, and arrays: a dictionary per state would take ten times the memory.
        self._edges: dict[tuple[int, str], int] = {}
        self.depths = array("l", [0])  # by state, the number of characters of that end
        # By state, the state of the longest end that is shorter, and the length of the longest string at the end.
        self._shorter = array("l", [0])
        self._matches = array("l", [0])
        for string in strings:
            self._insert(string)
        self._link()

    def advance(self, state: int, text: str) -> tuple[int, int | None]:
        """Read the text that follows ``state``; return the state after it, and where the first match in it begins.

        Of several strings that end in ``text``, that which begins first counts. Its index is negative if it begins
        before ``text``, None if there is none.
        """
        begin: int | None = None
        for index, character in enumerate(text):
            state = self._next(state, character)
            length = self._matches[state]
            if length and (begin is None or index + 1 - length < begin):
                begin = index + 1 - length
        return state, begin

    def _insert(self, string: str) -> None:
        state = 0
        for depth, character in enumerate(string, start=1):
            after = self._edges.setdefault((state, character), len(self.depths))
            if after == len(self.depths):
                self.depths.append(depth)
                self._shorter.append(0)
                self._matches.append(0)
            state = after
        self._matches[state] = len(string)

    def _link(self) -> None:
        """Set what depends on shorter ends, for shorter ones first."""
        edges = sorted(self._edges.items(), key=lambda edge: self.depths[edge[1]])
        for (state, character), after in edges:
            if state:
                self._shorter[after] = self._next(self._shorter[state], character)
            self._matches[after] = self._matches[after] or self._matches[self._shorter[after]]

    def _next(self, state: int, character: str) -> int:
        while (after := self._edges.get((state, character))) is None:
            if not state:
                return 0
            state = self._shorter[state]
        return after


@lru_cache(maxsize=16)  # the choices of a request, and the requests of a call, have the same strings
def search_for(strings: tuple[str, ...]) -> StringSearch:
    """Return the search for some strings: at least one, and none empty."""
    return StringSearch(strings)
