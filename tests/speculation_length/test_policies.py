"""Custom policies for K, by name and as an instance, and their contract."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

import specdec_fast as sd
from specdec_fast.commands.common import num_draft_tokens
from specdec_fast.engine.input import RequestBuilder
from specdec_fast.speculation_length import LENGTH_POLICIES
from support.demo import MAX_NEW_TOKENS
from support.scripted_drafter import Scripted

PARAMS = sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS)


class InTurn(sd.LengthPolicy):
    """K 0, 1, 2, 3 in turn, whatever happens; watches what it is called with."""

    max_draft_tokens = 3

    def __init__(self):
        self.steps, self.forgotten, self.num_prepared = [], [], 0

    def prepare(self, profiler):
        self.num_prepared += 1
        self.seconds = profiler.verify_seconds([1, 4]), profiler.draft_seconds([1, 2])

    def limits(self, batch):
        k = len(self.steps) % 4
        return [min(k, sequence.num_remaining - 1) for sequence in batch]

    def observe(self, step):
        self.steps.append(step)

    def forget(self, sequence):
        self.forgotten.append(sequence.index)


def test_an_instance_is_a_policy(target, draft, prompt_ids, expected):
    policy = InTurn()
    batch = {"max_batch_size": len(prompt_ids)}
    outputs = sd.generate(target, draft, prompt_ids, PARAMS, num_draft_tokens=policy, **batch)
    assert [output.token_ids for output in outputs] == expected
    assert {max(step.limits) for step in policy.steps} == {0, 1, 2, 3}
    num_observed = sum(sum(step.num_accepted) + len(step.batch) for step in policy.steps)
    assert num_observed >= sum(map(len, expected)) - len(prompt_ids), "all but the step of the first tokens"
    assert sorted(policy.forgotten) == list(range(len(prompt_ids)))
    verify, drafting = policy.seconds
    assert (policy.num_prepared, set(verify), set(drafting)) == (1, {1, 4}, {0, 1, 2})


def test_a_policy_forgets_the_sequences_of_a_closed_stream(target, prompt_ids):
    policy = InTurn()
    stream = sd.Engine(target, "ngram", num_draft_tokens=policy, max_batch_size=2).stream(prompt_ids, PARAMS)
    next(stream)
    stream.close()
    assert set(policy.forgotten) >= {sequence.index for step in policy.steps for sequence in step.batch}


def test_a_registered_policy_has_a_name_everywhere(target, prompt_ids, expected, monkeypatch):
    monkeypatch.setitem(LENGTH_POLICIES, "in-turn", InTurn)
    engine = sd.Engine(target, "ngram", num_draft_tokens="in-turn", max_batch_size=len(prompt_ids))
    assert [output.token_ids for output in engine.generate(prompt_ids, PARAMS)] == expected
    observed = engine.core.drafting.length_policy.steps
    assert len(observed) == engine.last_run.num_steps - 1, "not the step of the first tokens"
    assert engine.describe()["num_draft_tokens"] == "in-turn"
    assert engine.config.most_draft_tokens == 3
    assert num_draft_tokens("in-turn") == "in-turn"
    with pytest.raises(sd.ConfigError, match="expected an integer >= 0, or 'auto', 'in-turn', or a LengthPolicy"):
        sd.EngineConfig(num_draft_tokens="in turn")
    with pytest.raises(argparse.ArgumentTypeError, match="neither an integer nor 'auto', 'in-turn'"):
        num_draft_tokens("in turn")


def test_a_policy_without_a_largest_k_is_refused():
    class Unbounded(sd.LengthPolicy):
        def limits(self, batch):
            return [0] * len(batch)

    huge = InTurn()
    huge.max_draft_tokens = 10**30
    for value in (Unbounded(), InTurn, huge):  # the class is no instance
        with pytest.raises(sd.ConfigError, match=r"max_draft_tokens of (Unbounded|InTurn)|expected an integer"):
            sd.EngineConfig(num_draft_tokens=value)


def test_a_policy_without_a_drafter_is_not_asked(target, prompt_ids, expected):
    policy = InTurn()
    outputs = sd.generate(target, None, prompt_ids, PARAMS, num_draft_tokens=policy)
    assert [output.token_ids for output in outputs] == expected
    assert not policy.steps


@pytest.mark.parametrize(
    "limits",
    [lambda batch: [4] * len(batch), lambda batch: [-1] * len(batch), lambda batch: [1], lambda batch: None,
     lambda batch: [1.0] * len(batch), lambda batch: [s.num_remaining for s in batch]],
    ids=["beyond max_draft_tokens", "negative", "too few", "None", "floats", "beyond the last token"],
)  # fmt: skip
def test_limits_are_held_to_the_contract(target, prompt_ids, limits, monkeypatch):
    policy = InTurn()
    monkeypatch.setattr(policy, "limits", limits)
    engine = sd.Engine(target, "ngram", num_draft_tokens=policy, max_batch_size=4)
    with pytest.raises(sd.LengthPolicyError, match=r"limits of InTurn: .*expected"):
        engine.generate(prompt_ids, sd.SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert engine.core.pool.num_free_pages == engine.core.pool.num_pages


def test_a_policy_that_clears_its_batch_gives_too_few_limits(target, prompt_ids, monkeypatch):
    policy, calls = InTurn(), []

    def clear(batch):
        calls.append(len(batch))
        assert len(calls) < 20, "the engine asks again and again"
        batch.clear()
        return []

    monkeypatch.setattr(policy, "limits", clear)
    with pytest.raises(sd.LengthPolicyError, match=r"limits of InTurn: \[\]; expected a list of 4 ints"):
        sd.Engine(target, "ngram", num_draft_tokens=policy, max_batch_size=4).generate(prompt_ids, PARAMS)


def test_a_policy_that_clears_what_it_observes_harms_no_other_request(target, prompt_ids, monkeypatch):
    policy = InTurn()

    def clear(step):
        step.batch.clear()
        raise ZeroDivisionError("by chance")

    monkeypatch.setattr(policy, "observe", clear)
    engine = sd.Engine(target, "ngram", num_draft_tokens=policy, max_batch_size=2, method="eqspec")
    builder = RequestBuilder(engine.target, None)
    requests = [builder.build(i, ids, PARAMS) for i, ids in enumerate(prompt_ids[:6])]
    for request in requests:
        engine.core.add(request)
    engine.core.step()  # that of the first tokens, which is not observed
    with pytest.raises(ZeroDivisionError) as raised:
        engine.core.step()
    engine.core.drop_failed(raised.value)
    assert sum(request.error is not None for request in requests) == 2, "those of the step"


@pytest.mark.parametrize("least", [None, "x", float("nan"), torch.tensor(-1.0)], ids=str)
def test_the_least_score_is_a_number(least):
    policy = InTurn()
    policy.least_score = lambda scores: least
    with pytest.raises(sd.LengthPolicyError, match="least_score of InTurn"):
        policy.checked_least_score([[-1.0]])


def test_the_least_score_may_be_any_integer():
    policy = InTurn()
    policy.least_score = lambda scores: -(10**400)
    assert policy.checked_least_score([[-1.0]]) < -1e308


def test_a_policy_that_clears_the_scores_still_decides_what_is_verified(target, prompt_ids, monkeypatch):
    class Scored(Scripted):
        has_scores = True

        def propose(self, sequences, limits):
            draft = super().propose(sequences, limits)
            return replace(draft, scores=torch.full((len(draft.token_ids),), -5.0))

    def clear(scores):
        for own in scores:
            own.clear()
        scores.clear()
        return -1.0

    policy = InTurn()
    monkeypatch.setattr(policy, "least_score", clear)
    engine = sd.Engine(target, Scored(lambda sequence, limit: [3] * limit), num_draft_tokens=policy)
    outputs = engine.generate(prompt_ids[:2], PARAMS)
    assert [output.stats.num_draft_tokens for output in outputs] == [0, 0]
