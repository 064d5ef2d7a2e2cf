"""A drafter's tokens are ranked by the rule and the noise by which the target will choose its own."""

from __future__ import annotations

import math

import pytest
import torch

import specdec_fast as sd
from specdec_fast.drafters.shared.ranked import GREEDY_TEMPERATURE, TokenRanker
from specdec_fast.ops import all_ops, resolve
from specdec_fast.ops.sampling import gumbel, gumbel_noise
from specdec_fast.request.sequence import Sequence

VOCAB = 40


def sequence(params, seed=3):
    return Sequence(0, [1, 2, 3], 3, 50, params, frozenset(), seed=seed)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_ranks_are_in_the_order_of_the_targets_rule(is_mapped):
    """Greedy, sampled and penalised rows of one batch, and the same logits ranked greedily alone."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(VOCAB, generator=generator)[:25].sort().values if is_mapped else torch.arange(VOCAB)
    ranker = TokenRanker(resolve(torch.device("cpu")), VOCAB, ids if is_mapped else None)
    logits = torch.randn(3, len(ids), generator=generator) * 3
    rules = [{}, {"temperature": 0.7}, {"temperature": 1.0, "repetition_penalty": 3.0}]
    sequences = [sequence(sd.SamplingParams(**rule)) for rule in rules]
    found = ranker(logits, sequences, [4, 4, 4], 2, 6)
    alone = ranker(logits[:1], sequences[:1], [4], 2, 6)
    assert found.token_ids[0] == alone.token_ids[0] == ids[logits[0].topk(6).indices].tolist()
    softmax = (logits[0] / GREEDY_TEMPERATURE).log_softmax(0).topk(6).values.tolist()
    assert alone.log_probs[0] == pytest.approx(softmax)
    assert found.log_probs[0] == pytest.approx(softmax), "whatever the rules of its neighbours"
    drawn = (logits[1].double() / 0.7) + gumbel_noise(VOCAB, 3, 5, logits.device)[ids]
    best = drawn.topk(6)
    assert found.token_ids[1] == ids[best.indices].tolist()
    assert found.log_probs[1] == pytest.approx(best.values.log_softmax(0).tolist())
    assert all(len(set(own)) == 6 for own in found.token_ids)


def test_ranks_beyond_the_vocabulary_have_no_probability():
    ranker = TokenRanker(resolve(torch.device("cpu")), VOCAB, torch.tensor([3, 9]))
    for rule in ({}, {"temperature": 1.0}):
        found = ranker(torch.zeros(1, 2), [sequence(sd.SamplingParams(**rule))], [4], 0, 6)
        finite = [i for i, v in zip(found.token_ids[0], found.log_probs[0], strict=True) if v > -math.inf]
        assert sorted(finite) == [3, 9]


def test_noise_of_tokens_is_that_of_the_whole_vocabulary():
    seeds, positions = torch.tensor([5, 2**40 + 3]), torch.tensor([7, 2**33 + 1])
    ids = torch.tensor([[0, 31, 2], [39, 8, 17]])
    found = gumbel(all_ops()["noise_words"].load("torch")(ids, seeds, positions))
    for row in range(2):
        whole = gumbel_noise(VOCAB, int(seeds[row]), int(positions[row]), ids.device)
        assert torch.equal(found[row], whole[ids[row]])
