"""A drafter that keeps the hidden states of every sequence, and asserts that none is missing or arrives twice."""

from __future__ import annotations

import torch

import specdec_fast as sd
from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool


class Recording(sd.Drafter):
    """Proposes what a function of (sequence, limit) returns; it asks for the taps of the contract.

    Attributes:
        seen: per admitted sequence, its hidden states so far, each ``[taps, H]``.
        released: (committed tokens, hidden states ``[n, taps, H]``) of every admission that has ended.
        num_observed: rows of each call of ``observe``.

    """

    name = "recording"

    def __init__(self, taps, script):
        self.taps, self.script = taps, script
        self.seen, self.released, self.num_observed = {}, [], []

    def prepare(self, num_tokens, page_size):
        self.seen.clear()

    def admit(self, sequences):
        for sequence in sequences:
            assert sequence not in self.seen, "admitted twice"
            assert sequence.target_kv_length == 0, "the target has computed rows before"
            self.seen[sequence] = []

    def observe(self, sequences, positions, features):
        assert len(set(sequences)) == len(sequences) == len(positions)
        assert len(features) == sum(map(len, positions))
        assert features.shape[1] == len(self.taps)
        self.num_observed.append(len(features))
        pieces = features.split([len(each) for each in positions])
        for sequence, each, piece in zip(sequences, positions, pieces, strict=True):
            assert each.start == len(self.seen[sequence]), "not in order"
            assert each.stop < sequence.length, "the last prompt token is a row of the first step"
            self.seen[sequence] += piece.clone()

    def propose(self, sequences, limits):
        for sequence in sequences:
            assert len(self.seen[sequence]) == sequence.length - 1
        proposals = [self.script(s, limit) for s, limit in zip(sequences, limits, strict=True)]
        token_ids = [token for proposal in proposals for token in proposal]
        return sd.Draft(torch.tensor(token_ids, dtype=torch.int64), [len(p) for p in proposals])

    def commit(self, sequences, result):
        for sequence, rows in zip(sequences, result.accepted_rows, strict=True):
            self.seen[sequence] += result.hidden_states[list(rows)].clone()
            assert len(self.seen[sequence]) == sequence.length - 1, "features exist up to position length - 2"

    def release(self, sequence):
        seen = self.seen.pop(sequence, None)
        if seen:
            self.released.append((sequence.token_ids[: len(seen)], torch.stack(seen)))


def hidden_states_of_text(target, token_ids):
    """The hidden states of a whole text, computed alone in one forward."""
    pool = PagePool(target.layout, len(token_ids) + 16, 16, target.row_padding)
    pool.add("text")
    found = target.empty_hidden_states(len(token_ids))
    batch = lay_out(pool, [Rows("text", 0, len(token_ids))], torch.tensor(token_ids))
    target.forward(batch, pool, batch.last_rows, found)
    return found
