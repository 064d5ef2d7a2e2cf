"""A drafter that computes KV entries of its own from the target's hidden states."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import StepResult
from specdec_fast.drafters.pooled import PooledDrafter
from specdec_fast.drafters.queued_features import QueuedFeatures, portions
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.models.ragged_model import MAX_PREFILL_ROWS
from specdec_fast.request.sequence import Sequence

MOST_QUEUED = 64  # features of a sequence that wait for a proposal; more are computed at once


class TappedDrafter(PooledDrafter):
    """Queues a feature for every committed position, and computes rows of features when it drafts.

    A subclass says how hidden states become features (``_projected``) and how rows of them are computed
    (``_compute``), and drafts.

    Args:
        layout: shapes of its KV entries.
        device: the target's.
        max_prefill_tokens: bounds its forwards over queued features; None: ``MAX_PREFILL_ROWS`` does.

    Attributes:
        keeps_last: whether a proposal starts from the last feature, which is then not computed before.

    """

    keeps_last = True

    def __init__(self, layout: KVLayout, device: torch.device, max_prefill_tokens: int | None) -> None:
        super().__init__(layout)
        self._device = device
        self._states: dict[Sequence, QueuedFeatures] = {}
        self.limit_prefill(max_prefill_tokens)

    @abstractmethod
    def _projected(self, hidden_states: Tensor) -> Tensor:
        """Return features ``[T, H]`` of hidden states ``[T, taps, target's hidden size]``."""

    @abstractmethod
    def _compute(self, rows: list[Rows]) -> object:
        """Take the queued features of these rows (``_taken``), and write their KV entries."""

    @property
    def estimates_memory(self) -> bool:
        """PyTorch projects the features, and runs the forwards if no program does."""
        return True

    def limit_prefill(self, max_prefill_tokens: int | None) -> None:
        """Bound its forwards over queued features, as ``step_bytes`` counts them."""
        self._most_rows = min(max_prefill_tokens or MAX_PREFILL_ROWS, MAX_PREFILL_ROWS)

    def prepare(self, num_tokens: int, page_size: int) -> None:
        """Allocate the pool, or keep the present one; forget what an interrupted run left."""
        self._states.clear()
        super().prepare(num_tokens, page_size)

    def admit(self, sequences: list[Sequence]) -> None:
        """Admit sequences; their features follow."""
        for sequence in sequences:
            self._pool().add(sequence)
            self._states[sequence] = QueuedFeatures()

    @torch.inference_mode()
    def observe(self, sequences: list[Sequence], positions: list[range], features: Tensor) -> None:
        """Queue the features of prompts, and compute their rows."""
        projected = self._projected(features).split([len(own) for own in positions])
        for sequence, rows in zip(sequences, projected, strict=True):
            self._states[sequence].add(rows.clone() if len(rows) == 1 else rows)  # of more, `take` copies the last
        self._catch_up(sequences)

    @torch.inference_mode()
    def commit(self, sequences: list[Sequence], result: StepResult) -> None:
        """Queue the features of committed tokens; compute their rows if too many wait."""
        if not sequences or result.hidden_states is None:
            return
        rows = to_device([row for own in result.accepted_rows for row in own], self._device)
        projected = self._projected(result.hidden_states[rows]).split([len(own) for own in result.accepted_rows])
        for sequence, added in zip(sequences, projected, strict=True):
            self._states[sequence].add(added)
        self._catch_up([sequence for sequence in sequences if self._num_queued(sequence) > MOST_QUEUED])

    def release(self, sequence: Sequence) -> None:
        """Return the sequence's pages, and forget its features."""
        if self._states.pop(sequence, None) is not None:
            self._pool().free(sequence)

    def _is_complete(self, sequence: Sequence) -> bool:
        """Return whether the features of all positions but the newest are known, and there is one to start from."""
        if (state := self._states.get(sequence)) is None:
            return False
        num_queued = self._num_queued(sequence)
        return num_queued >= self.keeps_last and state.kv_length + num_queued == sequence.length - 1

    def _num_queued(self, sequence: Sequence) -> int:
        """Return the number of features whose rows are not computed yet."""
        return self._states[sequence].num_queued

    def _queued_rows(self, sequences: list[Sequence], but_last: bool = False) -> list[Rows]:
        """Return the rows of all queued features of each sequence, or of all but the last."""
        return [Rows(s, self._states[s].kv_length, self._num_queued(s) - but_last) for s in sequences]

    def _taken(self, rows: list[Rows]) -> Tensor:
        """Remove and return the first queued features of some sequences, ``[sum of counts, H]``."""
        return torch.cat([self._states[row.owner].take(row.count) for row in rows])  # type: ignore[index]

    def _catch_up(self, sequences: list[Sequence]) -> None:
        """Compute the rows of queued features, but for the last of each sequence if a proposal starts from it."""
        rows = self._queued_rows(sequences, but_last=self.keeps_last)
        for some in portions([own for own in rows if own.count > 0], self._most_rows):
            self._compute(some)
