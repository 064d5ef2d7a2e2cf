"""A race between few K: which arms leave it, which one wins, and what nonsense does to it."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest

from specdec_fast.speculation_length import Profiler, StepObservation
from specdec_fast.speculation_length.adaptive import AdaptiveLength
from specdec_fast.speculation_length.race import Race


def run(arms, seconds, tokens, size=16, disturbed=lambda number: 1.0):
    """Race arms whose steps take ``seconds[arm]`` and emit ``tokens[arm]`` per sequence; return the race."""
    race = Race(arms)
    number = 0
    goes_on = True
    while goes_on:
        for arm in list(race.arms):
            factor = disturbed(number)
            race.add_block(arm, [(size, round(size * tokens[arm]), factor * seconds[arm])] * 4)
            number += 1
        goes_on = race.end_round()
    return race


def winner(race):
    return max(race.speeds().items(), key=lambda item: item[1])[0]


@pytest.mark.parametrize(("seconds", "expected"), [(1.5, 3), (2.4, 0)])
def test_the_arm_of_the_most_tokens_per_second_wins(seconds, expected):
    race = run([3, 0], {3: seconds, 0: 1.0}, {3: 2.0, 0: 1.0})
    assert winner(race) == expected


def test_a_far_slower_arm_leaves_early():
    race = run([5, 0], {5: 3.0, 0: 1.0}, {5: 1.0, 0: 1.0})
    assert race.arms == [0]
    assert race.num_rounds <= 2
    assert race.behind[5] == pytest.approx(1 / 3)


def test_a_machine_that_is_busy_now_and_then_rarely_changes_the_winner():
    """A quarter of the blocks take twice as long, whichever arm they are of."""
    winners = []
    for seed in range(40):
        factors = np.random.default_rng(seed).choice([1.0, 1.0, 1.0, 2.0], 1000)
        race = run([3, 0], {3: 1.5, 0: 1.0}, {3: 2.2, 0: 1.0}, disturbed=factors.__getitem__)
        winners.append(winner(race))
    assert winners.count(3) >= 32


def test_the_prefill_of_the_drafter_is_counted():
    race = Race([3, 0], prefill=0.5)
    for _ in range(4):
        race.add_block(3, [(16, 32, 1.2)])
        race.add_block(0, [(16, 16, 1.0)])
        race.end_round()
    assert race.speeds()[3] == pytest.approx(2 / (1.2 + 0.5 * 2))


def test_a_step_that_drafts_is_not_believed_to_be_faster_than_a_plain_one():
    assert run([3, 0], {3: 0.5, 0: 1.0}, {3: 1.0, 0: 1.0}).speeds()[3] == 1.0


def test_arms_without_a_valid_step_have_no_speed():
    race = Race([3, 0])
    goes_on = True
    while goes_on:
        race.add_block(3, [])
        race.add_block(0, [])
        goes_on = race.end_round()
    assert set(race.speeds().values()) == {0.0}
    assert race.lost() == 0.0


class FakeSequence:
    """A sequence that goes on."""

    length = prompt_length = 10
    max_length, num_remaining = 100, 90


NONSENSE = {
    "stands still": 0.0,
    "runs backwards": -1.0,
    "NaN": nan,
    "infinite": inf,
    "huge": 1e300,
    "smallest": 5e-324,
}


@pytest.mark.parametrize("seconds", NONSENSE.values(), ids=NONSENSE)
@pytest.mark.parametrize("num_accepted", [None, 0, -4, 10**400], ids=["all", "none", "fewer than none", "huge"])
def test_nonsense_changes_nothing_but_speed(seconds, num_accepted):
    """Limits stay within the contract, and after it the policy finds the fastest K as before."""
    policy = AdaptiveLength()
    policy.prepare(Profiler(4, False, lambda counts: dict.fromkeys(counts, 1.0), lambda counts: {0: 0.0, 1: 0.1}))
    batch = [FakeSequence() for _ in range(4)]

    def step(seconds, num_accepted):
        limits = policy.checked_limits(batch)
        accepted = limits if num_accepted is None else [num_accepted] * 4
        policy.observe(StepObservation(batch, limits, limits, accepted, seconds, seconds, seconds))
        return limits

    for _ in range(300):
        step(seconds, num_accepted)
    policy.observe(StepObservation([], [], [], [], 1.0, 1.0, 1.0))
    chosen = [step(0.1 + 0.01 * policy._depth, None) for _ in range(1200)]
    assert min(chosen[-1]) >= 3


@pytest.mark.parametrize("seconds", [nan, 0.0, -1.0, inf])
def test_a_profile_of_nonsense(seconds):
    policy = AdaptiveLength()
    draft = {0: seconds, 1: seconds}
    policy.prepare(Profiler(2, False, lambda counts: dict.fromkeys(counts, seconds), lambda counts: draft))
    batch = [FakeSequence() for _ in range(2)]
    for _ in range(600):
        limits = policy.checked_limits(batch)
        policy.observe(StepObservation(batch, limits, limits, limits, 0.0, 1.0 + 0.1 * policy._depth, 0.0))
    assert min(limits) >= 0


def test_an_error_between_two_blocks_ends_no_engine():
    """What a sequence raises reaches the caller once, and the next step has limits again."""

    class Broken(FakeSequence):
        @property
        def length(self):
            raise KeyboardInterrupt

    policy = AdaptiveLength()
    with pytest.raises(KeyboardInterrupt):
        policy.limits([Broken(), Broken()])
    assert len(policy.limits([FakeSequence(), FakeSequence()])) == 2
