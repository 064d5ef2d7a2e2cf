"""The draft model: a small causal model with a paged KV cache of its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specdec_fast.drafters.base import Draft, Drafter
from specdec_fast.kv_cache import PagePool, RaggedBatch, Rows
from specdec_fast.models import RaggedModel, prefill
from specdec_fast.sequence import Sequence


class ModelDrafter(Drafter):
    """Proposes the draft model's greedy continuation.

    Its KV cache holds a prefix of every sequence's committed tokens (I3): after a step it lacks one token, two when
    all were accepted, and is fed those first. Rejection only lowers ``draft_kv_length`` (I4); a prompt is computed
    once.
    """

    def __init__(self, model: RaggedModel, target_vocab_size: int) -> None:
        self.model = model
        # Checkpoints of one family pad the same vocabulary to different widths; ids beyond the shorter are no words.
        self._vocab_size = min(model.vocab_size, target_vocab_size)
        self.draft_kv_length: dict[Sequence, int] = {}
        self.pool: PagePool | None = None

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.model.name

    def prepare(self, num_tokens: int, page_size: int) -> None:
        """Allocate the pool, or keep the one at hand if it is large enough."""
        if self.pool is None or self.pool.num_pages * page_size < num_tokens:
            self.pool = PagePool(self.model.layout, num_tokens, page_size)

    def admit(self, sequences: list[Sequence]) -> None:
        """Prefill every prompt but for its last token."""
        pool = self._pool()
        served = [sequence for sequence in sequences if self._room(sequence) > 0]
        for sequence in sequences:
            pool.open(sequence, sequence.max_length - 1)
            self.draft_kv_length[sequence] = 0
        prefill(self.model, pool, {s: self._known(s.token_ids[:-1]) for s in served})
        for sequence in served:
            self.draft_kv_length[sequence] = sequence.length - 1

    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        """Run the draft model ``max(limits)`` times, each time on one row per sequence still drafting."""
        limits = [min(limit, self._room(s)) for s, limit in zip(sequences, limits, strict=True)]
        if not any(limits):
            return Draft(torch.empty(0, dtype=torch.int64), limits)
        drafted: list[Tensor] = []  # per forward, one token of each member
        where: list[list[int]] = [[] for _ in sequences]  # each sequence's tokens in the concatenation of those
        with self.model.attached():
            for forwards, members in _stages(limits):
                drafting = [sequences[i] for i in members]
                # a sequence's newest token, if it has one, is in the forward before
                tokens = torch.cat(drafted)[[where[i][-1] for i in members]] if drafted else None
                first_place = sum(map(len, drafted))
                drafted += self._draft(drafting, tokens, forwards)
                for place, i in enumerate(members, first_place):
                    where[i] += range(place, sum(map(len, drafted)), len(members))
        for sequence, limit in zip(sequences, limits, strict=True):
            if limit:
                self.draft_kv_length[sequence] = sequence.length - 1 + limit
        return Draft(torch.cat(drafted)[[place for places in where for place in places]], limits)

    def _draft(self, sequences: list[Sequence], tokens: Tensor | None, forwards: range) -> Iterator[Tensor]:
        """Yield the ``[B]`` tokens of each forward; the first forward of all has rows to catch up with."""
        if tokens is None:
            tokens = self._catch_up(sequences)
            yield tokens
            forwards = forwards[1:]
        if forwards:
            rows = [Rows(s, s.length - 1 + forwards.start, len(forwards)) for s in sequences]
            for batch_of in self._pool().successive(rows):
                tokens = self._most_likely(batch_of(tokens), None)
                yield tokens

    def commit(self, sequences: list[Sequence]) -> None:
        """Keep the KV entries of accepted tokens, give up those of rejected ones."""
        for sequence in sequences:
            self.draft_kv_length[sequence] = min(self.draft_kv_length[sequence], sequence.length - 1)

    def release(self, sequence: Sequence) -> None:
        """Return the sequence's pages."""
        if self.draft_kv_length.pop(sequence, None) is not None:
            self._pool().close(sequence)

    def _pool(self) -> PagePool:
        if self.pool is None:
            raise RuntimeError("prepare() has not been called.")
        return self.pool

    def _room(self, sequence: Sequence) -> int:
        """Return how many tokens the draft model's own positions leave it to propose; the target may have more."""
        if self.model.max_positions is None:
            return sequence.max_length
        return max(0, self.model.max_positions - sequence.length + 1)

    def _known(self, token_ids: list[int]) -> list[int]:
        """Replace ids beyond the draft model's embedding: such a token costs acceptance, never correctness."""
        return [min(token, self.model.vocab_size - 1) for token in token_ids]

    def _catch_up(self, sequences: list[Sequence]) -> Tensor:
        """Feed each sequence the committed tokens its KV lacks; return the first draft tokens."""
        rows, token_ids = [], []
        for sequence in sequences:
            start = self.draft_kv_length[sequence]
            rows.append(Rows(sequence, start, sequence.length - start))
            token_ids += self._known(sequence.token_ids[start:])
        batch = self._pool().batch(rows, torch.tensor(token_ids, device=self.model.layout.device))
        # Each sequence's last row; with one row each that is every row.
        last_rows = batch.cu_seqlens_q[1:].long() - 1 if len(token_ids) > len(rows) else None
        return self._most_likely(batch, last_rows)

    def _most_likely(self, batch: RaggedBatch, logit_rows: Tensor | None) -> Tensor:
        """Compute the rows; return each sequence's most likely next token ``[B]``."""
        logits = self.model.forward(batch, self._pool(), logit_rows)
        if self._vocab_size < logits.shape[1]:
            logits = logits[:, : self._vocab_size]
        return logits.argmax(dim=-1)


def _stages(limits: list[int]) -> Iterator[tuple[range, list[int]]]:
    """Yield (forwards, members): successive forwards in which the same sequences draft."""
    start = 0
    for stop in sorted(set(limits) - {0}):
        yield range(start, stop), [i for i, limit in enumerate(limits) if limit >= stop]
        start = stop
