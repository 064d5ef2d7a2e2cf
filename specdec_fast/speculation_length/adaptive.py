"""One K for the sequences of a step: the one that won the last race of measured tokens per second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean

from specdec_fast.request.sequence import Sequence
from specdec_fast.speculation_length.acceptance import Acceptance
from specdec_fast.speculation_length.base import LengthPolicy, Profiler, StepObservation
from specdec_fast.speculation_length.race import CountedStep, Race
from specdec_fast.speculation_length.step_costs import StepCosts
from specdec_fast.speculation_length.verify_budget import VerifyBudget

_BUDGET = 0.01  # of the time that races may lose
_BLOCK = 4  # steps of a race's block that count: so many,
_BLOCK_STEPS = 16  # or of so many single sequences;
_SHORT_ROUNDS = 2  # in so many rounds; twice as many in the others
_HOLD = 4  # times as many steps, after which a holder is looked at
_INHERITED = 64  # steps for which a smaller batch keeps the K of a larger one before it races
_BETTER = 1.03  # expected speed of another K over the holder's, from which on the two race without plain decoding


@dataclass
class _Size:
    """Batches of one power of two of sequences: what is known of them, and the block of steps that is decoded."""

    holder: int = 0  # the K that won the last race, which is held
    num_rivals: int = 0  # K that the model named since and that raced with it: two at most
    gain: float = 1.0  # the winner's speed over that of plain decoding
    tokens: float = 1.0  # that the winner emitted per step and sequence
    plain_seconds: float = 0.0  # of a step without drafts; 0.0 if unknown
    credit: float = 0.0  # seconds that races may lose; negative until the time since the last has paid for it
    num_races: int = 0
    arm: int = 0  # the K of the block
    is_race: bool = False
    left: int = 0  # steps that the block still has
    steps: list[CountedStep] = field(default_factory=list)  # of the block
    blocks: Iterator[int] = field(default_factory=lambda: iter(()))  # yields the number of steps of block after block


class AdaptiveLength(LengthPolicy):
    """Gives all sequences the K that was the fastest in a race of a few, 0 where drafting does not pay.

    Batches of each power of two of sequences have races of their own, between the *arms* plain decoding, the K that a
    model names, and a neighbour of it. Only measured tokens and seconds decide. The winner is held until a hundredth of
    the time has paid for what the race lost, or until it emits so few tokens that plain decoding would be faster.

    With a drafter of trees, a tree of depth K is number ``max_draft_tokens + K`` here, as in ``StepCosts``. If the
    nodes of trees have scores, or the tokens of a drafter of chains, it verifies those of a batch that are worth their
    rows (``verify_budget.py``).

    Attributes:
        max_draft_tokens: the largest K that it may choose.
        may_branch: whether trees of the next step may have more nodes than a chain has tokens.
    """

    max_draft_tokens = 8

    def __init__(self, max_draft_tokens: int = max_draft_tokens) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.may_branch = False
        self._costs = StepCosts({1: 1e-3}, None, max_draft_tokens)  # until ``prepare``
        self._acceptance = [Acceptance()]  # of chains; of trees, if there are any
        self._scores_chains = False
        self._budget = VerifyBudget(self._costs)
        self._sizes: dict[int, _Size] = {}  # by power of two
        self._size = _Size()
        self._batch: list[Sequence] = []

    def prepare(self, profiler: Profiler) -> None:
        self._costs = StepCosts.measured(profiler, self.max_draft_tokens)
        self._budget = VerifyBudget(self._costs)
        self._acceptance = [Acceptance() for _ in range(1 + (profiler.max_nodes > self.max_draft_tokens))]
        self._scores_chains = profiler.scores_chains

    def limits(self, batch: list[Sequence]) -> list[int]:
        power = len(batch).bit_length()
        size = self._size = self._sizes.get(power) or self._new_size(power)
        if size.left <= 0:
            self._begin_block(size, batch)
        size.left -= 1
        self.may_branch = size.arm > self.max_draft_tokens
        k = self._costs.depth(size.arm)
        return [min(k, sequence.num_remaining - 1) for sequence in batch] if k else [0] * len(batch)

    def least_score(self, scores: list[list[float]]) -> float:
        has_budget = self.may_branch or self._scores_chains
        return self._budget.least_score(scores, self._size.arm) if has_budget else float("-inf")

    def observe(self, step: StepObservation) -> None:
        size = self._size
        num = len(step.batch)
        seconds = step.draft_seconds + step.verify_seconds + step.other_seconds
        tokens = sum(step.num_accepted) + num
        is_valid = 1e-9 < seconds < 1e6 and 0 < tokens <= num * (self.max_draft_tokens + 1)
        if not is_valid or (self.may_branch and not step.may_branch):
            return  # chains because memory or KV pages were short say nothing of trees
        if size.arm:
            if size.is_race or size.left % 8 == 0:
                self._acceptance[self.may_branch].add(zip(step.limits, step.num_accepted, strict=True))
            if step.scores is not None and step.accepted_nodes is not None:
                self._budget.observe(size.arm, step.scores, step.accepted_nodes, seconds)
        size.steps.append(CountedStep(num, tokens, seconds))

    def _new_size(self, power: int) -> _Size:
        """Return batches of a size that is new: they begin with the K of larger ones, if there were any."""
        size = _Size()
        if larger := [each for each in self._sizes if each > power]:
            known = self._sizes[min(larger)]
            credit = -_INHERITED * _BUDGET * known.plain_seconds
            size = _Size(known.holder, gain=known.gain, tokens=known.tokens, credit=credit)
        return self._sizes.setdefault(power, size)

    def _begin_block(self, size: _Size, batch: list[Sequence]) -> None:
        self._batch = batch
        size.left = next(size.blocks, 0)
        if not size.left:  # at first, or if an exception ended it
            size.blocks = self._blocks(size)
            size.left = next(size.blocks)
        self._batch = []
        size.steps = []

    def _blocks(self, size: _Size) -> Iterator[int]:
        """Yield the numbers of steps of blocks of ``size.arm``; what a block did is known when the next is begun."""
        while True:
            if size.credit >= 0:
                size.num_rivals = 0
                yield from self._race(size, self._arms(size))
            elif size.holder and size.num_rivals < 2:
                best = self._best(size)
                speeds = self._speeds(size)
                if speeds[best] > _BETTER * speeds[size.holder]:
                    size.num_rivals += 1
                    yield from self._race(size, sorted([best, size.holder], reverse=True))
            size.arm = size.holder
            size.is_race = False
            yield _HOLD * max(_BLOCK, _BLOCK_STEPS // max(1, len(self._batch)))
            size.credit += _BUDGET * sum(step.seconds for step in size.steps)
            tokens = fmean([step.tokens / step.size for step in size.steps] or [size.tokens])
            if size.holder and size.gain * tokens < size.tokens:  # plain decoding is faster, if only tokens changed
                size.credit = max(size.credit, 0.0)

    def _race(self, size: _Size, arms: list[int]) -> Iterator[int]:
        """Race a few K, and make the winner the holder."""
        race = Race(arms, self._prefill())
        size.num_races += 1
        size.is_race = True
        goes_on = True
        while goes_on and not race.has_changed:
            for arm in race.arms[:: (-1) ** race.num_rounds]:  # back and forth: fewer changes
                size.arm = arm
                num_steps = max(_BLOCK, _BLOCK_STEPS // max(1, len(self._batch)))
                yield 1 + num_steps * (1 if race.num_rounds < _SHORT_ROUNDS else 2)
                race.add_block(arm, size.steps)
            goes_on = race.end_round()
        size.credit = min(size.credit, 0.0) - race.lost()
        if race.has_changed:
            return  # without a winner
        best = race.best()
        speeds = race.speeds()
        if plain := speeds.get(0):
            size.gain = speeds[best] / plain
        elif before := speeds.get(size.holder):
            size.gain *= race.tokens(size.holder) / size.tokens * speeds[best] / before
        size.plain_seconds = race.seconds(0) or size.plain_seconds
        size.holder = best
        size.tokens = race.tokens(best) or 1.0

    def _arms(self, size: _Size) -> list[int]:
        """Return the K that race: plain decoding, the model's, the holder, and a neighbour if two of these are one."""
        best = self._best(size)
        arms = {0, best, size.holder}
        if best > self.max_draft_tokens:
            arms.add(self._costs.depth(best))
        elif best == size.holder:
            arms.add(min(self.max_draft_tokens, best + max(1, best // 3) * (-1) ** size.num_races or 2))
        elif not size.holder and size.num_races % 2:
            arms = {0, (best + 1) // 2}
        return sorted(arms, reverse=True)

    def _best(self, size: _Size) -> int:
        """Return the K that the model expects to be the fastest."""
        speeds = self._speeds(size)
        return max(range(1, len(speeds)), key=speeds.__getitem__)

    def _speeds(self, size: _Size) -> list[float]:
        """Return the tokens per second of a sequence that the model expects, by K."""
        expected = [acceptance.expected_tokens(self.max_draft_tokens) for acceptance in self._acceptance]
        tokens = expected[0] + [n for of_trees in expected[1:] for n in of_trees[1:]]
        profile = self._costs.profile(len(self._batch))
        plain = size.plain_seconds or profile[0]
        scale = min(1.0, plain / profile[0])  # the machine was busy when it was profiled
        extra = plain - scale * profile[0]
        prefill = self._prefill()
        costs = zip(tokens[1:], profile[1:], strict=True)
        return [1 / plain] + [n / (scale * each + extra + prefill * n) for n, each in costs]

    def _prefill(self) -> float:
        """Return the seconds in which the drafter computes prompts, per token that a sequence is to emit."""
        return self._costs.catch_up * sum(s.prompt_length / (s.max_length - s.prompt_length) for s in self._batch)
