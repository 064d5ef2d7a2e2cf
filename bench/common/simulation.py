"""Decoding in simulated time: steps cost what tables say, draft tokens are accepted by a seeded draw.

For policies for K, whose gains of a few percent a shared machine's clock does not show.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import cache
from math import log
from typing import Any

import numpy as np

from specdec_fast.speculation_length import LengthPolicy, Profiler, StepObservation
from specdec_fast.speculation_length.fixed import FixedLength
from specdec_fast.trees.static import fit_tree

Seconds = Callable[[int], float]


class SimulatedSequence:
    """What a LengthPolicy sees of a sequence."""

    def __init__(self, prompt_length: int, new_tokens: int, rng: np.random.Generator) -> None:
        self.length, self.prompt_length, self.max_length = prompt_length, prompt_length, prompt_length + new_tokens
        self.draws = rng.random((2, new_tokens)).tolist()  # of the positions, so that every K meets the same
        self.is_admitted = False
        self.known_length = 0  # tokens that the drafter has computed

    @property
    def num_emitted(self) -> int:
        """Tokens emitted so far."""
        return self.length - self.prompt_length

    @property
    def num_remaining(self) -> int:
        """Tokens yet to emit."""
        return self.max_length - self.length


@dataclass(frozen=True)
class World:
    """A machine, a pair and requests.

    Attributes:
        verify: seconds of a target forward, by rows.
        draft: seconds of a draft model's forward, by rows.
        acceptance: of the token at a position of a text, by the number of the sequence and the position.
        batch_size: sequences in one step at most.
        num_sequences: requests; 0 for three batches.
        prompt_length: tokens of a prompt.
        new_tokens: tokens that each request emits.
        noise: mean of what a step's seconds exceed the table's by; one of a hundred takes five times as long.
        bursts: mean seconds for which, a quarter of the time, the clock shows twice what steps take; 0: never.
        mismeasured: standard deviation of the logarithm by which each profiled time is wrong.
        overhead: seconds of a step besides forwards, whatever its size.
        overhead_each: seconds besides forwards that each sequence of a step adds.
        once: seconds of drafting in a step besides its forwards.
        growth: seconds of a verification per committed token, which no profile shows.
        proposes: how often the drafter proposes anything.
        is_profiled: whether the drafter knows its seconds.
        is_refilled: whether a waiting request joins when one ends, not the next batch when all have ended.
        rates: of a drafter of trees, in place of ``acceptance``: kinds of positions, equally frequent, with the hit
            rates of the first ranks, which the drafter knows and gives as scores. Its chain has the first rank. None:
            chains without scores.
        max_nodes: of its trees; 0: it drafts chains alone.
        seed: of all draws.

    """

    verify: Seconds
    draft: Seconds
    acceptance: Callable[[int, int], float]
    batch_size: int
    num_sequences: int = 0
    prompt_length: int = 48
    new_tokens: int = 128
    noise: float = 0.05
    bursts: float = 0.0
    mismeasured: float = 0.0
    overhead: float = 0.0
    overhead_each: float = 0.0
    once: float = 0.0
    growth: float = 0.0
    proposes: float = 1.0
    is_profiled: bool = True
    is_refilled: bool = True
    rates: tuple[tuple[float, ...], ...] | None = None
    max_nodes: int = 0
    seed: int = 0

    def prepared(self, policy: LengthPolicy) -> LengthPolicy:
        """Return a policy that knows the forwards, but neither overhead nor acceptance."""
        errors = np.random.default_rng(self.seed)

        def measured(seconds: Seconds, counts: list[int]) -> dict[int, float]:
            return {n: float(seconds(n) * np.exp(self.mismeasured * errors.normal())) for n in counts}

        def drafting(counts: list[int]) -> dict[int, float] | None:
            return measured(self.draft, counts) | {0: self.once} if self.is_profiled else None

        has_scores, verifying = self.rates is not None, lambda counts: measured(self.verify, counts)
        policy.prepare(Profiler(self.batch_size, False, verifying, drafting, self.max_nodes, has_scores))
        return policy

    def warmed(self, policy: LengthPolicy) -> LengthPolicy:
        """Return a prepared policy that has seen four times as many such requests before."""
        self.prepared(policy)
        for number in range(1, 5):
            tokens_per_second(replace(self, seed=self.seed + 1000 * number), policy)
        return policy


def tokens_per_second(world: World, policy: LengthPolicy) -> float:
    """Decode every sequence in batches, and return the speed."""
    number, clock, tokens = 0, 0.0, 0
    rng = np.random.default_rng(world.seed)
    slowness = _slowness(world)
    next(slowness)
    batch: list[tuple[int, Any]] = []
    total = world.num_sequences or 3 * world.batch_size
    while number < total or batch:
        is_joined = world.is_refilled or not batch
        while is_joined and number < total and len(batch) < world.batch_size:
            draws = np.random.default_rng((world.seed, number))
            batch.append((number, SimulatedSequence(world.prompt_length, world.new_tokens, draws)))
            clock += world.verify(world.prompt_length)
            number += 1
        seconds, num_emitted = _step(world, policy, batch, rng, slowness.send(clock))
        clock += seconds
        tokens += num_emitted
        for _, sequence in batch:
            if not sequence.num_remaining:
                policy.forget(sequence)
        batch = [(i, s) for i, s in batch if s.num_remaining]
    return tokens / clock


def _slowness(world: World) -> Generator[float, float, None]:
    """Yield the factor of the clock at each time that is sent."""
    rng = np.random.default_rng((world.seed, 7))
    factor, until = 2.0, 0.0
    clock = yield 1.0
    while True:
        while world.bursts and clock >= until:
            factor = 3.0 - factor
            until += rng.exponential(world.bursts * (3.0 if factor == 1.0 else 1.0))
        clock = yield factor if world.bursts else 1.0


def _step(
    world: World, policy: LengthPolicy, batch: list[tuple[int, Any]], rng: np.random.Generator, slowness: float
) -> tuple[float, int]:
    """Take a step; return its seconds without the noise, and the tokens that it emits."""
    sequences = [s for _, s in batch]
    limits = policy.checked_limits(sequences)
    drafting = sum(world.draft(sum(k > i for k in limits)) for i in range(max(limits))) + world.once * any(limits)
    for sequence, k in zip(sequences, limits, strict=True):
        if k and sequence.length > sequence.known_length:
            drafting += world.draft(sequence.length - sequence.known_length)
            sequence.is_admitted = True
    counts = [
        k if k and s.draws[1][s.num_emitted] < world.proposes else 0 for s, k in zip(sequences, limits, strict=True)
    ]
    rows, accepted, nodes = sum(counts), [], ()
    if world.rates is not None:
        rows, counts, accepted, nodes = _verified_trees(world, policy, sequences, counts)
    verify = world.verify(len(batch) + rows) + world.growth * sum(s.length for s in sequences)
    for b, ((i, s), k) in enumerate(zip(batch, counts, strict=True)):
        done = s.num_emitted
        if world.rates is None:
            wrong = (j for j in range(k) if s.draws[0][done + j] >= world.acceptance(i, done + j))
            accepted.append(next(wrong, k))
        s.length += accepted[b] + 1
        s.known_length = s.length if limits[b] else s.known_length
    rare = np.where(rng.random(2) < 0.01 * (world.noise > 0), 5, 1)
    slow = slowness * (1 + world.noise * rng.exponential(size=2)) * rare
    overhead = world.overhead + world.overhead_each * len(batch)
    seconds = float(drafting * slow[0]), float(verify * slow[1]), overhead * slowness
    policy.observe(StepObservation(sequences, limits, counts, accepted, *seconds, policy.may_branch, *nodes))
    return drafting + verify + overhead, sum(accepted) + len(batch)


def _verified_trees(
    world: World, policy: LengthPolicy, sequences: list[Any], depths: list[int]
) -> tuple[int, list[int], list[int], tuple[list[list[float]], list[list[int]]]]:
    """Draft trees, or chains where the policy wants no more nodes than these have, and keep what the policy keeps.

    Returns:
        The number of nodes; per sequence depth and accepted tokens; the scores and the accepted nodes.

    """
    trees = []
    for sequence, depth in zip(sequences, depths, strict=True):
        kinds = [_kind(world, sequence, ahead) for ahead in range(depth)]
        num_nodes = max(depth, world.max_nodes) if policy.may_branch else 0
        trees.append(_tree(world.rates or (), tuple(kinds), num_nodes) if depth else {})
    least = policy.checked_least_score([list(tree.values()) for tree in trees])
    kept = [{path: score for path, score in tree.items() if score >= least} for tree in trees]
    found = []
    for sequence, tree in zip(sequences, kept, strict=True):
        paths, path, hits = list(tree), (), []
        while (path := (*path, _rank(world, sequence, len(path)))) in tree:
            hits.append(paths.index(path))
        found.append(hits)
    deepest = [max(map(len, tree), default=0) for tree in kept]
    scores = [list(tree.values()) for tree in kept]
    return sum(map(len, kept)), deepest, [len(hits) for hits in found], (scores, found)


def _kind(world: World, sequence: Any, ahead: int) -> int:
    """Return the kind of a position: an index of ``rates``."""
    draws = sequence.draws[1]
    return int(draws[min(sequence.num_emitted + ahead, len(draws) - 1)] * len(world.rates or ()))


def _rank(world: World, sequence: Any, ahead: int) -> int:
    """Return the rank of the target's token at a position; beyond all ranks if the drafter does not have it."""
    draws = sequence.draws[0]
    if sequence.num_emitted + ahead >= len(draws):
        return -1
    total, draw = 0.0, draws[sequence.num_emitted + ahead]
    for rank, rate in enumerate((world.rates or ())[_kind(world, sequence, ahead)]):
        total += rate
        if draw < total:
            return rank
    return -1


@cache
def _tree(rates: tuple[tuple[float, ...], ...], kinds: tuple[int, ...], max_nodes: int) -> dict[tuple[int, ...], float]:
    """Return rank paths and their scores, the best first; the chain of the first ranks if ``max_nodes`` is 0."""
    by_depth = [rates[kind] for kind in kinds]
    paths = fit_tree(by_depth, max_nodes) if max_nodes else [(0,) * length for length in range(1, len(kinds) + 1)]
    return {path: sum(log(by_depth[d][rank]) for d, rank in enumerate(path)) for path in paths}


def speed(worlds: list[World], policy: Callable[[World], LengthPolicy]) -> float:
    """Return the mean speed of several worlds, each with a policy of its own."""
    return float(np.mean([tokens_per_second(world, policy(world)) for world in worlds]))


def best_fixed(worlds: list[World], lengths: range | tuple[int, ...] = range(9)) -> float:
    """Return the speed of the K of ``lengths`` that is best over all worlds."""
    return max(speed(worlds, lambda _, k=k: FixedLength(k)) for k in lengths)
