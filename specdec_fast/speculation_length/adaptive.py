"""One K for the sequences of a step, chosen every few steps from measured costs and measured acceptance."""

from __future__ import annotations

from sys import maxsize

from specdec_fast.request.sequence import Sequence
from specdec_fast.speculation_length.acceptance import Acceptance
from specdec_fast.speculation_length.base import LengthPolicy, Profiler, StepObservation
from specdec_fast.speculation_length.step_costs import StepCosts
from specdec_fast.speculation_length.verify_budget import VerifyBudget

# A choice holds for 4 to 32 steps, as long as what is accepted is within 1.5 standard deviations of what was expected:
# it takes about a tenth of a millisecond, a third of a short step.
_STEPS = 32
_LEAST_STEPS = 4
_SURPRISE = 1.5
_KNOWN = 24  # draft tokens tried, below which few sequences are drafted for, and every step is a choice
# draft tokens of an exploration after one that was accepted whole, and the most of an engine's first drafts
_EXPLORATION_K = 3
_EXPLORATION_SHARE = 0.01  # of the time of plain steps that explorations may lose
_EXPLORATION_KEEPS = 0.9  # share of their weight that earlier counts keep after an exploration
# Least expected speed of drafting over plain decoding: to begin (the draft model must prefill), and to go on (estimates
# vary).
_LEAST_GAIN = 1.02
_LEAST_KEPT_GAIN = 0.98
# Drafting steps after which a few plain ones show what they take, or the other way round: the first time, and later.
_FIRST_OTHER = 16
_OTHER_EVERY = 512
_LEAST_TRIED_GAIN = 2 / 3  # of steps of a K that was never timed, over plain decoding: they may be faster than expected


class AdaptiveLength(LengthPolicy):
    """Gives all sequences the K that maximises the expected tokens per second of a step, 0 where no K pays.

    Tokens over seconds is the "goodput" by which SmartSpec chooses lengths (Liu et al., arXiv 2406.14066). While no K
    pays, one sequence is drafted for now and then (an exploration), because only drafting shows acceptance. If steps
    that draft for all were never timed and may pay, a few are (a trial), because the profile may be wrong.

    With a drafter of trees it chooses between as many nodes as tokens of a chain, larger trees, and nothing. A tree of
    depth K is number ``max_draft_tokens + K`` here, as in ``StepCosts``. If the nodes of trees have scores, or the
    tokens of a drafter of chains, it verifies those of a batch that are worth their rows (``verify_budget.py``).

    Attributes:
        max_draft_tokens: the largest K that it may choose.
        num_choices: made so far.
        may_branch: whether trees of the next step may have more nodes than a chain has tokens.
    """

    max_draft_tokens = 8

    def __init__(self, max_draft_tokens: int = max_draft_tokens) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.num_choices = 0
        self._costs = StepCosts({1: 1e-3}, None)  # until ``prepare``
        self._acceptance = self._of_chains = Acceptance(self.max_draft_tokens)
        self._of_trees: Acceptance | None = None
        self._scores_chains = False  # whether the drafter has chains alone, with scores
        self._budget = VerifyBudget(self._costs)
        self.may_branch = False
        self._k = self._num_drafting = 0  # the choice: K, and how many sequences get it
        self._depth = self._size = 0
        self._steps_left = self._steps_more = 0  # for which the choice holds; may hold besides
        self._is_asynchronous = self._is_exploring = self._is_trying = False
        self._exploration_k = 1
        self._exploration_budget = 0.0  # seconds; negative until plain steps have paid for the last exploration
        self._num_drafted = self._num_plain = 0  # since the last plain step; since the last trial
        self._drafted: dict[Sequence, int] = {}  # lengths of sequences after the last step that drafted for them
        self._is_catching_up = False  # whether the drafter computes more in this step than what their last one emitted
        # Since the last choice: drafts by tokens asked for, proposed and accepted; of usual steps, the ratio of the
        # seconds of forwards to those profiled, and the other seconds.
        self._drafts: dict[tuple[int, int, int], int] = {}
        self._times: list[tuple[float, float]] = []

    def prepare(self, profiler: Profiler) -> None:
        self._is_asynchronous = profiler.is_asynchronous
        self._costs = StepCosts.measured(profiler, self.max_draft_tokens)
        self._budget = VerifyBudget(self._costs)
        self._of_trees = Acceptance(self.max_draft_tokens) if profiler.max_nodes > self.max_draft_tokens else None
        self._scores_chains = profiler.scores_chains

    def limits(self, batch: list[Sequence]) -> list[int]:
        """One that joins between two choices gets the K of the others."""
        if not self._holds() or len(batch).bit_length() != self._size.bit_length():
            self._end_round()
            self._choose(batch)
        self._steps_left -= 1
        if not self._k:
            return [0] * len(batch)
        k = self._depth
        limits = [min(k, sequence.num_remaining - 1) for sequence in batch]
        pending = self._pending(batch)
        if self._num_drafting < len(batch):  # those that cost the least to draft for
            order = sorted(range(len(batch)), key=pending.__getitem__)
            for i in order[self._num_drafting :]:
                limits[i] = pending[i] = 0
        self._is_catching_up = any(pending)
        return limits

    def _holds(self) -> bool:
        if self._steps_left <= 0 < self._steps_more and self._acceptance.surprise(self._drafts)[0] <= _SURPRISE:
            self._steps_left = _LEAST_STEPS
            self._steps_more -= _LEAST_STEPS
        return self._steps_left > 0

    def forget(self, sequence: Sequence) -> None:
        self._drafted.pop(sequence, None)

    def least_score(self, scores: list[list[float]]) -> float:
        has_budget = self._has_budget and not self._is_exploring
        return self._budget.least_score(scores, self._k) if has_budget else float("-inf")

    def observe(self, step: StepObservation) -> None:
        k = self._k
        profiled = self._costs.profile(len(step.batch))[self._k]
        seconds = step.draft_seconds + step.verify_seconds
        other = step.other_seconds
        if self._is_asynchronous:
            seconds = seconds + other
            other = 0.0
        if not k:
            self._num_plain += 1
            self._exploration_budget = min(0.0, self._exploration_budget + _EXPLORATION_SHARE * (seconds + other))
        elif self.may_branch and not step.may_branch:
            return  # chains, because memory or KV pages were short: they say nothing of trees
        else:
            self._num_drafted += 1
            is_usual = self._keep_drafts(step)
            if self._has_budget and step.scores is not None and step.accepted_nodes is not None:
                self._budget.observe(k, step.scores, step.accepted_nodes, is_usual)
                rows = len(step.batch) + sum(map(len, step.scores))
                profiled = self._costs.profiled(len(step.batch), k, rows)
            if self._is_exploring or self._is_trying:
                self._pay(step, seconds + other)
            if not is_usual:
                return
        self._times.append((seconds / profiled, other))

    def _keep_drafts(self, step: StepObservation) -> bool:
        """Keep what was accepted; return whether the seconds of the step are those of steps with its K."""
        drafts = self._drafts
        num = 0
        counts = zip(step.batch, step.limits, step.num_draft_tokens, step.num_accepted, strict=True)
        for sequence, limit, proposed, accepted in counts:
            if limit:
                self._drafted[sequence] = sequence.length
                num += limit
            draft = limit, proposed, accepted
            drafts[draft] = drafts.get(draft, 0) + 1
        return not self._is_catching_up and not self._is_exploring and num == self._depth * len(step.batch)

    def _pay(self, step: StepObservation, seconds: float) -> None:
        """Take what the step took longer than plain steps, which emit as many tokens, from the time of explorations."""
        size = len(step.batch)
        plain_seconds = self._costs.seconds(size)[0] * (1 + sum(step.num_accepted) / size)
        self._exploration_budget = min(0.0, self._exploration_budget - (seconds - plain_seconds))

    @property
    def _has_budget(self) -> bool:
        """Whether some of this step's draft tokens may be left out of the verification."""
        return self.may_branch or self._scores_chains

    def _end_round(self) -> None:
        # The median ratio: now and then a step waits for another process. The first steps after a change of K find the
        # caches cold and would make what is used rarely look slow.
        if len(self._times) >= (_LEAST_STEPS - 1 if self._costs.is_drafter_profiled else 1):
            ratio, other = sorted(self._times)[len(self._times) // 2]
            self._costs.observe(self._size, self._k, ratio, other)
        if self._has_budget:
            self._budget.end_round()
        if self._is_exploring:
            self._learn_from_exploration()
        if self._drafts:
            self._acceptance.add(self._drafts)
        self._drafts = {}
        self._times = []

    def _learn_from_exploration(self) -> None:
        """Weigh the past by how probable it made what the exploration shows."""
        tokens = self._of_chains.expected_tokens()
        probability = tokens[self._exploration_k] - tokens[self._exploration_k - 1]
        if any(accepted == self._exploration_k for _, _, accepted in self._drafts):
            self._of_chains.fade(min(_EXPLORATION_KEEPS, probability))
            self._exploration_k = min(_EXPLORATION_K, self.max_draft_tokens)
        else:
            self._of_chains.fade(_EXPLORATION_KEEPS)
            self._exploration_k = 1

    def _choose(self, batch: list[Sequence]) -> None:
        self.num_choices += 1
        size = len(batch)
        was_plain = not self._k or self._is_exploring or self._is_trying
        tokens = self._of_chains.expected_tokens()
        if self._of_trees is not None:
            tokens += self._of_trees.expected_tokens()[1:]
        speeds = self._speeds(batch, tokens)
        k = best = max(range(1, len(speeds)), key=speeds.__getitem__)
        gain = speeds[k] / speeds[0]
        if gain < (_LEAST_GAIN if was_plain else _LEAST_KEPT_GAIN):
            k = 0
        self.may_branch = k > self.max_draft_tokens
        self._acceptance = self._of_trees if self.may_branch and self._of_trees else self._of_chains
        num_tried = int(self._acceptance.num_tried)
        self._k = k
        self._num_drafting = maxsize
        self._size = size
        self._steps_left = _STEPS
        self._steps_more = 0
        self._is_exploring = self._is_trying = False
        if not k:
            self._num_drafted = 0
            if self._may_try(best, gain):
                self._k = best
                self._steps_left = _LEAST_STEPS
                self._is_trying = True
                self._num_plain = 0
            elif self._may_explore(batch, speeds[0]):
                self._k = self._exploration_k
                self._num_drafting = 1
                self._steps_left = 1
                self._is_exploring = True
        elif self._wants_plain_steps(batch, gain):
            self._k = 0
            self._steps_left = _LEAST_STEPS
            self._num_drafted = 0
        elif num_tried < _KNOWN:
            depth = self._costs.depth(k)
            self._k = k - depth + min(depth, max(_EXPLORATION_K, num_tried))
            self._steps_left = 1
            self._num_drafting = max(1, size // 8, num_tried)
        else:
            self._steps_left = _LEAST_STEPS
            self._steps_more = _STEPS - _LEAST_STEPS
        self._depth = self._costs.depth(self._k)

    def _may_explore(self, batch: list[Sequence], plain_speed: float) -> bool:
        """Return whether an exploration has been paid for, and drafting would pay if every token were accepted."""
        num_choices = self.max_draft_tokens * (1 if self._of_trees is None else 2) + 1
        all_accepted = [self._costs.depth(k) + 1.0 for k in range(num_choices)]
        return self._exploration_budget >= 0 and max(self._speeds(batch, all_accepted)) > plain_speed

    def _may_try(self, k: int, gain: float) -> bool:
        """Return whether steps of this K, which were never timed, may pay, and their time is paid for."""
        is_paid = self._exploration_budget >= 0 and self._num_plain > _OTHER_EVERY
        is_known = k > self.max_draft_tokens or self._costs.is_observed(self._size, k)
        return is_paid and not is_known and gain > _LEAST_TRIED_GAIN

    def _wants_plain_steps(self, batch: list[Sequence], gain: float) -> bool:
        """Return whether to decode plainly for a few steps, because plain decoding may cost less than it was timed."""
        is_known = self._costs.is_observed(self._size, 0) and gain >= 1
        every = _OTHER_EVERY if is_known else _FIRST_OTHER
        is_ending = 2 * sum(s.num_remaining for s in batch) < sum(s.max_length - s.prompt_length for s in batch)
        return self._num_drafted > every and not is_ending

    def _speeds(self, batch: list[Sequence], tokens: list[float]) -> list[float]:
        """Return the tokens per second of a sequence, by K, of which each step emits ``tokens``."""
        # Where anything is drafted, every token pays its share of the draft model's prefill of the prompts.
        prefill = self._prefill_seconds(batch)
        seconds = self._costs.seconds(len(batch))
        speeds = [emitted / (each + prefill * emitted) for emitted, each in zip(tokens, seconds, strict=True)]
        speeds[0] = 1 / seconds[0]
        return speeds

    def _prefill_seconds(self, batch: list[Sequence]) -> float:
        """Return the seconds in which the drafter computes prompts, per token that each sequence has yet to emit.

        A sequence that was drafted for counts as it did at its start, and so will the one that takes its place. What it
        emitted in plain steps since is computed besides.
        """
        known = sum(s.prompt_length / (s.max_length - s.prompt_length) for s in batch if s in self._drafted)
        pending = sum(self._pending(batch)) * len(batch) / sum(s.num_remaining for s in batch)
        return self._costs.catch_up * (known + pending)

    def _pending(self, batch: list[Sequence]) -> list[int]:
        """Return the tokens that the drafter has yet to compute, besides those that the last step emitted."""
        drafted = self._drafted
        return [sequence.length - drafted.get(sequence, 0) for sequence in batch]
