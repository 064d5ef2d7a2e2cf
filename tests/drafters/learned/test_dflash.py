"""The DFlash drafter proposes what the formulas say, whatever the batch, the chunks and rejections."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import specdec_fast as sd
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import DrafterContext
from specdec_fast.drafters.dflash.drafter import DFlashDrafter
from support.dflash import BLOCK, dense_block, write_checkpoint
from support.grids import grid
from support.simulated_engine import SimulatedEngine

OPTIONS = {
    "dflash": {},
    "own layers": {"own_embedding": True, "draft_vocab_size": 40, "bias": True},
    "windows": {"windows": (None, 7, None), "num_layers": 3, "softcap": 3.0},
    "causal": {"causal": True},
    "dspark": {"markov": "vanilla"},
    "gated": {"markov": "gated", "draft_vocab_size": 40},
    "rnn": {"markov": "rnn"},
}


def make(folder, target, model, options, seed=0):
    weights = write_checkpoint(folder, model, taps=(3, 0, 1), **options)
    drafter = DFlashDrafter(DrafterContext(target, EngineConfig()), str(folder))
    assert drafter.taps == (3, 0, 1)
    return SimulatedEngine(model, drafter, partial(dense_block, weights, options), seed)


@pytest.mark.parametrize("options", grid(OPTIONS, keep=["windows", "causal", "gated"]))
def test_proposals_are_those_of_the_formulas(tmp_path, target, model, options):
    engine = make(tmp_path, target, model, options)
    params = [sd.SamplingParams(), sd.SamplingParams(temperature=1.0), sd.SamplingParams(temperature=0.7, top_k=9)]
    sequences = engine.new_sequences((1, 2, 21, 9), params)
    for _ in range(4):
        engine.step(sequences, BLOCK + 2)
        engine.step(sequences[::3], 3)
    assert engine.num_proposed > 50


@pytest.mark.parametrize("kind", ["dspark", "gated", "rnn"])
def test_scores_are_products_of_confidences(tmp_path, target, model, kind):
    """A score is the logarithm of the probability that the token and all before it are accepted."""
    options = OPTIONS[kind]
    weights = write_checkpoint(tmp_path, model, **options)
    drafter = DFlashDrafter(DrafterContext(target, EngineConfig(num_draft_tokens="auto")), str(tmp_path))
    assert drafter.has_scores
    engine = SimulatedEngine(model, drafter, partial(dense_block, weights, options), 0)
    sequences = engine.new_sequences((1, 21, 9), [sd.SamplingParams(), sd.SamplingParams(temperature=1.0)])
    limits = [4, 0, BLOCK + 2]
    draft = drafter.propose(sequences, limits)
    draft.check(limits)
    assert draft.num_draft_tokens == [4, 0, BLOCK]
    for sequence, tokens, scores in zip(
        sequences, draft.token_ids.split(draft.num_draft_tokens), draft.scores_by_sequence(), strict=True
    ):
        drafted, confidences = tokens.tolist(), []
        if drafted:
            features = engine.features(sequence.token_ids)[:-1]
            follow = lambda _, ahead, drafted=drafted: drafted[ahead]  # noqa: E731
            dense_block(weights, options, features, sequence.token_ids, follow, len(drafted), confidences)
        assert scores == pytest.approx([math.log(math.prod(confidences[: i + 1])) for i in range(len(drafted))], 1e-3)


@pytest.mark.parametrize(("kind", "num_draft_tokens"), [("dspark", 5), ("dflash", "auto")])
def test_there_are_no_scores_without_a_head_or_a_policy(tmp_path, target, model, kind, num_draft_tokens):
    write_checkpoint(tmp_path, model, **OPTIONS[kind])
    drafter = DFlashDrafter(DrafterContext(target, EngineConfig(num_draft_tokens=num_draft_tokens)), str(tmp_path))
    assert not drafter.has_scores
    assert drafter.describe()["confidence_head"] is (kind == "dspark")


def test_a_confidence_that_is_no_number_is_a_certain_rejection(tmp_path, target, model):
    write_checkpoint(tmp_path, model, markov="vanilla")
    drafter = DFlashDrafter(DrafterContext(target, EngineConfig(num_draft_tokens="auto")), str(tmp_path))
    head = drafter.model.confidence
    scores = head.scores(torch.full((3, drafter.model.hidden_size), torch.nan), torch.tensor([1, 2, 3]), [2, 1])
    assert scores.tolist() == [-math.inf] * 3


def test_a_block_is_never_longer_than_it_was_trained(tmp_path, target, model):
    for options, most in (({}, BLOCK - 1), ({"markov": "vanilla"}, BLOCK)):
        engine = make(tmp_path / str(most), target, model, options)
        sequences = engine.new_sequences((9,), [sd.SamplingParams()])
        assert engine.drafter.propose(sequences, [BLOCK + 5]).num_draft_tokens == [most]
