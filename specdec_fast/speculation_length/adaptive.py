"""K from measured cost and measured acceptance, anew every few steps, for every sequence; 0 where it does not pay."""

from __future__ import annotations

import math
from copy import deepcopy

from specdec_fast.request.sequence import Sequence
from specdec_fast.speculation_length.acceptance import Acceptance
from specdec_fast.speculation_length.allocation import NOTHING, Costs, allocate, tail_weights
from specdec_fast.speculation_length.base import LengthPolicy, Profiler, StepObservation, num_at_least
from specdec_fast.speculation_length.catch_up_cost import CatchUpCost, from_the_start, without_entry
from specdec_fast.speculation_length.cost_model import StepCosts, measured_costs, unknown_cost
from specdec_fast.speculation_length.decision_budget import DecisionBudget
from specdec_fast.speculation_length.profile_overhead import profile_overhead

_STEPS_DRAFTING, _STEPS_LEARNING, _STEPS_PLAIN = 16, 8, 32  # for which a choice stands at least, once much is known
_STEPS_EVENING = 4  # the same, where those who are behind get more, until they are not
_CONFIDENT = 48  # draft tokens tried, below which the choice is made at every step that can pay for it
_SHARE_PROBING = 0.02  # of the time of plain steps, for finding out whether drafting would pay by now
_PROBE_LENGTH, _MOST_IN_A_ROW = 3, 4
_NO_NEWS = 0.9  # acceptance from which on it is no news that all were accepted
_CALIBRATE, _CLOSE = 64, 1.25  # a plain step every so many, if drafting is not faster than that: to know what it costs
_FEW = 4  # plain steps that outweigh a hasty measurement: the first of them come sooner, however fast drafting looks
_DEAR = 0.03  # share of a plain step from which on the price of taking a sequence in is weighed
_OTHER_RATE = 0.1  # share of the latest step in the average of what steps take besides forwards
_MOST_BACKOFF = 4.0  # by how much probes may become rarer, if they keep failing


class AdaptiveLength(LengthPolicy):
    """Gives each sequence the K that makes the batch's expected tokens per second largest.

    Costs are measured, acceptance is estimated from the past alone, and the target decides every token: so which K is
    chosen depends on the machine's timings, and what comes out does not. While nothing pays, all decode plainly; two
    percent of that time at most go into probes, and less if these keep failing. How often steps are observed and K is
    chosen depends on what that takes itself (``DecisionBudget``).

    Attributes:
        budget: of the time that this takes.

    """

    max_draft_tokens = 8
    _allocate = staticmethod(allocate)

    def __init__(self, costs: StepCosts | None = None) -> None:
        self._most = most = self.max_draft_tokens
        self._costs = costs or StepCosts(unknown_cost(1), unknown_cost(1))
        costs = self._costs
        self.budget = DecisionBudget(costs.choice_seconds, costs.observation_seconds)
        self._acceptance = Acceptance(most)
        self._plan: dict[Sequence, int] = {}
        self._allocation, self._usual = NOTHING, 0
        self._size = self._steps_left = self._num_steps = self._chosen_at = 0
        self._catch_up = CatchUpCost()  # as it was before this plan
        self._may_enter = True
        self._probe_budget, self._backoff = 0.0, 1.0  # seconds saved up for a probe
        self._other_seconds = 0.0
        self._steps_drafting = 0  # since the last plain one
        self._num_in_a_row = 0
        self._is_plain = self._is_probing = False  # the plan
        self._is_calibrating = self._is_catching_up = False  # the next step

    def prepare(self, profiler: Profiler) -> None:
        """Time the forwards of both models, and what a choice takes."""
        most, num = self._most, profiler.max_batch_size
        costs = measured_costs(profiler, most)
        self._costs = costs
        self.budget = DecisionBudget(*profile_overhead(lambda: AdaptiveLength(deepcopy(costs)), most, num))

    def limits(self, batch: list[Sequence], no_refill: bool = False) -> list[int]:
        """Return K of each sequence."""
        if self._is_due(batch):
            self._choose(batch, no_refill)
        self._steps_left -= 1
        self._num_steps += 1
        if self._is_plain or self._is_calibrating:
            return [0] * len(batch)
        plan = self._plan
        try:
            return [min(plan[sequence], sequence.num_remaining - 1) for sequence in batch]
        except KeyError:
            self._add_to_plan([sequence for sequence in batch if sequence not in plan])
            return [min(plan[sequence], sequence.num_remaining - 1) for sequence in batch]

    def observe(self, step: StepObservation) -> None:
        """Learn costs and acceptance from a step, if it is time to; what has been tried is always looked at."""
        seconds = step.draft_seconds + step.verify_seconds + step.other_seconds
        self.budget.pass_time(seconds)
        if self._is_plain:
            self._probe_budget += _SHARE_PROBING * seconds
        is_wanted, is_catching_up = self._is_probing or self._is_calibrating, self._is_catching_up
        self._is_catching_up &= self._is_calibrating  # where nothing was drafted, it is yet to come
        self._is_calibrating = False
        if not (is_wanted or self.budget.may_observe):
            return
        self.budget.observe()
        if not is_catching_up:
            self._observe_costs(step)
        if not any(step.limits):
            return
        is_news = self._acceptance.average < _NO_NEWS and sum(step.num_accepted) == sum(step.limits)
        if self._is_probing and is_news and self._num_in_a_row < _MOST_IN_A_ROW:
            self._probe_budget, self._backoff = math.inf, 1.0  # good news: go on at once
            self._num_in_a_row += 1
            self._acceptance.discount()
        self._acceptance.observe(step)

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence."""
        self._acceptance.forget(sequence)
        self._catch_up.forget(sequence)
        self._plan.pop(sequence, None)

    def _is_due(self, batch: list[Sequence]) -> bool:
        """Return whether to choose before a step.

        It does not wait if something has been tried, nor if the draft tokens of those that have come might be too many.
        That sequences have left can wait, and so can those that have come where all decode plainly; but what did not
        pay for a batch that was about to end may well pay for the next.
        """
        if self._is_probing:
            return True
        if not self.budget.may_choose:
            has_grown = len(batch) > self._size and not self._is_plain
            return has_grown and self.budget.may_overdraw
        is_other = len(batch) != self._size or not any(sequence in self._plan for sequence in batch)
        return is_other or self._steps_left <= 0

    def _add_to_plan(self, sequences: list[Sequence]) -> None:
        """Give those that have come since the choice what it would have given them; the usual, if time is short."""
        lengths = [self._usual] * len(sequences)
        if self.budget.may_choose:
            self.budget.choose()  # it takes half as long
            probabilities = self._acceptance.probabilities(sequences)
            _, entry = self._catch_up.seconds(sequences, self._entry_seconds)
            lengths = self._allocation.lengths_of(probabilities, entry)
            if not self._may_enter:
                lengths = without_entry(lengths, entry)
            self._steps_left = min(self._steps_left, _STEPS_LEARNING)
        self._plan.update(zip(sequences, lengths, strict=True))
        self._is_catching_up |= self._catch_up.must_catch_up(sequences, lengths)

    def _choose(self, batch: list[Sequence], no_refill: bool) -> None:
        """Make the plan of the next steps."""
        self.budget.choose()
        self._close_plan()
        num, most = len(batch), self._most
        probabilities = self._acceptance.probabilities(batch)
        caps = [most] * num  # a plan outlasts the last steps of those that are about to end
        entry_seconds, entry = self._catch_up.seconds(batch, self._entry_seconds)
        costs = self._costs_of(batch, entry, no_refill)
        self._allocation = self._allocate(probabilities, caps, costs, self._acceptance.share_proposed)
        lengths, speed, plain_speed = self._allocation.lengths, self._allocation.speed, self._allocation.plain_speed
        steps = min(self._steps(batch, lengths), _STEPS_EVENING) if costs.weights else self._steps(batch, lengths)
        self._may_enter = not any(lengths) or self._pays_from_the_start(batch, probabilities, costs)
        if not self._may_enter:
            lengths[:] = without_entry(lengths, entry)
        if any(lengths):
            if self._is_to_calibrate(num, speed / plain_speed):
                self._is_calibrating, self._steps_drafting = True, 0
            steps = 1 if self._hold_back(batch, lengths) else steps
            self._is_probing, self._backoff, self._probe_budget = False, 1.0, 0.0
        else:
            if self._is_probing:  # and it did not pay
                self._backoff = min(1.5 * self._backoff, _MOST_BACKOFF)
            self._is_probing = self._probe(batch, costs, entry_seconds, lengths)
            steps = 1 if self._is_probing else _STEPS_PLAIN
        self._acceptance.fade(batch, lengths, self._num_steps - self._chosen_at)
        self._chosen_at = self._num_steps
        self._is_catching_up = self._catch_up.must_catch_up(batch, lengths)
        self._is_plain, self._usual = not any(lengths), sorted(lengths)[num // 2]
        self.budget.is_hasty = not self._is_plain or self._acceptance.num_tried < _CONFIDENT
        self._plan = dict(zip(batch, lengths, strict=True))
        self._size, self._steps_left = num, steps

    def _costs_of(self, batch: list[Sequence], entry: list[float], no_refill: bool) -> Costs:
        """Return what steps of a batch cost by now, and what a token of each sequence counts, if not all the same."""
        num = len(batch)
        rows = [1, *range(num, num * (self._most + 1) + 1)]
        one, *verify = [seconds + self._other_seconds for seconds in self._costs.verify(rows)]
        weights: list[float] = []
        if no_refill and num > 1 and all(sequence.ends_at_length for sequence in batch):
            weights = tail_weights([sequence.num_remaining for sequence in batch], one, verify[0] - one)
        draft = [seconds * self._disturbance for seconds in self._costs.draft(range(num + 1))]
        return Costs(verify, draft, entry, self._costs.once * self._costs.draft.factor * self._disturbance, weights)

    def _pays_from_the_start(self, batch: list[Sequence], probabilities: list[list[float]], costs: Costs) -> bool:
        """Return whether drafting would pay if the drafter had not admitted any sequence yet.

        While some have been, a forward of the draft model costs little more for one sequence more. So whoever comes
        would join them and be joined by the next, and all would go on with what did not pay from the start.
        """
        if all(costs.entry):
            return True
        entry = from_the_start(batch, list(costs.entry), self._entry_seconds)
        if max(entry) * len(batch) < _DEAR * costs.verify[0]:
            return True
        self.budget.choose()  # once more: allocating is most of a choice
        caps = [self._most] * len(batch)
        share_proposed = self._acceptance.share_proposed
        return any(self._allocate(probabilities, caps, costs._replace(entry=entry), share_proposed).lengths)

    def _is_to_calibrate(self, num: int, gain: float) -> bool:
        """Return whether to take a plain step, in order to know what drafting gains."""
        num_observed = self._costs.verify.num_observed(num)
        if self._costs.verify.is_rough and num_observed < _FEW:
            return self._steps_drafting > num_observed
        return self._steps_drafting > _CALIBRATE and gain < _CLOSE

    def _close_plan(self) -> None:
        """Note how far the drafter has come with those whom the plan gave draft tokens in every step."""
        self._catch_up.note(sequence for sequence, k in self._plan.items() if k)
        self._steps_drafting = 0 if self._is_plain else self._steps_drafting + self._num_steps - self._chosen_at

    def _steps(self, batch: list[Sequence], lengths: list[int]) -> int:
        """Return for how many steps a choice may stand: few, as long as the run or a drafting sequence is not known."""
        if self._acceptance.num_tried < _CONFIDENT:
            return 1
        is_known = self._acceptance.is_known
        known = all(is_known(sequence) for sequence, k in zip(batch, lengths, strict=True) if k)
        return _STEPS_DRAFTING if known else _STEPS_LEARNING

    def _hold_back(self, batch: list[Sequence], lengths: list[int]) -> bool:
        """Take in few sequences at a time as long as little is known, because to prefill a draft model has its price.

        Returns:
            Whether somebody was held back.

        """
        num_tried = int(self._acceptance.num_tried)
        if num_tried < _CONFIDENT:
            lengths[:] = [min(length, max(_PROBE_LENGTH, num_tried)) for length in lengths]
        places = max(1, len(batch) // 8, num_tried)
        joining = [i for i, (s, k) in enumerate(zip(batch, lengths, strict=True)) if k and self._catch_up.is_behind(s)]
        for i in joining[places:]:
            lengths[i] = 0
        return len(joining) > places

    def _probe(self, batch: list[Sequence], costs: Costs, entry_seconds: list[float], lengths: list[int]) -> bool:
        """Draft for the cheapest sequence if enough time has been saved up for it, and tell whether."""
        caps = [min(self._most, sequence.num_remaining - 1) for sequence in batch]
        cheapest = min(range(len(caps)), key=lambda i: entry_seconds[i] if caps[i] else math.inf)
        length = min(_PROBE_LENGTH, caps[cheapest])
        seconds = (
            costs.verify[length] - costs.verify[0] + costs.once + length * costs.draft[1] + entry_seconds[cheapest]
        )
        if not length or self._probe_budget < seconds * self._backoff:
            self._num_in_a_row = 0
            return False
        if not any(self._allocate([[1.0] * self._most] * len(caps), caps, costs).lengths):
            return False  # it would not pay if everything were accepted
        self._probe_budget = 0.0
        lengths[cheapest] = length
        return True

    @property
    def _disturbance(self) -> float:
        """What corrects the costs of drafting while nothing has been drafted: what corrects those of verifying.

        Both were measured when the engine was made, perhaps on a machine that was busy then.
        """
        return 1.0 if self._costs.draft.is_observed else self._costs.verify.factor

    @property
    def _entry_seconds(self) -> float:
        """What a draft model takes to catch up, per token."""
        return self._costs.entry_seconds * self._costs.draft.factor * self._disturbance

    def _observe_costs(self, step: StepObservation) -> None:
        """Compare the parts of a step with what they were measured to take."""
        rows = len(step.batch) + sum(step.num_draft_tokens)
        drafting = num_at_least(step.limits, self._most)  # sequences in each of the drafting forwards
        verify = self._costs.verify.measured(rows)
        draft = sum(map(self._costs.draft.measured, drafting)) + (self._costs.once if drafting[0] else 0.0)
        verify_ratio, draft_ratio = step.verify_seconds / verify, step.draft_seconds / (draft or 1.0)
        if self._costs.is_asynchronous:
            verify_ratio = (step.draft_seconds + step.verify_seconds + step.other_seconds) / (draft + verify)
            draft_ratio = verify_ratio
        else:
            rate = _OTHER_RATE if self._other_seconds else 1.0
            self._other_seconds += rate * (min(step.other_seconds, step.verify_seconds) - self._other_seconds)
        self._costs.verify.observe(rows, verify_ratio)
        if drafting[0]:
            self._costs.draft.observe(drafting[0], draft_ratio)
