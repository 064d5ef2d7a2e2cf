"""When a drafter is updated, and which part of it, in simulated time."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_fast.training.update_bandit import ARMS, FULL, HEAD, SKIP, UpdateBandit

COSTS = {HEAD: 0.5, FULL: 2.0}


def serve(gains, num_calls, tokens_ahead, time_share=1.0, noise=0.0, drift=0.0):
    """Serve calls of 1,000 tokens at 100 steps a second; return the bandit, and how often each arm was taken.

    The texts change, so a fifth of what was gained over 2 tokens per step is lost from call to call.
    """
    bandit, rng, tokens_per_step = UpdateBandit(time_share), np.random.default_rng(0), 2.0
    taken = dict.fromkeys(ARMS, 0)
    for _ in range(num_calls):
        found = tokens_per_step + noise * rng.normal()
        bandit.observe(found, 1000, 1000 / (100 * found))
        arm = bandit.choose(tokens_ahead)
        taken[arm] += 1
        if arm != SKIP:
            bandit.updated(COSTS[arm])
        tokens_per_step += drift - 0.2 * (tokens_per_step - 2.0) * (drift == 0) + gains.get(arm, 0.0)
    return bandit, taken


def test_nothing_is_updated_for_little_traffic():
    """An update that saves less than it takes is not made, even before it was ever tried."""
    assert serve({HEAD: 0.1, FULL: 0.2}, 50, tokens_ahead=0)[1] == {SKIP: 50, HEAD: 0, FULL: 0}


@pytest.mark.parametrize(
    ("gains", "best"),
    [({HEAD: 0.001, FULL: 0.3}, FULL), ({HEAD: 0.3, FULL: 0.301}, HEAD), ({HEAD: -0.3, FULL: -0.3}, SKIP)],
    ids=["full", "head", "skip"],
)
def test_the_arm_that_pays_is_taken_most_often(gains, best):
    """Noise of 0.02 tokens per step; the cheaper of two arms that gain alike is taken."""
    taken = serve(gains, 100, tokens_ahead=5000, noise=0.02)[1]
    assert max(taken, key=taken.__getitem__) == best
    assert min(taken.values()) > 0, "every arm is tried"


def test_arms_without_gain_are_given_up():
    taken = serve({}, 200, tokens_ahead=10_000, noise=0.02)[1]
    assert taken[SKIP] > 120


def test_gains_of_the_traffic_are_not_those_of_updates():
    """Where every call emits more than the one before, whatever is done, updates bring nothing."""
    taken = serve({}, 100, tokens_ahead=10_000, drift=0.05)[1]
    assert taken[SKIP] > taken[HEAD] + taken[FULL]


@pytest.mark.parametrize("time_share", [0.05, 0.2])
def test_updates_take_their_share_of_the_time_at_most(time_share):
    bandit, taken = serve({HEAD: 0.05, FULL: 0.2}, 100, tokens_ahead=10**9, time_share=time_share)
    assert taken[HEAD] + taken[FULL] > 0
    latest = max(COSTS.values())
    assert bandit.seconds_updating <= time_share * bandit.seconds_serving + latest
    assert bandit.seconds_left == pytest.approx(time_share * bandit.seconds_serving - bandit.seconds_updating)


def test_before_the_first_call_nothing_is_updated():
    assert UpdateBandit(0.5).choose(10**6) == SKIP
