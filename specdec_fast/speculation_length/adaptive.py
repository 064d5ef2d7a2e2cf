"""One K for the sequences of a step: the one that won the last race of measured tokens per second."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from specdec_fast.request.sequence import Sequence
from specdec_fast.speculation_length.acceptance import Acceptance
from specdec_fast.speculation_length.base import LengthPolicy, Profiler, StepObservation
from specdec_fast.speculation_length.race import Race
from specdec_fast.speculation_length.step_costs import StepCosts
from specdec_fast.speculation_length.verify_budget import VerifyBudget

_BUDGET = 0.01  # of the time that races and probes may lose
_BETTER = 1.02  # expected speed of another K over the holder's, from which on the two race without plain decoding
_MARGIN = 1.01  # by which drafting must be faster than plain decoding
_SKIPPED = 1  # first steps of a block: caches are cold, and a draft model computes the tokens of the blocks before
_BLOCK = 4  # steps of a block that count
_HOLD = 64  # steps of single sequences after which a holder is looked at
_LEAST_HOLD = 16  # steps, likewise
_PROBE_STEPS = 4
_PROBE_K = 3
_HOPELESS = 0.8  # speed that the model expects over that of plain decoding, at which a probe ends early
_PROMISING = 0.95  # the same, from which on a race begins at once
_MOST_LOST = 0.4  # of a probe's time that is believed to be lost: a machine that was busy seems to lose more
_PROBE_KEEPS = 0.5  # of the weight of what was accepted before
_SHORTEST, _LONGEST = 1e-9, 1e6  # seconds of a step that are believed


class _Block(NamedTuple):
    """Steps of one arm."""

    arm: int
    num_steps: int
    num_drafting: int = 0  # sequences that are drafted for; 0: all
    is_race: bool = False


class _Size:
    """Batches of one power of two of sequences: what is known of them, and the block that is decoded.

    Attributes:
        holder: the arm that won the last race.
        beaten: an arm that the holder beat in that race.
        gain: its speed over that of plain decoding then.
        tokens: those that it emitted then, per step and sequence.
        plain_seconds: of a step without drafts; 0.0 if unknown.
        credit: seconds that races may lose.
        since: seconds since the last race.
        extra_each: seconds that each drafted token adds to those profiled.
        steps: of the block: sequences, tokens, seconds.
    """

    def __init__(self) -> None:
        self.holder = self.beaten = self.num_races = 0
        self.gain = self.tokens = 1.0
        self.plain_seconds = self.credit = self.since = self.extra_each = 0.0
        self.block = _Block(0, 0)
        self.left = 0
        self.steps: list[tuple[int, int, float]] = []
        self.course: Iterator[_Block] = iter(())


class AdaptiveLength(LengthPolicy):
    """Gives all sequences the K that was the fastest in a race of a few, 0 where drafting does not pay.

    Batches of each power of two of sequences have races of their own, between the *arms* plain decoding, the K that a
    model of costs and acceptance names, and another one. Only measured tokens and seconds decide. The winner is held
    until a hundredth of the time since has paid for what races lost, or until it emits so few tokens that plain
    decoding would be faster. While plain decoding is held, *probes*, which draft for few sequences, keep the estimate
    of acceptance up to date, and a race begins when the model expects drafting to pay.

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
        self._acceptance = [Acceptance(max_draft_tokens)]  # of chains; of trees, if there are any
        self._scores_chains = False
        self._budget = VerifyBudget(self._costs)
        self._sizes: dict[int, _Size] = {}  # by power of two
        self._power = -1
        self._size = _Size()
        self._depth = 0
        self._batch: list[Sequence] = []

    def prepare(self, profiler: Profiler) -> None:
        self._costs = StepCosts.measured(profiler, self.max_draft_tokens)
        self._budget = VerifyBudget(self._costs)
        num_kinds = 2 if profiler.max_nodes > self.max_draft_tokens else 1
        self._acceptance = [Acceptance(self.max_draft_tokens) for _ in range(num_kinds)]
        self._scores_chains = profiler.scores_chains

    def limits(self, batch: list[Sequence]) -> list[int]:
        size = self._size
        if len(batch).bit_length() != self._power:
            size = self._enter(len(batch).bit_length())
        if size.left <= 0:
            self._begin_block(size, batch)
        size.left -= 1
        k = self._depth
        if not k:
            return [0] * len(batch)
        limits = [min(k, sequence.num_remaining - 1) for sequence in batch]
        if size.block.num_drafting:
            order = sorted(range(len(batch)), key=lambda i: batch[i].length)  # the least for a drafter to compute
            for i in order[size.block.num_drafting :]:
                limits[i] = 0
        return limits

    def least_score(self, scores: list[list[float]]) -> float:
        block = self._size.block
        has_budget = (self.may_branch or self._scores_chains) and not block.num_drafting
        return self._budget.least_score(scores, block.arm) if has_budget else float("-inf")

    def observe(self, step: StepObservation) -> None:
        num = len(step.batch)
        block = self._size.block
        seconds = step.draft_seconds + step.verify_seconds + step.other_seconds
        tokens = sum(step.num_accepted) + num
        is_valid = _SHORTEST < seconds < _LONGEST and 0 < tokens <= num * (self.max_draft_tokens + 1)
        if not is_valid or (self.may_branch and not step.may_branch):
            return  # chains because memory or KV pages were short say nothing of trees
        if block.arm:
            if block.is_race or block.num_drafting or self._size.left % 8 == 0:
                self._acceptance[self.may_branch].add(zip(step.limits, step.num_accepted, strict=True))
            if not block.num_drafting and step.scores is not None and step.accepted_nodes is not None:
                self._budget.observe(block.arm, step.scores, step.accepted_nodes, seconds)
        self._size.steps.append((num, tokens, seconds))

    def _enter(self, power: int) -> _Size:
        """Go on with batches of another size."""
        size = self._size = self._sizes.setdefault(power, _Size())
        self._power = power
        if size.block.is_race:  # from the start, with caches that are cold
            size.left = size.block.num_steps
            size.steps = []
        self._set_arm(size)
        return size

    def _begin_block(self, size: _Size, batch: list[Sequence]) -> None:
        self._batch = batch
        block = next(size.course, None)
        if block is None:  # at first, or if an exception ended it
            size.course = self._course(size)
            block = next(size.course)
        self._batch = []
        size.block = block
        size.left = block.num_steps
        size.steps = []
        self._set_arm(size)

    def _set_arm(self, size: _Size) -> None:
        self._depth = self._costs.depth(size.block.arm)
        self.may_branch = size.block.arm > self.max_draft_tokens

    def _course(self, size: _Size) -> Iterator[_Block]:
        """Yield block after block; the steps of one are known when the next is asked for."""
        while True:
            if size.credit >= 0 and (size.holder or (yield from self._probe(size))):
                yield from self._race(size, self._arms(size))
            elif size.holder and (better := self._better(size)):
                yield from self._race(size, sorted([better, size.holder], reverse=True))
            yield _Block(size.holder, max(_LEAST_HOLD, _HOLD // max(1, len(self._batch))))
            self._look(size)

    def _look(self, size: _Size) -> None:
        """Learn from a block of the holder."""
        seconds = sum(step[2] for step in size.steps)
        tokens = sum(step[1] / step[0] for step in size.steps)
        size.credit += _BUDGET * seconds
        size.since += seconds
        if not size.steps:
            return
        if not size.holder:
            size.plain_seconds = median(step[2] for step in size.steps)
        elif size.gain * tokens / len(size.steps) < size.tokens:
            # If only tokens changed since the race, plain decoding is faster now.
            size.credit = max(size.credit, 0.0)

    def _probe(self, size: _Size) -> Iterator[_Block]:
        """Draft for few sequences; return whether a race may pay."""
        self._acceptance[0].fade(_PROBE_KEEPS)
        num = max(2, len(self._batch) // 8)
        seconds = tokens = 0.0
        for number in range(_PROBE_STEPS):
            speeds = self._speeds(size)
            if number and max(speeds[1:]) < _HOPELESS * speeds[0]:
                break
            k = max(range(1, min(_PROBE_K, self.max_draft_tokens) + 1), key=speeds.__getitem__)
            yield _Block(k, 1, num)
            seconds += sum(step[2] for step in size.steps)
            tokens += sum(step[1] / step[0] for step in size.steps)
        speeds = self._speeds(size)
        lost = min(seconds - tokens / speeds[0], _MOST_LOST * seconds + self._catch_up(num))
        size.credit = min(size.credit, 0.0) - lost
        best = max(speeds[1:])
        loss = (speeds[0] / best - 1) * (_SKIPPED + _BLOCK) / speeds[0] + self._catch_up()
        return best >= _PROMISING * speeds[0] or _BUDGET * size.since >= loss

    def _better(self, size: _Size) -> int:
        """Return the K that should be faster than the holder by the model; 0 if it lost the last such race."""
        speeds = self._speeds(size)
        best = max(range(1, len(speeds)), key=speeds.__getitem__)
        return best if best != size.beaten and speeds[best] > _BETTER * speeds[size.holder] else 0

    def _race(self, size: _Size, arms: list[int]) -> Iterator[_Block]:
        """Race a few K, and hold the winner."""
        race = Race(arms, self._prefill())
        size.num_races += 1
        catch_up = 0.0 if size.holder else self._catch_up()
        goes_on = True
        while goes_on:
            for arm in race.arms[:: (-1) ** race.num_rounds]:  # back and forth: fewer changes
                yield _Block(arm, _SKIPPED + _BLOCK, is_race=True)
                race.add_block(arm, size.steps[_SKIPPED:])
            goes_on = race.end_round()
        speeds = race.speeds()
        best = max(speeds, key=speeds.__getitem__)
        all_speeds = speeds | {arm: ratio * speeds[best] for arm, ratio in race.behind.items()}
        gain = size.gain * race.tokens(size.holder) / size.tokens  # of the holder now
        plain = all_speeds[0] if 0 in all_speeds else all_speeds[size.holder] / gain if gain else 0.0
        drafting = best or max(all_speeds)
        if speeds[best] < _MARGIN * plain or not speeds[best]:
            best = 0
        size.beaten = max((arm for arm in all_speeds if arm not in (best, size.holder)), default=0)
        size.credit = min(size.credit, 0.0) - (_SKIPPED + _BLOCK) * race.lost() - catch_up
        size.since = 0.0
        size.holder = best
        size.gain = all_speeds[best] / plain if best and plain else 1.0
        size.tokens = race.tokens(best) if best else 1.0
        size.plain_seconds = race.seconds(0) or size.plain_seconds
        if (took := race.seconds(drafting)) and size.plain_seconds:
            size.extra_each = 0.0
            expected = self._seconds(size)[drafting]
            size.extra_each = (took - expected) / self._costs.depth(drafting)

    def _arms(self, size: _Size) -> list[int]:
        """Return the K that race: the model's, plain decoding, and another."""
        most = self.max_draft_tokens
        speeds = self._speeds(size)
        best = max(range(1, len(speeds)), key=speeds.__getitem__)
        chain = max(range(1, most + 1), key=speeds.__getitem__)
        arms = {0, best, chain}
        holder = size.holder
        if holder:
            arms.add(holder)
            if best == holder and holder <= most:
                change = max(1, holder // 3) * (-1) ** size.num_races
                arms.add(min(most, holder + change or 2))
        return sorted(arms, reverse=True)

    def _seconds(self, size: _Size) -> list[float]:
        """Return the seconds that steps are expected to take, by K."""
        profile = self._costs.profile(len(self._batch))
        plain = size.plain_seconds or profile[0]
        scale = min(1.0, plain / profile[0])  # the machine was busy
        extra = max(0.0, plain - profile[0])
        return [
            max(plain / 2, scale * each + extra + size.extra_each * self._costs.depth(k)) if k else plain
            for k, each in enumerate(profile)
        ]

    def _speeds(self, size: _Size) -> list[float]:
        """Return the tokens per second of a sequence that the model expects, by K."""
        tokens = self._acceptance[0].expected_tokens()
        for trees in self._acceptance[1:]:
            tokens += trees.expected_tokens()[1:]
        seconds = self._seconds(size)
        prefill = self._prefill()
        speeds = [emitted / (each + prefill * emitted) for emitted, each in zip(tokens, seconds, strict=True)]
        speeds[0] = 1 / seconds[0]
        return speeds

    def _prefill(self) -> float:
        """Return the seconds in which the drafter computes prompts, per token that a sequence is to emit."""
        return self._costs.catch_up * sum(s.prompt_length / (s.max_length - s.prompt_length) for s in self._batch)

    def _catch_up(self, num: int | None = None) -> float:
        """Return the seconds in which the drafter computes the ``num`` shortest sequences, or all."""
        return self._costs.catch_up * sum(sorted(s.length for s in self._batch)[:num])
