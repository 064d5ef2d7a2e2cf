"""Where a request ends: by a stop id or its length (``cut_emission``), or by a stop string (``StopStrings``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

from specdec_fast.errors import DetokenizationError, RequestError
from specdec_fast.request.detokenizer import INCOMPLETE, Detokenizer
from specdec_fast.request.string_search import search_for
from specdec_fast.results import FinishReason


def cut_emission(
    tokens: Sequence[int], stop_ids: Collection[int], max_tokens: int
) -> tuple[list[int], FinishReason | None]:
    """Cut one step's tokens after the first stop id or at ``max_tokens``; the oracle and the engine use it (I5).

    Args:
        tokens: ids that the step would emit for one sequence, ``accepted + 1``.
        stop_ids: EOS ids and the request's own stop ids.
        max_tokens: number of tokens that the sequence may still emit, at least 1.

    Returns:
        The tokens to commit, and ``"stop"``, ``"length"``, or None if the sequence continues. A stop id that is the
        last
        allowed token counts as ``"stop"``, as in transformers.
    """
    for i, token in enumerate(tokens[:max_tokens]):
        if token in stop_ids:
            return list(tokens[: i + 1]), "stop"
    if len(tokens) >= max_tokens:
        return list(tokens[:max_tokens]), "length"
    return list(tokens), None


class Ending(Protocol):
    """What decides after each token whether a request ends there, besides stop ids and its length."""

    @property
    def error(self) -> RequestError | None:
        """Why it cannot decide; the request ends with it."""

    def cut(self, tokens: list[int], reason: FinishReason | None) -> tuple[list[int], FinishReason | None]:
        """See ``StopStrings.cut``; called once for the tokens of each step, in order."""

    def take(self, last: bool) -> str:
        """See ``StopStrings.take``."""


class StopStrings:
    """The emitted text of one request that has stop strings (at least one, none empty), and the search for them.

    The longest end of the text that begins a stop string is held back; the text before it is released. So a match can
    only begin in the text that is held back. Every character is read once, whatever the number of stop strings.

    Tokens are added one at a time even if a step emits several. So the token that completes a stop string depends on
    the tokens alone, not on how many a step emitted. It is the first token with which the text, if it ended there,
    would contain a stop string. A character whose bytes are incomplete counts only when the text has ended.

    Args:
        detokenizer: of the request.
        stop: its stop strings.
        is_included: whether the text ends with the stop string, and not before it.
    """

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...], is_included: bool = False) -> None:
        self._detokenizer = detokenizer
        self._stop = stop if is_included else ()
        self._search = search_for(stop)
        self._state = 0  # of the search, after the text that is held back
        # Released, but not returned by `take` yet; a stream may be read in another thread than the one that steps.
        self._released: deque[str] = deque()
        self._held = ""
        self._found = False

    @property
    def error(self) -> DetokenizationError | None:
        """The error of a tokenizer that could not decode the tokens; then no stop string can be found."""
        return self._detokenizer.error

    def cut(self, tokens: list[int], reason: FinishReason | None) -> tuple[list[int], FinishReason | None]:
        """Cut the tokens that ``cut_emission`` returned with ``reason`` after the first that completes a stop string.

        Returns the tokens to commit, and ``"stop"`` if a stop string is complete, ``"error"`` if there is an ``error``,
        else ``reason``, which applies to the last token.
        """
        for i, token in enumerate(tokens, start=1):
            if self._add(token, last=reason is not None and i == len(tokens)):
                return tokens[:i], "stop"
            if self.error is not None:
                return tokens[:i], "error"
        return tokens, reason

    def take(self, last: bool) -> str:
        """Return the text released since the last call, or all remaining text if the request has ended."""
        if last and not self._found:
            self._released += [self._held, self._detokenizer.rest()]
            self._held = ""
        return "".join(self._released.popleft() for _ in range(len(self._released)))

    def _add(self, token: int, last: bool) -> bool:
        certain = self._detokenizer.add([token])
        rest = self._detokenizer.rest()
        text = self._held + certain
        self._state, in_certain = self._search.advance(self._state, certain)
        # The rest may change with the next token, so the state after it is not kept.
        _, in_rest = self._search.advance(self._state, rest if last else rest.rstrip(INCOMPLETE))
        places = ((len(self._held), in_certain), (len(text), in_rest))
        begins = [start + begin for start, begin in places if begin is not None]
        self._found = bool(begins)
        # If several stop strings are complete with this token, the text ends before the one that begins first.
        keep = min(begins) if begins else len(text) - self._search.depths[self._state]
        if begins and self._stop:
            keep += min(len(stop) for stop in self._stop if (text + rest).startswith(stop, keep))
        self._released.append((text + rest)[:keep])
        self._held = "" if begins else text[keep:]
        return self._found
