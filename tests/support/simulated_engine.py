"""What an engine does for one drafter that reads hidden states: decoding with acceptances that a seed decides."""

from __future__ import annotations

import random

import torch

from specdec_fast.batch.sampling_batch import sampling_of
from specdec_fast.drafters import StepResult
from specdec_fast.models.hidden_states import FINAL
from specdec_fast.ops.verify_chain import verify_chain
from specdec_fast.request.sequence import Sequence
from support.models import VOCAB_SIZE


def new_sequence(index, length, params, rng):
    token_ids = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
    return Sequence(index, token_ids, length, length + 90, params, frozenset(), seed=7 * index)


@torch.no_grad()
def features_of(model, token_ids, taps):
    """The taps at every position: ``[n, taps, H]``."""
    states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return torch.stack([states[-1 if tap == FINAL else tap][0] for tap in taps], dim=1)


def chosen_by_rule(sequence):
    """Return what takes logits and the number of tokens drafted so far, and returns the id by the target's rule."""

    def choose(logits, ahead):
        if not sequence.samples:
            return int(logits.argmax())
        cu_seqlens = torch.tensor([0, 1], dtype=torch.int32)
        sampling = sampling_of([sequence], logits.device, ahead)
        return int(verify_chain(logits[None], torch.zeros(1, dtype=torch.int64), cu_seqlens, sampling)[0])

    return choose


class SimulatedEngine:
    """Decodes sequences, and compares every proposal with ``expected(features, token_ids, choose, limit)``."""

    def __init__(self, model, drafter, expected, seed=0):
        self.model, self.drafter, self.expected = model, drafter, expected
        self.rng, self.num_proposed = random.Random(seed), 0
        drafter.prepare(2000, 16)
        for keys, values in drafter.pool.layers:
            keys.fill_(torch.nan)  # an entry that was never written must not be read
            values.fill_(torch.nan)

    def new_sequences(self, lengths, params):
        """Make sequences whose parameters are those of ``params``, in turn; prefill them."""
        sequences = [new_sequence(i, n, params[i % len(params)], self.rng) for i, n in enumerate(lengths)]
        self.prefill(sequences)
        return sequences

    def features(self, token_ids):
        return features_of(self.model, token_ids, self.drafter.taps)

    def prefill(self, sequences):
        """Admit sequences, and hand over the features of their prompts in chunks that mix them."""
        self.drafter.admit(sequences)
        done = dict.fromkeys(sequences, 0)
        while any(done[s] < s.length - 1 for s in sequences):
            spans = {s: range(done[s], min(s.length - 1, done[s] + self.rng.randint(1, 9))) for s in sequences}
            spans = {s: span for s, span in spans.items() if span}
            features = torch.cat([self.features(s.token_ids)[span.start : span.stop] for s, span in spans.items()])
            self.drafter.observe(list(spans), list(spans.values()), features)
            features.fill_(torch.nan)  # the memory belongs to the next forward
            done |= {s: span.stop for s, span in spans.items()}

    def step(self, sequences, largest, least=0):
        """One step: compare the proposals with the formulas, then accept some of each and emit another token."""
        limits = [self.rng.randint(least, largest) for _ in sequences]
        # A prompt of one token has no features before its first token; nothing is drafted for it then.
        limits = [limit if s.length > 1 else 0 for s, limit in zip(sequences, limits, strict=True)]
        proposals = [[] for _ in sequences]
        if any(limits):
            draft = self.drafter.propose(sequences, limits)
            draft.check(limits)
            proposals = [part.tolist() for part in draft.token_ids.split(draft.num_draft_tokens)]
            for s, limit, proposal in zip(sequences, limits, proposals, strict=True):
                expected = []
                if limit:
                    features = self.features(s.token_ids)[:-1]
                    expected = self.expected(features, s.token_ids, chosen_by_rule(s), limit)
                assert proposal == expected
                self.num_proposed += len(expected)
        self.emit(sequences, proposals)

    def emit(self, sequences, proposals):
        hidden_states, accepted_rows, first = [], [], 0
        for s, proposal in zip(sequences, proposals, strict=True):
            num_accepted = self.rng.randint(0, len(proposal))
            accepted_rows.append(range(first, first + num_accepted + 1))
            # A proposed token stands in a row of the forward, whether it is accepted or not.
            hidden_states.append(self.features([*s.token_ids, *proposal])[s.length - 1 :])
            first += len(hidden_states[-1])
            s.token_ids.extend([*proposal[:num_accepted], self.rng.randrange(VOCAB_SIZE)])
        self.drafter.commit(sequences, StepResult(accepted_rows, torch.cat(hidden_states)))  # the drafter may keep it

    def release(self, sequences):
        """Release sequences; nothing of them may stay."""
        for sequence in sequences:
            self.drafter.release(sequence)
        assert self.drafter.pool.is_vacant
        assert self.drafter.num_admitted == self.drafter.num_kept_rows == 0
