"""What it costs to take a sequence in: a draft model must catch up with what it has not seen before it can draft."""

from __future__ import annotations

from collections.abc import Iterable

from specdec_fast.request.sequence import Sequence

_USUAL_LAG = 2  # tokens that a draft model lacks after a step in which it drafted
_HORIZON = 128  # tokens over which the price of catching up is spread, at most


class CatchUpCost:
    """Knows how far the drafter has come with each sequence, and what those cost with whom it has not kept up."""

    def __init__(self) -> None:
        self._drafted_at: dict[Sequence, int] = {}  # length up to which the drafter had come

    def note(self, sequences: Iterable[Sequence]) -> None:
        """Note that the drafter has come up to the last step with these."""
        self._drafted_at.update((sequence, sequence.length - 1) for sequence in sequences)

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence."""
        self._drafted_at.pop(sequence, None)

    def is_behind(self, sequence: Sequence) -> bool:
        """Return whether the drafter lacks more of a sequence than one step's tokens."""
        return self._lag(sequence) > _USUAL_LAG

    def must_catch_up(self, batch: list[Sequence], lengths: list[int]) -> bool:
        """Return whether a draft of these lengths begins with tokens of earlier steps."""
        return any(k and s.is_admitted and self.is_behind(s) for s, k in zip(batch, lengths, strict=True))

    def seconds(self, batch: list[Sequence], seconds_per_token: float) -> tuple[list[float], list[float]]:
        """Return ``[B]`` twice: what catching up with a sequence costs, in all and per token yet to be emitted."""
        seconds = [self._lag(s) * seconds_per_token if self.is_behind(s) else 0.0 for s in batch]
        return seconds, [
            price / min(sequence.num_remaining, _HORIZON) for price, sequence in zip(seconds, batch, strict=True)
        ]

    def _lag(self, sequence: Sequence) -> int:
        return sequence.length - self._drafted_at.get(sequence, 0)


def from_the_start(batch: list[Sequence], entry: list[float], seconds_per_token: float) -> list[float]:
    """Return ``entry``, and for those who pay nothing any more what each of their tokens had to pay."""
    return [
        each or s.prompt_length * seconds_per_token / min(s.max_length - s.prompt_length, _HORIZON)
        for s, each in zip(batch, entry, strict=True)
    ]


def without_entry(lengths: list[int], entry: list[float]) -> list[int]:
    """Return ``lengths`` without the draft tokens of those who would have to pay for them."""
    return [0 if each else k for k, each in zip(lengths, entry, strict=True)]
