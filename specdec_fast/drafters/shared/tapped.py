"""A drafter that computes KV entries of its own from the target's hidden states."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.drafters.base import DrafterContext, StepResult
from specdec_fast.drafters.shared.pooled import PooledDrafter
from specdec_fast.drafters.shared.queued_features import KeptRows, KeptStates, QueuedFeatures, portions
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.profiling import PROPOSAL_LENGTHS, REPEATS, proposal_seconds
from specdec_fast.runner.ragged_model import MAX_PREFILL_ROWS
from specdec_fast.sampling_params import SamplingParams

# Of hidden states that are kept, per admitted sequence: so many rows, or so many bytes if these are more rows.
MOST_QUEUED = 64
MOST_QUEUED_BYTES = 512 << 10


class TappedDrafter(PooledDrafter):
    """Keeps the hidden states of every committed position, and computes rows of their features when it drafts.

    A step only notes where its hidden states are: on a small target, a few calls of PyTorch take as long as a step. If
    too many rows are kept, they are computed.

    A subclass says how hidden states become features (``_projected``) and how rows of them are computed
    (``_compute``), and drafts.

    Args:
        layout: shapes of its KV entries.
        context: the target, its device, and the settings. ``max_prefill_tokens`` bounds its forwards over queued
            features; if it is None, ``MAX_PREFILL_ROWS`` does.

    Attributes:
        keeps_last: whether a proposal starts from the last feature, which is then not computed before.

    """

    keeps_last = True

    def __init__(self, layout: KVLayout, context: DrafterContext) -> None:
        super().__init__(layout)
        self._device = context.device
        self._page_size = context.config.page_size
        self._target_size: int = context.target.hf.config.hidden_size
        self._states: dict[Sequence, QueuedFeatures] = {}
        self._kept = KeptRows()
        self.limit_prefill(context.config.max_prefill_tokens)

    @torch.inference_mode()
    def forward_seconds(self, row_counts: list[int]) -> dict[int, float] | None:
        """Time proposals of chains; those of trees, whose levels have more rows, are measured as they come."""
        if self.max_nodes:
            return None
        long = max(PROPOSAL_LENGTHS)
        self.prepare(max(row_counts) * (long + 2 + self._page_size), self._page_size)
        self._proposal_seconds(1, long)  # warms up
        of_one, per_token = proposal_seconds(partial(self._proposal_seconds, 1))
        once = max(0.0, of_one - per_token)
        whole = {n: min(self._proposal_seconds(n, long) for _ in range(REPEATS)) for n in row_counts}
        self.pool = None
        return {n: max(seconds - once, seconds / 10) / long for n, seconds in whole.items()} | {0: once}

    def _proposal_seconds(self, num_sequences: int, num_draft_tokens: int) -> float:
        """Return the seconds of a proposal for short sequences with one new feature each."""
        features = torch.zeros(
            (num_sequences, len(self.taps), self._target_size), dtype=self._kv_layout.dtype, device=self._device
        )
        sequences = [
            Sequence(i, [0, 0], 2, num_draft_tokens + 3, SamplingParams(), frozenset()) for i in range(num_sequences)
        ]
        self.admit(sequences)
        self.commit(sequences, StepResult([range(i, i + 1) for i in range(num_sequences)], features))
        started = perf_counter()
        self.propose(sequences, [num_draft_tokens] * num_sequences).token_ids.tolist()  # tolist() waits for a GPU
        seconds = perf_counter() - started
        for sequence in sequences:
            self.release(sequence)
        return seconds

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
        self._kept = KeptRows()
        super().prepare(num_tokens, page_size)

    def admit(self, sequences: list[Sequence]) -> None:
        """Admit sequences; their features follow."""
        for sequence in sequences:
            self._pool().add(sequence)
            self._states[sequence] = QueuedFeatures()

    @torch.inference_mode()
    def observe(self, sequences: list[Sequence], positions: list[range], features: Tensor) -> None:
        """Keep a copy of the hidden states of prompts; if they are too many, compute their rows instead."""
        is_kept = self._kept.num_rows + len(features) <= self._most_kept(features)
        kept = KeptStates(features.clone() if is_kept else features, self._kept)
        end = 0
        for sequence, own in zip(sequences, positions, strict=True):
            self._states[sequence].add(kept, range(end, end + len(own)))
            end += len(own)
        if not is_kept:
            self._catch_up(sequences)

    @torch.inference_mode()
    def commit(self, sequences: list[Sequence], result: StepResult) -> None:
        """Keep the hidden states of committed tokens; if too many are kept, compute the rows of these sequences."""
        if not sequences or result.hidden_states is None:
            return
        kept = KeptStates(result.hidden_states, self._kept)
        for sequence, rows in zip(sequences, result.accepted_rows, strict=True):
            self._states[sequence].add(kept, rows)
        if self._kept.num_rows > self._most_kept(result.hidden_states):
            self._catch_up(sequences)

    def release(self, sequence: Sequence) -> None:
        """Return the sequence's pages, and forget its features."""
        if (state := self._states.pop(sequence, None)) is not None:
            state.clear()
            self._pool().free(sequence)

    def _most_kept(self, hidden_states: Tensor) -> int:
        """Return how many rows of hidden states may be kept for the admitted sequences."""
        return len(self._states) * _most_queued(hidden_states.nbytes // len(hidden_states))

    def _kept_bytes(self, num_sequences: int, num_rows: int) -> int:
        """Return the memory of hidden states for ``step_bytes``: what is kept, and a copy of ``num_rows`` rows."""
        row_bytes = len(self.taps) * self._target_size * self._kv_layout.dtype.itemsize
        return (num_sequences * _most_queued(row_bytes) + num_rows) * row_bytes

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

    def _pieces(self, rows: list[Rows]) -> list[Tensor]:
        """Remove and return the hidden states of the first queued features of some sequences."""
        return [piece for row in rows for piece in self._states[row.owner].take(row.count)]  # type: ignore[index]

    def _hidden_states(self, rows: list[Rows]) -> Tensor:
        """Remove and return the hidden states of the first queued features of some sequences, as one tensor."""
        pieces = self._pieces(rows)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _taken(self, rows: list[Rows]) -> Tensor:
        """Remove and return the first queued features of some sequences, ``[sum of counts, H]``."""
        return self._projected(self._hidden_states(rows))

    def _catch_up(self, sequences: list[Sequence]) -> None:
        """Compute the rows of queued features, but for the last of each sequence if a proposal starts from it."""
        rows = self._queued_rows(sequences, but_last=self.keeps_last)
        for some in portions([own for own in rows if own.count > 0], self._most_rows):
            self._compute(some)
        for sequence in sequences:
            self._states[sequence].copy_rest(self._kept)


def _most_queued(row_bytes: int) -> int:
    return max(MOST_QUEUED, MOST_QUEUED_BYTES // max(1, row_bytes))
