"""A draft model's forwards in one call of its program: the tokens and KV entries of one forward after the other."""

from __future__ import annotations

import pytest
import torch

import specdec_fast as sd
from specdec_fast.drafters import StepResult
from specdec_fast.drafters.draft_model.drafter import ModelDrafter
from specdec_fast.ops import resolve
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.ragged_model import RaggedModel
from support.models import VOCAB_SIZE, tiny_model
from support.programs import CPU, needs_programs

pytestmark = needs_programs


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 40])
def test_drafting_in_one_call_drafts_the_same(temperature, vocab_size):
    """As forward after forward from Python: all the tokens, and the KV entries."""
    params = sd.SamplingParams(max_new_tokens=30, temperature=temperature, top_k=20, seed=3)
    texts = [[5, 6, 7, 8, 9], [11, 12], [1] * 17]
    found = []
    for enforce_eager in (False, True):
        drafter = ModelDrafter(RaggedModel(tiny_model("llama"), resolve(CPU)), vocab_size)
        if enforce_eager:
            program = drafter.model.program
            drafter.model.use_programs(
                None, lambda batch, pool, rows, taps, p=program: p(batch.token_ids, batch, pool.pages, rows)
            )
        drafter.prepare(512, 16)
        sequences = [
            Sequence(i, list(text), len(text), len(text) + 30, params, frozenset(), seed=3 + i)
            for i, text in enumerate(texts)
        ]
        with torch.inference_mode():
            drafter.admit(sequences)
            drafts = [drafter.propose(sequences, [4, 4, 4])]
            for sequence in sequences:
                sequence.token_ids += [3, 4]
            drafter.commit(sequences, StepResult([range(3)] * len(sequences)))
            drafts.append(drafter.propose(sequences, [5, 0, 2]))
        assert max(int(draft.token_ids.max()) for draft in drafts) < vocab_size
        found.append(([draft.token_ids.tolist() for draft in drafts], drafter.pool.tensors[0]))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_drafting_chooses_the_first_token_where_logits_are_nan():
    model = RaggedModel(tiny_model("llama"), resolve(CPU))
    with torch.no_grad():
        model.model.lm_head.weight[7] = float("nan")
    drafter = ModelDrafter(model, VOCAB_SIZE)
    drafter.prepare(64, 16)
    sequence = Sequence(0, [1, 2, 3], 3, 20, sd.SamplingParams(), frozenset())
    drafter.admit([sequence])
    assert drafter.propose([sequence], [3]).token_ids.tolist() == [0, 0, 0]
