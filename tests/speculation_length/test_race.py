"""A race between few K: which arms leave it, which one wins, and what nonsense does to it."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest

from specdec_fast.speculation_length import Profiler, StepObservation
from specdec_fast.speculation_length.adaptive import AdaptiveLength
from specdec_fast.speculation_length.race import CountedStep, Race


def block(size, tokens, seconds, num_steps=5):
    """Return a block of equal steps; ``tokens`` are those of a sequence."""
    return [CountedStep(size, round(size * tokens), seconds)] * num_steps


def run(arms, seconds, tokens, size=16, disturbed=lambda number: 1.0):
    """Race arms whose steps take ``seconds[arm]`` and emit ``tokens[arm]`` per sequence; return the race."""
    race = Race(arms)
    number = 0
    goes_on = True
    while goes_on:
        for arm in list(race.arms):
            race.add_block(arm, block(size, tokens[arm], disturbed(number) * seconds[arm]))
            number += 1
        goes_on = race.end_round()
    return race


@pytest.mark.parametrize(("seconds", "expected"), [(1.5, 3), (2.4, 0)])
def test_the_arm_of_the_most_tokens_per_second_wins(seconds, expected):
    race = run([3, 0], {3: seconds, 0: 1.0}, {3: 2.0, 0: 1.0})
    assert race.best() == expected


def test_drafting_wins_by_a_margin_only():
    """Texts that end at different times, and the drafter's own caches, cost what no step shows."""
    for seconds, expected in ((1.96, 0), (1.90, 3)):
        assert run([3, 0], {3: seconds, 0: 1.0}, {3: 2.0, 0: 1.0}).best() == expected


def test_a_far_slower_arm_leaves_early():
    race = run([5, 3, 0], {5: 3.0, 3: 1.4, 0: 1.0}, {5: 1.0, 3: 1.45, 0: 1.0})
    assert len(race._seconds[5]) <= 2
    assert race.num_rounds == 8, "the others are as fast as each other"
    assert race.speeds()[5] == pytest.approx(1 / 3 / 1.03)


def test_a_machine_that_is_busy_now_and_then_rarely_changes_the_winner():
    """A quarter of the blocks take twice as long, whichever arm they are of."""
    winners = []
    for seed in range(40):
        factors = np.random.default_rng(seed).choice([1.0, 1.0, 1.0, 2.0], 1000)
        race = run([3, 0], {3: 1.5, 0: 1.0}, {3: 2.2, 0: 1.0}, disturbed=factors.__getitem__)
        winners.append(race.best())
    assert winners.count(3) >= 32


def test_one_slow_step_changes_no_block():
    race = Race([3, 0])
    race.add_block(3, [*block(16, 2.0, 1.5, 4), CountedStep(16, 32, 90.0)])
    race.add_block(0, block(16, 1.0, 1.0))
    assert race.speeds()[3] == pytest.approx(2 / 1.5 / 1.03)


def test_the_prefill_of_the_drafter_is_counted():
    race = Race([3, 0], prefill=0.5)
    for _ in range(4):
        race.add_block(3, block(16, 2, 1.2))
        race.add_block(0, block(16, 1, 1.0))
        race.end_round()
    assert race.speeds()[3] == pytest.approx(2 / (1.2 + 0.5 * 2) / 1.03)


def test_what_a_race_has_lost():
    """The first step of a block, which shows the cost of the change, and the lag of the slower arm."""
    race = Race([3, 0])
    race.add_block(3, [CountedStep(16, 16, 7.0), *block(16, 1.03, 2.0, 4)])
    race.add_block(0, block(16, 1, 1.0))
    race.end_round()
    assert race.lost() == pytest.approx((7 - 2) + 5 * 2.0 * (1 - 1 / 2), rel=0.03)


@pytest.mark.parametrize(("tokens", "has_changed"), [(1.3, False), (1.0, True), (3.6, False)])
def test_a_block_shows_that_acceptance_has_changed(tokens, has_changed):
    race = Race([3, 0])
    race.add_block(3, block(16, 2.2, 1.5))
    race.add_block(3, block(16, tokens, 1.5))
    assert race.has_changed == has_changed


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
    chosen = [step(0.1 + 0.01 * policy._size.arm, None) for _ in range(1200)]
    assert min(chosen[-1]) >= 3


@pytest.mark.parametrize("seconds", [nan, 0.0, -1.0, inf])
def test_a_profile_of_nonsense(seconds):
    policy = AdaptiveLength()
    draft = {0: seconds, 1: seconds}
    policy.prepare(Profiler(2, False, lambda counts: dict.fromkeys(counts, seconds), lambda counts: draft))
    batch = [FakeSequence() for _ in range(2)]
    for _ in range(600):
        limits = policy.checked_limits(batch)
        policy.observe(StepObservation(batch, limits, limits, limits, 0.0, 1.0 + 0.1 * policy._size.arm, 0.0))
    assert min(limits) >= 0


def test_an_error_between_two_blocks_ends_no_engine():
    """What a sequence raises reaches the caller once, and the next step has limits again."""

    class Broken(FakeSequence):
        @property
        def max_length(self):
            raise KeyboardInterrupt

    policy = AdaptiveLength()
    with pytest.raises(KeyboardInterrupt):
        policy.limits([Broken(), Broken()])
    assert len(policy.limits([FakeSequence(), FakeSequence()])) == 2


class Machine:
    """Steps of 16 sequences: ``cost`` seconds more per draft token, of which each is accepted at ``acceptance``."""

    def __init__(self, cost, acceptance):
        self.policy = AdaptiveLength()
        draft = {0: 0.0, 1: cost, 64: cost}
        self.policy.prepare(Profiler(16, False, lambda counts: dict.fromkeys(counts, 1.0), lambda counts: draft))
        self.cost = cost
        self.acceptance = acceptance
        self.rng = np.random.default_rng(0)

    def steps(self, number, size=16):
        """Take steps; return their K, the tokens per sequence and the seconds of all."""
        batch = [FakeSequence() for _ in range(size)]
        chosen, tokens, seconds = [], 0.0, 0.0
        for _ in range(number):
            limits = self.policy.checked_limits(batch)
            k = max(limits)
            runs = self.rng.random((size, 9))[:, :k] < self.acceptance
            accepted = runs.cumprod(1).sum(1).tolist()
            took = 1.0 + self.cost * k
            self.policy.observe(StepObservation(batch, limits, limits, accepted, took - 1.0, 1.0, 0.0))
            chosen.append(k)
            tokens += sum(accepted) / size + 1
            seconds += took
        return chosen, tokens, seconds


@pytest.mark.parametrize(
    ("cost", "acceptance", "expected"),
    [(0.1, 0.8, {4, 5, 6}), (0.3, 0.6, {1, 2}), (0.3, 0.1, {0}), (0.5, 0.5, {0})],
)
def test_the_best_arm_is_held_within_400_steps(cost, acceptance, expected):
    machine = Machine(cost, acceptance)
    machine.steps(400)
    machine.policy._size.credit = -1e9  # no further race
    machine.policy._size.num_rivals = 99
    machine.steps(200)
    assert set(machine.steps(50)[0]) <= expected


@pytest.mark.parametrize("acceptance", [0.0, 0.4])
def test_races_lose_at_most_a_hundredth_where_drafting_never_pays(acceptance):
    machine = Machine(0.4, acceptance)
    machine.steps(500)
    chosen, tokens, seconds = machine.steps(20_000)
    assert any(chosen), "it still races now and then"
    assert tokens / seconds >= 0.988


def test_smaller_batches_begin_with_the_k_of_larger_ones():
    machine = Machine(0.1, 0.9)
    machine.steps(400)
    k = machine.policy._size.holder
    assert k > 0
    assert machine.steps(20, 5)[0] == [k] * 20
    assert machine.steps(200, 31)[0][:5] != [0] * 5, "the verdict of 16 holds for 31"


def test_larger_batches_begin_with_a_race():
    machine = Machine(0.3, 0.1)
    machine.steps(200, 4)
    assert max(machine.steps(5, 8)[0]) > 0


def test_a_verdict_outlasts_a_call():
    """Batches of one engine come and go; what was learned at their size stays."""
    machine = Machine(0.3, 0.1)
    machine.steps(200)
    machine.steps(100, 1)
    assert machine.policy._sizes[5].holder == 0
    assert machine.steps(20)[0].count(0) >= 15
