"""How many nodes of a batch's trees are verified, and whether trees are drafted at all, in simulated time."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, product
from math import exp, inf, log

import pytest

from bench.common.simulation import World, speed
from specdec_fast.speculation_length.adaptive import AdaptiveLength
from specdec_fast.speculation_length.base import Profiler
from specdec_fast.speculation_length.fixed import FixedLength
from specdec_fast.speculation_length.step_costs import StepCosts
from specdec_fast.speculation_length.verify_budget import HitRates, VerifyBudget
from support.grids import grid

# A drafter that is sure at every second position and of little use at the others.
RATES = ((0.92, 0.04, 0.02, 0.01), (0.45, 0.15, 0.08, 0.05))
WORLDS = {
    # Rows cost little, so trees pay; then only up to 24 rows; then every row costs; then drafting costs too much.
    "flat": {"verify": lambda n: 1e-2 * (1 + 0.002 * n), "draft": lambda n: 5e-4},
    "roofline": {"verify": lambda n: 1e-2 * max(1, n / 24), "draft": lambda n: 5e-4},
    "linear": {"verify": lambda n: 1e-2 * (0.3 + 0.1 * n), "draft": lambda n: 5e-4},
    "costly": {"verify": lambda n: 1e-2 * (0.5 + 0.25 * n), "draft": lambda n: 8e-3},
}


class Chains(FixedLength):
    """A fixed K without trees."""

    may_branch = False


class AllNodes(AdaptiveLength):
    """The policy without its budget."""

    def least_score(self, scores):
        return -inf


def world(name, batch_size, **options):
    costs = {**WORLDS[name], "acceptance": lambda number, position: 0.7, "num_sequences": max(12, 2 * batch_size)}
    return World(**costs, batch_size=batch_size, rates=RATES, max_nodes=16, **options)


def runs_of(name, batch_size, num=3):
    return [replace(world(name, batch_size), seed=seed) for seed in range(num)]


def warm(policy):
    return lambda run: run.warmed(policy())


@pytest.mark.parametrize(("name", "batch_size"), grid(product(WORLDS, [1, 8, 32]), keep=[("flat", 8)]))
def test_auto_reaches_the_best_of_chains_trees_and_nothing(name, batch_size):
    """The mean of nine runs, because one varies by five percent."""
    runs = runs_of(name, batch_size, 9)
    plain = speed(runs, lambda run: FixedLength(0))
    fixed = [speed(runs, lambda run, p=policy, k=k: p(k)) for policy in (Chains, FixedLength) for k in (2, 4, 6)]
    assert speed(runs, lambda run: run.prepared(AdaptiveLength())) >= 0.94 * plain, "cold"
    assert speed(runs, warm(AdaptiveLength)) >= 0.92 * max(plain, *fixed), (
        "a tree or a chain of another depth is 5% off"
    )


class Trees(AdaptiveLength):
    """The policy with trees of depth 2, whatever they take."""

    def _blocks(self, size):
        size.arm = self.max_draft_tokens + 2
        while True:
            yield 64


class WholeTrees(Trees, AllNodes):
    """The same without its budget."""


def test_the_budget_pays():
    """Where 24 rows cost as much as one, 8 sequences get few nodes each: the likeliest of all."""
    runs = runs_of("roofline", 8)
    found = speed(runs, warm(Trees))
    assert found >= 2 * speed(runs, warm(WholeTrees))
    assert found >= speed(runs, lambda run: Chains(2)), "and more than the best chains"


@pytest.mark.parametrize(
    ("name", "batch_size", "gain"),
    grid([("roofline", 8, 0.97), ("costly", 1, 0.99)], keep=[("roofline", 8, 0.97)]),
)
def test_the_budget_of_chains_pays(name, batch_size, gain):
    """Chains of a drafter that knows which of its tokens will be accepted, all drafted in one forward (DSpark)."""
    options = {"acceptance": lambda number, position: 0.7, "num_sequences": max(12, 2 * batch_size)}
    costs = {"verify": WORLDS[name]["verify"], "draft": lambda n: 0.0, "once": 2e-3, "is_profiled": False}
    one = World(**costs, **options, batch_size=batch_size, rates=((0.97,), (0.85,), (0.35,)))
    runs = [replace(one, seed=seed) for seed in range(3)]
    fixed = max(speed(runs, lambda run, k=k: FixedLength(k)) for k in range(9))
    assert speed(runs, warm(AdaptiveLength)) >= gain * fixed


def test_no_budget_for_chains_without_scores_or_beside_trees():
    policy = AdaptiveLength()
    for max_nodes, has_scores in ((0, False), (16, True)):
        policy.prepare(
            Profiler(4, False, lambda counts: dict.fromkeys(counts, 1.0), lambda counts: None, max_nodes, has_scores)
        )
        policy.may_branch = False
        assert policy.least_score([[-20.0]]) == -inf


def test_trees_pay():
    class NoTrees(AdaptiveLength):
        def prepare(self, profiler):
            super().prepare(profiler._replace(max_nodes=0))

    runs = runs_of("flat", 1)
    assert speed(runs, warm(AdaptiveLength)) >= 1.05 * speed(runs, warm(NoTrees))


def test_nodes_are_taken_by_score_until_a_row_costs_more_than_it_brings():
    """The number of nodes is the best of all, computed anew; equal scores are kept or dropped together."""
    verify = {rows: 1.0 if rows <= 4 else 0.25 * rows for rows in range(1, 40)}
    costs = StepCosts(verify, {0: 0.0, 1: 0.1}, 8, 16)
    scores = [[log(0.9), log(0.8), log(0.3)], [log(0.6), log(0.1), log(0.05)]]
    budget = VerifyBudget(costs)
    least = budget.least_score(scores, 10)
    falling = sorted((s for own in scores for s in own), reverse=True)
    rates = HitRates()
    tokens = list(accumulate((rates(s) for s in falling), initial=2.0))
    rest = 2 * 0.1  # a tree of depth 2
    speeds = [emitted / (rest + verify[2 + count]) for count, emitted in enumerate(tokens)]
    best = max(range(len(speeds)), key=speeds.__getitem__)
    assert 0 < best < len(falling)
    assert least == falling[best - 1]
    unlikely = [[log(0.05), log(0.04)], [log(0.03)]]
    assert VerifyBudget(StepCosts({1: 1.0, 40: 40.0}, None, 8, 16)).least_score(unlikely, 10) == inf


def test_hit_rates_follow_what_was_accepted():
    """Scores that promise too much are corrected, and a lower score never has a higher rate."""
    rates = HitRates()
    assert rates(-1.2) == pytest.approx(exp(-1.25), abs=0.01)
    for _ in range(400):
        rates.add([-0.1, -1.2, -2.2], [0, 2])
    rates.update()
    assert rates(-0.1) > 0.95
    assert rates(-1.2) < 0.05
    assert rates(-2.2) == rates(-1.2)
    assert rates(-inf) <= rates(-100.0) <= rates(-2.2)


def test_what_a_step_takes_besides_its_forward_is_learned():
    """Where the rest of a step takes long, more nodes are worth their rows."""
    costs = StepCosts({1: 1.0, 40: 40.0}, None, 8, 16)
    scores = [[log(0.9), log(0.5), log(0.4)]]
    budget = VerifyBudget(costs)
    before = budget.least_score(scores, 10)
    for _ in range(100):
        budget.observe(10, scores, [[0]], 30.0)
    assert budget.least_score(scores, 10) < before


def test_larger_forwards_than_a_prefill_are_not_profiled():
    asked = []

    def verify_seconds(row_counts):
        asked.extend(row_counts)
        return {count: 1.0 + count for count in row_counts}

    profiler = Profiler(64, False, verify_seconds, lambda counts: None, 64, False)
    costs = StepCosts.measured(profiler, 8)
    assert max(asked) == 2048
    assert costs.profile(64)[8 + 3] > costs.profile(64)[8]
