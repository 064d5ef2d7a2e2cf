"""The DFlash drafter proposes what the formulas say, whatever the batch, the chunks, rejections and pauses."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import specdec_fast as sd
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import DrafterContext
from specdec_fast.drafters.dflash.drafter import DFlashDrafter
from support.courses import Course, new_sequence
from support.dflash import BLOCK, dense_block, write_checkpoint

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
    return Course(model, drafter, partial(dense_block, weights, options), seed)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_proposals_are_those_of_the_formulas(tmp_path, target, model, options):
    course = make(tmp_path, target, model, options)
    params = [sd.SamplingParams(), sd.SamplingParams(temperature=1.0), sd.SamplingParams(temperature=0.7, top_k=9)]
    sequences = [new_sequence(i, length, params[i % 3], course.rng) for i, length in enumerate((1, 2, 21, 9))]
    course.prefill(sequences)
    for _ in range(4):
        course.step(sequences, BLOCK + 2)
        course.step(sequences[::3], 3)
    assert course.num_proposed > 50


@pytest.mark.parametrize("kind", ["dspark", "gated", "rnn"])
def test_scores_are_products_of_confidences(tmp_path, target, model, kind):
    """A score is the logarithm of the probability that the token and all before it are accepted."""
    options = OPTIONS[kind]
    weights = write_checkpoint(tmp_path, model, **options)
    drafter = DFlashDrafter(DrafterContext(target, EngineConfig(num_draft_tokens="auto")), str(tmp_path))
    assert drafter.has_scores
    course = Course(model, drafter, partial(dense_block, weights, options), 0)
    params = [sd.SamplingParams(), sd.SamplingParams(temperature=1.0)]
    sequences = [new_sequence(i, length, params[i % 2], course.rng) for i, length in enumerate((1, 21, 9))]
    course.prefill(sequences)
    limits = [4, 0, BLOCK + 2]
    draft = drafter.propose(sequences, limits)
    draft.check(limits)
    assert draft.num_draft_tokens == [4, 0, BLOCK]
    for sequence, tokens, scores in zip(
        sequences, draft.token_ids.split(draft.num_draft_tokens), draft.scores_by_sequence(), strict=True
    ):
        drafted, confidences = tokens.tolist(), []
        if drafted:
            features = course.features(sequence.token_ids)[:-1]
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


def test_features_wait_while_nothing_is_drafted(tmp_path, target, model, monkeypatch):
    monkeypatch.setattr("specdec_fast.drafters.shared.tapped.MOST_QUEUED", 6)
    monkeypatch.setattr("specdec_fast.drafters.shared.tapped.MOST_QUEUED_BYTES", 0)
    course = make(tmp_path, target, model, {})
    sequences = [new_sequence(i, 5, sd.SamplingParams(), course.rng) for i in range(2)]
    course.prefill(sequences)
    for _ in range(9):
        course.step(sequences, 0)
        assert sum(state.num_queued for state in course.drafter._states.values()) <= 2 * 6
    assert course.drafter._states[sequences[0]].num_queued > 0
    course.step(sequences, 5)
    course.step(sequences, 5)
    assert course.num_proposed


def test_a_preempted_sequence_starts_again(tmp_path, target, model):
    course = make(tmp_path, target, model, {})
    sequences = [new_sequence(i, 30, sd.SamplingParams(), course.rng) for i in range(3)]
    course.prefill(sequences)
    course.step(sequences, 4)
    course.drafter.release(sequences[1])
    course.step([sequences[0], sequences[2]], 4)
    course.drafter.admit([sequences[1]])
    assert course.drafter.propose(sequences[1:], [3, 0]).num_draft_tokens == [0, 0], "its features are not there yet"
    course.drafter.release(sequences[1])
    course.prefill([sequences[1]])
    course.drafter.grow(4000)
    course.step(sequences, 4)
    for sequence in sequences:
        course.drafter.release(sequence)
    assert course.drafter.pool.is_vacant
    assert not course.drafter._states


def test_long_prompts_are_written_in_portions(tmp_path, target, model, monkeypatch):
    course = make(tmp_path, target, model, {})
    course.drafter.limit_prefill(7)
    write, num_rows = course.drafter.model.write_context, []

    def counted(batch, *args):
        num_rows.append(len(batch.positions))
        write(batch, *args)

    monkeypatch.setattr(course.drafter.model, "write_context", counted)
    sequences = [new_sequence(i, length, sd.SamplingParams(), course.rng) for i, length in enumerate((40, 3, 18))]
    course.prefill(sequences)
    for _ in range(3):
        course.step(sequences, 0)
    course.step(sequences, 4)
    assert course.num_proposed
    assert max(num_rows) == 7


def test_a_block_is_never_longer_than_it_was_trained(tmp_path, target, model):
    for options, most in (({}, BLOCK - 1), ({"markov": "vanilla"}, BLOCK)):
        course = make(tmp_path / str(most), target, model, options)
        sequences = [new_sequence(0, 9, sd.SamplingParams(), course.rng)]
        course.prefill(sequences)
        assert course.drafter.propose(sequences, [BLOCK + 5]).num_draft_tokens == [most]
