"""A simulated machine and simulated models: tables give the time of steps, seeded draws decide on draft tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from specdec_fast.speculation_length import StepObservation
from specdec_fast.speculation_length.adaptive import AdaptiveLength, StepCosts
from specdec_fast.speculation_length.base import LengthPolicy
from specdec_fast.speculation_length.cost_model import CostCurve, row_counts, unknown_cost
from specdec_fast.speculation_length.fixed import FixedLength

MOST = 8


class SimulatedSequence:
    """The fields of a sequence that a ``LengthPolicy`` reads."""

    def __init__(self, prompt_length: int, new_tokens: int, rng: np.random.Generator) -> None:
        self.length, self.prompt_length, self.max_length = prompt_length, prompt_length, prompt_length + new_tokens
        self.draws = rng.random((2, new_tokens)).tolist()  # of the positions, so that every K meets the same
        self.is_admitted = False
        self.num_emitted = 0
        self.ends_at_length = True

    @property
    def num_remaining(self) -> int:
        return self.max_length - self.length


@dataclass(frozen=True)
class World:
    """Costs in seconds by rows, acceptance by (sequence number, tokens emitted), and the requests."""

    verify: Callable[[int], float]
    draft: Callable[[int], float]
    acceptance: Callable[[int, int], float]
    batch_size: int
    num_sequences: int = 0  # 0: three batches
    prompt_length: int = 48
    new_tokens: int = 128
    noise: float = 0.05  # of a step's seconds; now and then one takes five times as long
    mismeasured: float = 0.0  # relative error of each time that is known beforehand
    overhead: float = 0.0  # of a step, besides forwards
    once: float = 0.0  # of drafting in a step, besides its forwards
    growth: float = 0.0  # of a verification per committed token: what attention costs, which no measurement shows
    proposes: float = 1.0  # the share of calls in which the drafter proposes anything
    choice: float = 0.0  # of choosing K
    observation: float = 0.0  # of learning from a step
    is_refilled: bool = (
        True  # whether a waiting sequence takes the place of one that has ended; else batch follows batch
    )
    seed: int = 0

    def warm(self) -> AdaptiveLength:
        """Return an AdaptiveLength that has seen such requests before."""
        lengths = self.adaptive()
        tokens_per_second(replace(self, seed=self.seed + 1000), lengths)
        return lengths

    def adaptive(self, is_measured: bool = True) -> AdaptiveLength:
        """Return an AdaptiveLength that knows the forwards, but neither overhead nor acceptance."""
        errors = np.random.default_rng(self.seed)

        def measured(seconds: Callable[[int], float], largest: int) -> CostCurve:
            wrong = {n: float(seconds(n) * np.exp(self.mismeasured * errors.normal())) for n in row_counts(largest)}
            return CostCurve(wrong, is_rough=self.mismeasured > 0)

        verify = measured(self.verify, self.batch_size * (MOST + 1))
        costs = StepCosts(verify, unknown_cost(self.batch_size))
        if is_measured:
            costs = StepCosts(verify, measured(self.draft, 64), self.once, self.draft(64) / 64)
        return AdaptiveLength(costs._replace(choice_seconds=self.choice, observation_seconds=self.observation))

    def choosing_seconds(self, lengths: LengthPolicy) -> float:
        """Return what choosing and observing have taken so far."""
        if not isinstance(lengths, AdaptiveLength):
            return 0.0
        return self.choice * lengths.budget.num_choices + self.observation * lengths.budget.num_observations


def tokens_per_second(world: World, lengths: LengthPolicy) -> float:
    """Decode every sequence in batches, and return the speed."""
    number, clock, tokens = 0, -world.choosing_seconds(lengths), 0
    rng = np.random.default_rng(world.seed)
    batch: list[tuple[int, SimulatedSequence]] = []
    total = world.num_sequences or 3 * world.batch_size
    while number < total or batch:
        is_joined = world.is_refilled or not batch
        while is_joined and number < total and len(batch) < world.batch_size:
            sequence = SimulatedSequence(
                world.prompt_length, world.new_tokens, np.random.default_rng((world.seed, number))
            )
            clock += world.verify(world.prompt_length)
            batch.append((number, sequence))
            number += 1
        sequences = [s for _, s in batch]
        limits = lengths.limits(sequences, no_refill=number == total or not world.is_refilled)
        for s, k in zip(sequences, limits, strict=True):
            assert 0 <= k <= max(0, s.num_remaining - 1)
            if k and not s.is_admitted:
                clock += world.draft(s.length)
                s.is_admitted = True
        counts = [
            k if k and s.draws[1][s.num_emitted] < world.proposes else 0 for s, k in zip(sequences, limits, strict=True)
        ]
        drafting = sum(world.draft(sum(k > i for k in limits)) for i in range(max(limits)))
        drafting += world.once * any(limits)
        verify = world.verify(len(batch) + sum(counts)) + world.growth * sum(s.length for s in sequences)
        slow = (1 + world.noise * rng.exponential(size=2)) * np.where(rng.random(2) < 0.01 * (world.noise > 0), 5, 1)
        accepted = []
        for (i, s), k in zip(batch, counts, strict=True):
            taken = 0
            while taken < k and s.draws[0][s.num_emitted + taken] < world.acceptance(i, s.num_emitted + taken):
                taken += 1
            accepted.append(taken)
            s.length += taken + 1
            s.num_emitted += taken + 1
            tokens += taken + 1
        clock += drafting + verify + world.overhead  # sequences are charged without the noise
        lengths.observe(
            StepObservation(sequences, limits, counts, accepted, drafting * slow[0], verify * slow[1], world.overhead)
        )
        for s in sequences:
            if not s.num_remaining:
                lengths.forget(s)
        batch = [(i, s) for i, s in batch if s.num_remaining]
    return tokens / (clock + world.choosing_seconds(lengths))


def speed(runs: list[World], lengths: Callable[[World], LengthPolicy]) -> float:
    """Return the mean speed of several runs, each with lengths of its own."""
    return float(np.mean([tokens_per_second(run, lengths(run)) for run in runs]))


def best_fixed(runs: list[World]) -> float:
    """Return the speed of the K that is best over all of them."""
    return max(speed(runs, lambda run, k=k: FixedLength(k)) for k in range(MOST + 1))
