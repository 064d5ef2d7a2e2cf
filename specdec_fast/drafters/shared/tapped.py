"""A drafter that computes KV entries of its own from the target's hidden states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch, Rows
from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import DrafterContext, StepResult
from specdec_fast.drafters.shared.pooled import PooledDrafter
from specdec_fast.drafters.shared.queued_features import (
    KeptRows,
    KeptStates,
    QueuedFeatures,
    portions,
    tokens_after,
)
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.drafting import chosen_tokens
from specdec_fast.runner.profiling import PROPOSAL_LENGTHS, REPEATS, proposal_seconds
from specdec_fast.runner.ragged_model import MAX_PREFILL_ROWS
from specdec_fast.sampling_params import SamplingParams

# Of hidden states that are kept, per admitted sequence: so many rows, or so many bytes if these are more rows.
MOST_QUEUED = 64
MOST_QUEUED_BYTES = 512 << 10


class LearnedModel(Protocol):
    """What a model of a drafter has, whatever its layers are."""

    layout: KVLayout  # shapes of its KV entries

    def weights(self) -> Iterable[Tensor]:
        """Return all tensors that it keeps; some may be the target's."""


class TappedDrafter(PooledDrafter):
    """Keeps the hidden states of every committed position, and computes rows of their features when it drafts.

    A step only notes where its hidden states are: on a small target, a few calls of PyTorch take as long as a step. If
    too many rows are kept, they are computed.

    A subclass computes rows of features (``_compute``), and drafts. It says how hidden states become features
    (``_projected``), if they are not the feature of its only tap.

    Args:
        model: computes rows.
        context: the target, its device, and the settings. ``max_prefill_tokens`` bounds its forwards over queued
            features; if it is None, ``MAX_PREFILL_ROWS`` does.
        target_ids: ``[draft_vocab_size]`` int64, the target's id of each draft id; None if they are the same.

    Attributes:
        keeps_last: whether a proposal starts from the last feature, which is then not computed before.
        num_rewritten: how many of the last rows whose entries are made of true features a proposal writes once more.
    """

    keeps_last = True
    num_rewritten = 0
    knows_prefixes = True
    model: Any

    def __init__(self, model: LearnedModel, context: DrafterContext, target_ids: Tensor | None = None) -> None:
        super().__init__(model.layout)
        self.model = model
        self._ops = context.target.ops
        self._vocab_size = context.target.vocab_size
        self._target_ids = target_ids
        self._device = context.device
        self._page_size = context.config.page_size
        self._target_size: int = context.target.hf.config.hidden_size
        self._states: dict[Sequence, QueuedFeatures] = {}
        self._kept = KeptRows()
        self.limit_prefill(context.config.max_prefill_tokens)

    @torch.inference_mode()
    def forward_seconds(self, row_counts: list[int]) -> dict[int, float] | None:
        # The levels of a tree have more rows than a chain: steps are measured as they come.
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

    def _projected(self, hidden_states: Tensor) -> Tensor:
        """Return features ``[T, H]`` of hidden states ``[T, taps, target's hidden size]``."""
        return hidden_states[:, 0].to(self._kv_layout.dtype)

    @abstractmethod
    def _compute(self, rows: list[Rows]) -> object:
        """Take the queued features of these rows (``_take_features``), and write their KV entries."""

    @property
    def num_admitted(self) -> int:
        """The number of admitted sequences."""
        return len(self._states)

    @property
    def num_kept_rows(self) -> int:
        """The number of rows of hidden states in memory: of each forward all rows, while one of them waits."""
        return self._kept.num_rows

    def weights(self) -> Iterable[Tensor]:
        weights: Iterable[Tensor] = self.model.weights()
        return weights

    @property
    def estimates_memory(self) -> bool:  # PyTorch projects the features, and runs the forwards if no program does
        return True

    def limit_prefill(self, max_prefill_tokens: int | None) -> None:
        self._most_rows = min(max_prefill_tokens or MAX_PREFILL_ROWS, MAX_PREFILL_ROWS)

    def prepare(self, num_tokens: int, page_size: int) -> None:
        self._states.clear()
        self._kept = KeptRows()
        super().prepare(num_tokens, page_size)

    def known_positions(self, sequence: Sequence) -> int:
        if self.pool is None or self.pool.prefixes is None:
            return 0
        page_of = self.pool.prefixes.page_of
        num_pages = 0
        for key in self._keys(sequence, sequence.length - 1):
            if key not in page_of:
                break
            num_pages += 1
        return num_pages * self._page_size

    def admit(self, sequences: list[Sequence]) -> None:
        pool = self._pool()
        for sequence in sequences:
            num_known = sequence.target_kv_length
            pool.add(sequence)
            pool.share(sequence, self._keys(sequence, num_known))
            self._states[sequence] = QueuedFeatures(num_known)

    @torch.inference_mode()
    def observe(self, sequences: list[Sequence], positions: list[range], features: Tensor) -> None:
        # A later forward may overwrite the features: they are copied, or their rows are computed if too many wait.
        is_kept = self._kept.num_rows + len(features) <= self._most_kept(features)
        kept = KeptStates(features.clone() if is_kept else features, self._kept)
        end = 0
        for sequence, computed in zip(sequences, positions, strict=True):
            self._states[sequence].add(kept, range(end, end + len(computed)))
            end += len(computed)
        if not is_kept or self._completes_pages(positions):
            self._catch_up(sequences)
            self._keep(sequences)

    @torch.inference_mode()
    def commit(self, sequences: list[Sequence], result: StepResult) -> None:
        if not sequences or result.hidden_states is None:
            return
        self._keep(sequences)
        kept = KeptStates(result.hidden_states, self._kept)
        for sequence, rows in zip(sequences, result.accepted_rows, strict=True):
            self._states[sequence].add(kept, rows)
        if self._kept.num_rows > self._most_kept(result.hidden_states):
            self._catch_up(sequences)

    @torch.inference_mode()
    def commit_ended(self, sequences: list[Sequence], result: StepResult) -> None:
        if result.hidden_states is None:
            return
        size = self._page_size
        pool = self._pool()
        kept = KeptStates(result.hidden_states, self._kept)
        rows = []
        for sequence, accepted in zip(sequences, result.accepted_rows, strict=True):
            num_full = (sequence.length - 1) // size
            if num_full > pool.num_kept(sequence):
                state = self._states[sequence]
                state.add(kept, accepted)
                rows.append(Rows(sequence, state.kv_length, min(num_full * size - state.kv_length, state.num_queued)))
        for some in portions([span for span in rows if span.count > 0], self._most_rows):
            self._compute(some)
        for sequence in sequences:  # no proposal writes any row again
            pool.keep(sequence, self._keys(sequence, self._states[sequence].kv_length))

    def release(self, sequence: Sequence) -> None:
        if (state := self._states.pop(sequence, None)) is not None:
            state.clear()
            self._pool().free(sequence)

    def _completes_pages(self, positions: list[range]) -> bool:
        """Return whether rows should not wait for the next proposal, because other prompts wait for their pages."""
        size = self._page_size
        return self._keeps_prefixes and any(each.stop // size > each.start // size for each in positions)

    def _keep(self, sequences: list[Sequence]) -> None:
        """Keep the full pages of sequences whose rows will not be written again."""
        if not self._keeps_prefixes:
            return
        pool = self._pool()
        for sequence in sequences:
            num_final = self._states[sequence].kv_length - self.num_rewritten
            if num_final - pool.num_kept(sequence) * self._page_size >= self._page_size:
                pool.keep(sequence, self._keys(sequence, num_final))

    def _keys(self, sequence: Sequence, num_positions: int) -> list[tuple[bytes, int]]:
        """Return the keys of the pages that lie within the first positions of a sequence, which has tokens behind them.

        A row is made of the token behind its position as well, so the token behind a page belongs to its key.
        """
        if sequence.page_keys is None:
            return []
        size = self._page_size
        keys = sequence.page_keys.first(sequence.token_ids, max(0, num_positions) // size)
        return [(key, sequence.token_ids[(i + 1) * size]) for i, key in enumerate(keys)]

    def _next_tokens(
        self, logits: Tensor, sampling: Sampling | None, token_ids: Tensor, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Choose each row's token ``[N]``, by the rule and with the noise by which the target will choose."""
        ids = self._target_ids
        return chosen_tokens(self._ops, logits, self._vocab_size, sampling, token_ids, cu_seqlens, ids)

    def _most_kept(self, hidden_states: Tensor) -> int:
        return len(self._states) * _most_queued(hidden_states.nbytes // len(hidden_states))

    def _kept_bytes(self, num_sequences: int, num_rows: int) -> int:
        """Return the memory of hidden states for ``step_bytes``: what is kept, and a copy of ``num_rows`` rows."""
        row_bytes = len(self.taps) * self._target_size * self._kv_layout.dtype.itemsize
        return (num_sequences * _most_queued(row_bytes) + num_rows) * row_bytes

    def num_queued(self, sequence: Sequence) -> int:
        """Return the number of features of a sequence whose rows are not computed yet."""
        return self._states[sequence].num_queued

    def _take_batch(self, rows: list[Rows]) -> tuple[RaggedBatch, Tensor]:
        """Return a forward over rows of queued features, and these features ``[T, H]``, which it removes."""
        return lay_out(self._pool(), rows, to_device(tokens_after(rows), self._device)), self._take_features(rows)

    def _queued_rows(self, sequences: list[Sequence], but_last: bool = False) -> list[Rows]:
        """Return the rows of all queued features of each sequence, or of all but the last."""
        return [Rows(s, self._states[s].kv_length, self.num_queued(s) - but_last) for s in sequences]

    def _take_pieces(self, rows: list[Rows]) -> list[Tensor]:
        """Remove and return the hidden states of the first queued features of some sequences."""
        return [piece for row in rows for piece in self._states[row.owner].take(row.count)]  # type: ignore[index]

    def _take_hidden_states(self, rows: list[Rows]) -> Tensor:
        """Remove and return the hidden states of the first queued features of some sequences, as one tensor."""
        pieces = self._take_pieces(rows)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _take_features(self, rows: list[Rows]) -> Tensor:
        """Remove and return the first queued features of some sequences, ``[sum of counts, H]``."""
        return self._projected(self._take_hidden_states(rows))

    def _catch_up(self, sequences: list[Sequence]) -> None:
        """Compute the rows of queued features, but for the last of each sequence if a proposal starts from it."""
        rows = self._queued_rows(sequences, but_last=self.keeps_last)
        for some in portions([span for span in rows if span.count > 0], self._most_rows):
            self._compute(some)
        for sequence in sequences:
            self._states[sequence].copy_rest(self._kept)


def _most_queued(row_bytes: int) -> int:
    return max(MOST_QUEUED, MOST_QUEUED_BYTES // max(1, row_bytes))
