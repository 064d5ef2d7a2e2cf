"""Features of committed positions that wait until a drafter with KV entries of its own computes their rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows


@dataclass
class QueuedFeatures:
    """What the drafter knows of one admitted sequence.

    Attributes:
        kv_length: number of rows whose KV entries were made of true features.
        queued: projected features of the rows behind them, each ``[n, H]``.
        num_queued: their number.

    """

    kv_length: int = 0
    queued: list[Tensor] = field(default_factory=list)
    num_queued: int = 0

    def add(self, features: Tensor) -> None:
        """Queue features ``[n, H]`` of the next positions."""
        self.queued.append(features)
        self.num_queued += len(features)

    def take(self, count: int) -> Tensor:
        """Remove and return the first ``count`` queued features, ``[count, H]``."""
        joined = self.queued[0] if len(self.queued) == 1 else torch.cat(self.queued)
        # A copy: a view would keep the features of a whole prefill forward.
        self.queued, self.num_queued = [joined[count:].clone()] if count < len(joined) else [], self.num_queued - count
        self.kv_length += count
        return joined[:count]


def tokens_after(rows: list[Rows]) -> list[int]:
    """Return the token that each row takes: that of the position behind its own."""
    return [token for s, start, count in rows for token in s.token_ids[start + 1 : start + count + 1]]  # type: ignore[attr-defined]


def portions(rows: list[Rows], most: int) -> list[list[Rows]]:
    """Split spans into forwards of at most ``most`` rows."""
    portions: list[list[Rows]] = []
    left = 0
    for owner, start, count in rows:
        done = 0
        while done < count:
            if left == 0:
                portions.append([])
                left = most
            size = min(left, count - done)
            portions[-1].append(Rows(owner, start + done, size))
            done, left = done + size, left - size
    return portions
