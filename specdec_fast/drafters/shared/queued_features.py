"""Hidden states of committed positions that wait until a drafter with KV entries of its own computes their rows."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows


@dataclass
class KeptRows:
    """How many rows of hidden states one drafter keeps."""

    num_rows: int = 0


class KeptStates:
    """The hidden states ``[T, taps, H]`` of one forward, which several sequences share without a copy.

    ``total`` counts its rows, those for which no sequence waits among them, as long as a sequence waits for one.
    """

    __slots__ = ("_num_spans", "_total", "hidden_states")

    def __init__(self, hidden_states: Tensor, total: KeptRows) -> None:
        self.hidden_states = hidden_states
        self._total = total
        self._num_spans = 0

    def hold(self) -> None:
        """Count a span of rows that waits."""
        if not self._num_spans:
            self._total.num_rows += len(self.hidden_states)
        self._num_spans += 1

    def drop(self) -> None:
        """Count a span less."""
        self._num_spans -= 1
        if not self._num_spans:
            self._total.num_rows -= len(self.hidden_states)


class _Span(NamedTuple):
    """Rows of a forward that wait."""

    kept: KeptStates
    start: int
    stop: int


@dataclass
class QueuedFeatures:
    """What the drafter knows of one admitted sequence."""

    kv_length: int = 0  # number of rows whose KV entries were made of true features
    queued: list[_Span] = field(default_factory=list)  # of the positions behind them, in order
    num_queued: int = 0  # number of these positions

    def add(self, kept: KeptStates, rows: Many[int]) -> None:
        """Queue rows of a forward for the next positions."""
        for start, stop in _spans(rows):
            kept.hold()
            self.queued.append(_Span(kept, start, stop))
            self.num_queued += stop - start

    def take(self, count: int) -> list[Tensor]:
        """Remove the first ``count`` positions; return their hidden states piece by piece, ``[n, taps, H]`` each."""
        pieces: list[Tensor] = []
        num_done = 0
        left = count
        while left:
            kept, start, stop = self.queued[num_done]
            end = min(stop, start + left)
            pieces.append(kept.hidden_states[start:end])
            left -= end - start
            if end < stop:
                self.queued[num_done] = _Span(kept, end, stop)
            else:
                kept.drop()
                num_done += 1
        del self.queued[:num_done]
        self.num_queued -= count
        self.kv_length += count
        return pieces

    def copy_rest(self, total: KeptRows) -> None:
        """Copy what still waits, so that it no longer keeps the rows of other positions and sequences."""
        if self.queued:
            rest = torch.cat([kept.hidden_states[start:stop] for kept, start, stop in self.queued])
            self.clear()
            self.add(KeptStates(rest, total), range(len(rest)))

    def clear(self) -> None:
        """Forget what waits."""
        for span in self.queued:
            span.kept.drop()
        self.queued = []
        self.num_queued = 0


def _spans(rows: Many[int]) -> Iterator[tuple[int, int]]:
    """Yield first row and end of each run of rows that follow each other."""
    if isinstance(rows, range):
        yield rows.start, rows.stop
        return
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield rows[start], rows[i - 1] + 1
            start = i


def tokens_after(rows: list[Rows]) -> list[int]:
    """Return the token that each row takes: that of the position behind the row."""
    return [token for s, start, count, _ in rows for token in s.token_ids[start + 1 : start + count + 1]]  # type: ignore[attr-defined]


def portions(rows: list[Rows], most: int) -> list[list[Rows]]:
    """Split spans into forwards of at most ``most`` rows."""
    portions: list[list[Rows]] = []
    left = 0
    for owner, start, count, _ in rows:
        done = 0
        while done < count:
            if left == 0:
                portions.append([])
                left = most
            size = min(left, count - done)
            portions[-1].append(Rows(owner, start + done, size))
            done = done + size
            left = left - size
    return portions
