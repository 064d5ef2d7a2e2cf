"""Where a request ends: by a stop id or its length (``cut_emission``), or by a stop string (``StopStrings``)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specdec_fast.errors import DetokenizationError
from specdec_fast.request.detokenizer import INCOMPLETE, Detokenizer
from specdec_fast.results import FinishReason


def cut_emission(
    tokens: Sequence[int], stop_ids: Collection[int], max_tokens: int
) -> tuple[list[int], FinishReason | None]:
    """Cut one step's tokens at the first stop id (kept) or at ``max_tokens``: the oracle and the engine share it (I5).

    Args:
        tokens: what the step would emit for one sequence, ``accepted + 1`` ids.
        stop_ids: EOS ids and the request's own stop ids.
        max_tokens: how many more tokens the sequence may emit, at least 1.

    Returns:
        The tokens to commit, and ``"stop"``, ``"length"`` or None when the sequence goes on. A stop id that
        arrives as the very last allowed token counts as ``"stop"``, as in transformers.

    """
    for i, token in enumerate(tokens[:max_tokens]):
        if token in stop_ids:
            return list(tokens[: i + 1]), "stop"
    if len(tokens) >= max_tokens:
        return list(tokens[:max_tokens]), "length"
    return list(tokens), None


class StopStrings:
    """The emitted text of one request that has stop strings.

    Text is given out where no stop string can claim it any more: the longest end of it that begins a stop string is
    held back. So whatever was given out lies before any match, and only what is held back has to be searched.

    Tokens are taken one at a time even where a step emits several: which token completes a stop string is then a
    question of the tokens alone, not of the blocks they came in. It is the first token with which the text, were it
    the last one, has a stop string in it; a character whose bytes have not all arrived counts once the text has ended.

    Args:
        detokenizer: a new one, for this request only.
        stop: the stop strings, at least one, none empty.

    """

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._longest = max(map(len, stop))
        self._released: list[str] = []  # not fetched by `take` yet
        self._held = ""
        self._found = False

    @property
    def error(self) -> DetokenizationError | None:
        """What the tokenizer raised, where it could not decode the tokens; no stop string can be looked for then."""
        return self._detokenizer.error

    def cut(self, tokens: list[int], reason: FinishReason | None) -> tuple[list[int], FinishReason | None]:
        """Cut one step's tokens after the first that completes a stop string.

        Args:
            tokens: what ``cut_emission`` left of the step's emission.
            reason: what ``cut_emission`` says of its end; it concerns the last token, so a stop string comes first.

        Returns:
            The tokens to commit, and ``"stop"`` where a stop string is complete, ``"error"`` where there is an
            ``error``, else ``reason``.

        """
        for i, token in enumerate(tokens, start=1):
            if self._add(token, last=reason is not None and i == len(tokens)):
                return tokens[:i], "stop"
            if self.error is not None:
                return tokens[:i], "error"
        return tokens, reason

    def take(self, last: bool) -> str:
        """Return the text given out since the last call; all that is left if the request has ended."""
        if last and not self._found:
            self._released += [self._held, self._detokenizer.rest()]
            self._held = ""
        text = "".join(self._released)
        self._released.clear()
        return text

    def _add(self, token: int, last: bool) -> bool:
        """Take one token; tell whether the text has a stop string in it now."""
        self._held += self._detokenizer.add([token])
        rest = self._detokenizer.rest()
        text = self._held + (rest if last else rest.rstrip(INCOMPLETE))
        begins = [begin for begin in (text.find(stop) for stop in self._stop) if begin >= 0]
        self._found = bool(begins)
        # Both complete with this token: the text ends before the one that begins first.
        keep = min(begins) if begins else self._num_certain(self._held)
        self._released.append(text[:keep])
        self._held = "" if begins else self._held[keep:]
        return self._found

    def _num_certain(self, text: str) -> int:
        """Count the characters of ``text`` that no stop string can claim, whatever follows."""
        for begin in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[begin:]) for stop in self._stop):
                return begin
        return len(text)
