"""What ``num_draft_tokens="auto"`` learns about the cost of steps, and what it leaves out."""

from __future__ import annotations

import pytest
import torch

import specdec_fast as sd
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import DrafterContext
from specdec_fast.drafters.dflash.drafter import DFlashDrafter
from specdec_fast.drafters.eagle3.drafter import Eagle3Drafter
from specdec_fast.engine import core as engine_core
from specdec_fast.engine import step as engine_step
from specdec_fast.engine.input import RequestBuilder
from specdec_fast.ops import resolve
from specdec_fast.runner import eager
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.speculation_length import LengthPolicy, Profiler, StepObservation
from specdec_fast.speculation_length.adaptive import AdaptiveLength
from specdec_fast.speculation_length.step_costs import StepCosts
from support import dflash, eagle3
from support.models import tiny_model


class FakeSequence:
    """A sequence of 10 prompt tokens."""

    prompt_length, max_length, is_admitted = 10, 500, True

    def __init__(self, length=10, num_remaining=490):
        self.length, self.num_remaining = length, num_remaining


def prepared(batch_size, draft, verify=1.0):
    """Return a policy for which K 8 pays by far if every token is accepted."""
    policy = AdaptiveLength()
    policy.prepare(Profiler(batch_size, False, lambda counts: dict.fromkeys(counts, verify), lambda counts: draft))
    return policy


def take_step(policy, batch, draft_seconds, verify_seconds=1.0, other_seconds=0.0, most_accepted=8):
    """Take a step in which so many draft tokens are accepted at most; return the numbers of draft tokens."""
    limits = policy.limits(batch)
    accepted = [min(limit, most_accepted) for limit in limits]
    for sequence, count in zip(batch, accepted, strict=True):
        sequence.length += count + 1
        sequence.num_remaining -= count + 1
    policy.observe(StepObservation(batch, limits, limits, accepted, draft_seconds, verify_seconds, other_seconds))
    return limits


def drafting_for(batch):
    """Return a policy that has drafted for a batch until its acceptance is known, and is about to choose."""
    policy = prepared(len(batch), {0: 0.0, 1: 0.1, 64: 0.2})
    while policy._acceptance.num_tried < 30:
        take_step(policy, batch, 0.8)
    policy._steps_left = policy._steps_more = 0
    return policy


def test_other_work_of_steps_that_draft_is_learned_apart():
    costs = StepCosts({1: 1.0, 4: 1.0}, {1: 0.1})
    costs.observe(1, 0, 1.0, 0.5)
    assert costs.other(1, 3) == 0.5, "until a step has drafted"
    costs.observe(1, 3, 1.0, 2.0)
    assert (costs.other(1, 0), costs.other(1, 3)) == (0.5, 2.0)
    assert costs.seconds(1)[3] == pytest.approx(costs.profile(1)[3] + 2.0)


def test_a_draft_after_plain_steps_teaches_no_cost():
    """The drafter then computes their tokens as well."""
    policy, sequence = prepared(1, None), FakeSequence()
    while policy._k == 0 or policy._drafted.get(sequence) != sequence.length:
        take_step(policy, [sequence], 0.5)
    sequence.length += 3  # as three plain steps
    times = len(policy._times)
    policy._steps_left = 2
    take_step(policy, [sequence], 500.0)
    assert len(policy._times) == times
    take_step(policy, [sequence], 0.5)
    assert len(policy._times) == times + 1


def test_a_slow_first_proposal_of_a_drafter_that_was_not_profiled_does_not_end_drafting():
    """It prefills, and on a GPU compiles kernels."""
    policy, sequence = prepared(1, None), FakeSequence(num_remaining=4000)
    take_step(policy, [sequence], 500.0)
    num_drafting = sum(any(take_step(policy, [sequence], 0.8)) for _ in range(50))
    assert num_drafting > 40


@pytest.mark.parametrize(("length", "drafts"), [(10, True), (490, False)])
def test_tokens_that_the_drafter_lacks_have_a_price(length, drafts):
    """Ten tokens are to come: for them it does not pay to compute hundreds."""
    policy = prepared(1, {0: 0.0, 1: 0.1, 64: 6.4})
    sequence = FakeSequence(length, 10)
    assert (policy.limits([sequence]) != [0]) == drafts


def test_a_choice_outlasts_sequences_that_end():
    """Sizes of one power of two share what is known of costs, and a choice takes as long as a short step."""
    batch = [FakeSequence() for _ in range(15)]
    policy = drafting_for(batch)
    take_step(policy, batch, 0.8)
    before = policy.num_choices
    assert all(policy.limits(batch[:12])), "one that stays"
    assert all(policy.limits([*batch[:12], FakeSequence(), FakeSequence()])), "one that joins"
    assert policy.num_choices == before
    policy.limits(batch[:7])
    assert policy.num_choices == before + 1


@pytest.mark.parametrize(("most_accepted", "num_steps"), [(8, 32), (0, 4)])
def test_a_choice_holds_as_long_as_acceptance_is_as_expected(most_accepted, num_steps):
    batch = [FakeSequence(num_remaining=4000) for _ in range(4)]
    policy = drafting_for(batch)
    take_step(policy, batch, 0.8)
    before, steps = policy.num_choices, 0
    while policy.num_choices == before:
        take_step(policy, batch, 0.8, most_accepted=most_accepted)
        steps += 1
    assert steps == num_steps, "counting the first step of the next choice, but not that of this one"


@pytest.mark.parametrize(("speed", "goes_on"), [(0.99, True), (0.97, False)])
def test_drafting_goes_on_while_it_seems_as_fast(speed, goes_on, monkeypatch):
    batch = [FakeSequence(num_remaining=4000) for _ in range(4)]
    policy = drafting_for(batch)
    take_step(policy, batch, 0.8)
    monkeypatch.setattr(policy, "_speeds", lambda batch, tokens: [1.0] + [speed] * 8)
    policy._steps_left = policy._steps_more = 0
    assert any(policy.limits(batch)) == goes_on


@pytest.mark.parametrize(("num_remaining", "is_plain"), [(300, True), (200, False)])
def test_plain_steps_are_not_timed_when_a_batch_is_about_to_end(num_remaining, is_plain, monkeypatch):
    """What they teach would come too late, and few tokens would pay for them."""
    batch = [FakeSequence(num_remaining=num_remaining) for _ in range(4)]
    policy = drafting_for(batch)
    for sequence in batch:
        sequence.num_remaining = num_remaining  # of 490
    policy._num_drafted = 10_000
    monkeypatch.setattr(policy, "_speeds", lambda batch, tokens: [1.0] + [1.2] * 8)
    assert (policy.limits(batch) == [0] * 4) == is_plain


class Recorded(LengthPolicy):
    """Plain decoding that keeps what it observes."""

    max_draft_tokens = 0

    def __init__(self):
        self.steps = []

    def limits(self, batch):
        return [0] * len(batch)

    def observe(self, step):
        self.steps.append(step)


def test_the_callers_work_between_steps_is_a_step_s_own(monkeypatch):
    """It is counted from the end of the step before, but for the step that prefills."""
    now = [100.0]
    for module in (engine_core, engine_step, eager):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    policy = Recorded()
    engine = sd.Engine(tiny_model("llama"), "ngram", max_batch_size=2)
    engine.core.length_policy = policy
    build = RequestBuilder(engine.target, None).build
    params = sd.SamplingParams(max_new_tokens=8, ignore_eos=True)
    engine.core.add(build(0, [1, 2, 3], params))
    for seconds in (1.0, 2.0, 4.0):
        engine.core.step()
        now[0] += seconds
    engine.core.add(build(1, [4, 5, 6], params))
    engine.core.step()
    # The forward is timed by a clock of its own, and what is left of a step is other work.
    seconds = [step.draft_seconds + step.verify_seconds + step.other_seconds for step in policy.steps]
    assert seconds == pytest.approx([0.0, 1.0, 2.0, 0.0])


def drafter_of(kind, folder, draft_tree=None):
    model = tiny_model("llama")
    target = RaggedModel(model, resolve(torch.device("cpu")))
    support, make = {"eagle3": (eagle3, Eagle3Drafter), "dflash": (dflash, DFlashDrafter)}[kind]
    support.write_checkpoint(folder, model)
    return make(DrafterContext(target, EngineConfig(draft_tree=draft_tree)), str(folder))


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_drafter_of_hidden_states_times_its_proposals(tmp_path, kind):
    """It leaves nothing behind, and can be used as before."""
    drafter = drafter_of(kind, tmp_path / "drafter")
    seconds = drafter.forward_seconds([1, 3, 8])
    assert seconds.keys() == {0, 1, 3, 8}
    assert min(seconds[n] for n in (1, 3, 8)) > 0
    assert drafter.pool is None
    assert drafter.num_admitted == drafter.num_kept_rows == 0


def test_trees_are_not_timed_as_chains(tmp_path):
    assert drafter_of("eagle3", tmp_path / "drafter", draft_tree=4).forward_seconds([1]) is None
