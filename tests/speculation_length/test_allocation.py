"""The choice of K where costs and acceptance are known, against brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_fast.speculation_length.allocation import Costs, allocate, tail_weights
from support.fuzzing import fuzz


def expected_speed(lengths, probabilities, costs, share=1.0):
    """Tokens per second of a step, in loops."""
    gained = sum(probabilities[i][j] * share for i, k in enumerate(lengths) for j in range(k))
    drafting = sum(costs.draft[sum(k > j for k in lengths)] for j in range(max(lengths)))
    entering = sum(costs.entry[i] * (1 + share * sum(probabilities[i][:k])) for i, k in enumerate(lengths) if k)
    rows = round(sum(lengths) * share)
    return (len(lengths) + gained) / (costs.verify[rows] + drafting + entering + costs.once * any(lengths))


@st.composite
def choices(draw, most_sequences=3, most=4):
    """Acceptance and costs of a step: rising costs of any shape, some caps, some entries."""
    num, most = draw(st.integers(1, most_sequences)), draw(st.integers(1, most))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    probabilities = np.minimum(rng.random((num, 1)) ** 0.5 * (1 + 0.1 * rng.random((num, most))), 1).cumprod(axis=1)
    verify = 1 + draw(st.floats(0, 1)) * np.sort(rng.random(num * most + 1)).cumsum()
    draft = np.array([0.0, *(draw(st.floats(0.001, 0.6)) * (1 + np.sort(rng.random(num))))])
    entry = rng.random(num) * draw(st.sampled_from([0.0, 0.3]))
    caps = np.minimum(rng.integers(0, most + 3, num), most)
    return probabilities, caps, Costs(verify, draft, entry, float(rng.random() * draw(st.sampled_from([0, 0.5]))))


@fuzz(150)
@given(choices())
def test_choice_is_close_to_the_best_of_all_vectors(choice):
    """Never worse than any uniform K; within 5% of the best vector of K (which costs and ties decide, no greedy)."""
    probabilities, caps, costs = choice
    found = allocate(probabilities, caps, costs)
    assert all(0 <= k <= cap for k, cap in zip(found.lengths, caps, strict=True))
    got = expected_speed(found.lengths, probabilities, costs)
    assert got == pytest.approx(found.speed)
    assert found.plain_speed == pytest.approx(expected_speed([0] * len(caps), probabilities, costs))
    every = product(*(range(cap + 1) for cap in caps))
    best = max(expected_speed(lengths, probabilities, costs) for lengths in every)
    uniform = [[min(k, cap) for cap in caps] for k in range(probabilities.shape[1] + 1)]
    assert got >= max(expected_speed(lengths, probabilities, costs) for lengths in uniform) * (1 - 1e-12)
    assert got >= 0.95 * best


@fuzz(60)
@given(choices(most_sequences=4, most=3))
def test_choice_is_the_best_where_rows_cost_the_same(choice):
    """Verification in proportion to its rows, a forward of the draft at one price: then greedy is exact."""
    probabilities, caps, costs = choice
    costs = Costs(1 + 0.05 * np.arange(len(costs.verify)), np.where(costs.draft > 0, 0.1, 0.0), 0 * costs.entry)
    found = allocate(probabilities, caps, costs)
    every = product(*(range(cap + 1) for cap in caps))
    assert found.speed == pytest.approx(max(expected_speed(lengths, probabilities, costs) for lengths in every))


# What must come out whatever the numbers are: nothing accepted, drafts too dear, free drafts all accepted, no room.
@pytest.mark.parametrize(
    ("accepted", "draft", "caps", "expected"),
    [(0.0, 1e-6, [4, 4], [0, 0]), (0.9, 10.0, [4, 4], [0, 0]), (1.0, 0.0, [4, 3], [4, 3]), (1.0, 0.0, [0, 0], [0, 0])],
    ids=["never accepted", "costly", "free", "last token"],
)
def test_extremes(accepted, draft, caps, expected):
    probabilities = np.full((2, 4), accepted).cumprod(axis=1)
    costs = Costs(1 + 0.001 * np.arange(9), np.array([0, draft, draft]), np.zeros(2))
    assert allocate(probabilities, np.array(caps), costs).lengths == expected


def test_the_likelier_sequence_gets_more():
    probabilities = np.array([[0.2], [0.95], [0.6]]).repeat(6, axis=1).cumprod(axis=1)
    costs = Costs(1 + 0.1 * np.arange(19), np.array([0, 0.05, 0.05, 0.05]), np.zeros(3))
    poor, good, fair = allocate(probabilities, np.full(3, 6), costs).lengths
    assert poor < fair < good


@fuzz(60)
@given(choices())
def test_the_rule_behind_a_choice_gives_as_much_to_others_alike(choice):
    """What comes between two choices is not given less than the choice gave it, nor anything beyond its depth."""
    probabilities, caps, costs = choice
    found = allocate(probabilities, caps, costs)
    others = found.lengths_of(probabilities, costs.entry)
    assert all(k <= other <= max(found.lengths) for k, other in zip(found.lengths, others, strict=True))


def test_rows_that_are_not_proposed_are_not_charged():
    probabilities = np.full((4, 4), 0.8).cumprod(axis=1)
    costs = Costs(1 + 0.02 * np.arange(17), np.full(5, 1e-6), np.zeros(4))
    full, rare = (allocate(probabilities, np.full(4, 4), costs, share).speed for share in (1.0, 0.25))
    lengths = allocate(probabilities, np.full(4, 4), costs, 0.25).lengths
    assert rare == pytest.approx(expected_speed(lengths, probabilities, costs, 0.25), rel=1e-4)
    assert rare < full


def test_weights_of_the_last_sequences():
    weights = tail_weights([200, 10, 150, 200], one=3.0, others=1.5)
    assert sum(weights) == pytest.approx(4)
    assert weights[0] == weights[3] > weights[2] > weights[1]
    assert weights[1] == pytest.approx(4 * 0.5 / 4.5, rel=0.01)  # it saves its row of a step, and hardly more
    assert tail_weights([20, 20, 20], one=3.0, others=1.0) == pytest.approx([1, 1, 1])
    assert tail_weights([40, 10, 30], one=1.0, others=2.0) == pytest.approx([1, 1, 1])  # where rows are all there is


def test_larger_weights_get_more():
    costs = Costs([1 + 0.2 * n for n in range(9)], [0, 0.1, 0.2], [0, 0])
    assert allocate([[0.5] * 4] * 2, [4, 4], costs).lengths[0] == allocate([[0.5] * 4] * 2, [4, 4], costs).lengths[1]
    first, second = allocate([[0.5] * 4] * 2, [4, 4], costs._replace(weights=[0.2, 1.8])).lengths
    assert first == 0 < second
