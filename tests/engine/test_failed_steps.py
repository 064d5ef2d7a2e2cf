"""A step that fails takes along the requests that it was computing, and no other."""

from __future__ import annotations

import pytest

import specdec_fast as sd
from specdec_fast.engine import core as core_module
from specdec_fast.engine.core import EngineCore
from specdec_fast.engine.input import RequestBuilder
from specdec_fast.runner.verification import Verification
from support.grids import each_value_once

PARAMS = sd.SamplingParams(max_new_tokens=15, ignore_eos=True, logprobs=True)
PROMPTS = [[3, 4], [5], [6, 7, 8], [9, 1], [2], [4, 4, 4]]
# Every part of a step that runs a caller's code, or a model: where it is, by the engine.
PLACES = {
    "verify_step": lambda engine: engine.target,
    "propose": lambda engine: engine.drafter,
    "admit": lambda engine: engine.drafter,
    "commit": lambda engine: engine.drafter,
    "release": lambda engine: engine.drafter,
    "compute": lambda engine: engine.core.prefilling,
    "limits": lambda engine: engine.core.drafting.length_policy,
    "observe": lambda engine: engine.core.drafting.length_policy,
    "forget": lambda engine: engine.core.drafting.length_policy,
    "outcome": lambda engine: Verification,
    "keep_paths": lambda engine: engine.target,
    "emission_scores": lambda engine: core_module,
}


@pytest.fixture(scope="module")
def expected(pair):
    return [(o.token_ids, o.logprobs) for o in sd.Engine(pair[0], None, max_batch_size=1).generate(PROMPTS, PARAMS)]


def fail_at(monkeypatch, engine, place, error, count):
    """Let the ``count``-th call of one part of a step raise, after it has done its work."""
    owner = PLACES[place](engine)
    original, calls = getattr(owner, place), []

    def failing(*args):
        result = original(*args)
        calls.append(args)
        if len(calls) == count:
            raise error
        return result

    monkeypatch.setattr(owner, place, failing)


@each_value_once
@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize("place", PLACES)
def test_only_the_requests_of_the_step_fail(pair, expected, monkeypatch, ahead, place):
    """Two sequences a step, four resident, two that wait."""
    monkeypatch.setattr(EngineCore, "launches_ahead", ahead)
    most_prefilled = {"compute": 1, "admit": 2}.get(place)  # so few that some rows have no place in a verification
    engine = sd.Engine(*pair, max_batch_size=2, max_prefill_tokens=most_prefilled)
    core, builder = engine.core, RequestBuilder(engine.target, None)
    requests = [builder.build(i, prompt, PARAMS) for i, prompt in enumerate(PROMPTS)]
    for request in requests:
        core.add(request)
    error = ZeroDivisionError("by chance")
    fail_at(monkeypatch, engine, place, error, 2)
    failures = []
    while core.has_work:
        try:
            core.step()
        except ZeroDivisionError as raised:
            failures.append(raised)
            core.drop_failed(raised)
    assert failures == [error]
    failed = [request for request in requests if request.error is not None]
    # What ended in the step has ended when its release raises.
    assert 0 + (place not in ("release", "forget")) <= len(failed) <= 2
    for request in requests:
        tokens, logprobs = expected[request.index]
        if request in failed:
            assert isinstance(request.error, sd.StepError)
            assert request.error.__cause__ is error
            assert "ZeroDivisionError: by chance" in str(request.error)
            assert request.emitted_ids == tokens[: len(request.emitted_ids)]
        else:
            assert (request.emitted_ids, request.logprobs) == (tokens, logprobs)
    assert core.pool.is_vacant
    assert engine.drafter.pool.is_vacant


def test_an_interrupt_drops_what_has_pages(pair, expected, monkeypatch):
    """What waits has nothing yet that could be broken."""
    engine = sd.Engine(*pair, max_batch_size=2)
    core, builder = engine.core, RequestBuilder(engine.target, None)
    requests = [builder.build(i, prompt, PARAMS) for i, prompt in enumerate(PROMPTS)]
    for request in requests:
        core.add(request)
    fail_at(monkeypatch, engine, "verify_step", KeyboardInterrupt(), 1)
    with pytest.raises(KeyboardInterrupt) as raised:
        core.step()
    core.drop_failed(raised.value)
    while core.has_work:
        core.step()
    assert [request.finish_reason for request in requests] == ["error"] * 4 + ["length"] * 2
    assert [(r.emitted_ids, r.logprobs) for r in requests[4:]] == expected[4:]
    assert core.pool.is_vacant


def test_an_error_before_a_step_has_sequences_drops_all(pair, monkeypatch):
    engine = sd.Engine(*pair, max_batch_size=2)
    core, builder = engine.core, RequestBuilder(engine.target, None)
    requests = [builder.build(i, prompt, PARAMS) for i, prompt in enumerate(PROMPTS)]
    for request in requests:
        core.add(request)
    refusal = sd.UnsupportedModelError("it is not what it was")

    def refuse():
        raise refusal

    monkeypatch.setattr(engine.target, "expect_same_weights", refuse)
    with pytest.raises(sd.UnsupportedModelError):
        core.step()
    core.drop_failed(refusal)
    assert not core.has_work
    assert all(request.error.__cause__ is refusal for request in requests)


@pytest.mark.parametrize("whose", ["target", "draft"])
def test_a_hook_of_the_user_that_raises(pair, expected, whose):
    """The model is the caller's again afterwards, and the requests outside the step get their tokens."""
    engine = sd.Engine(*pair, max_batch_size=2, enforce_eager=True)
    model = (engine.target if whose == "target" else engine.drafter.model).model
    before, calls = dict(vars(model.config)), []

    def hook(*args):
        calls.append(1)
        if len(calls) == 6:
            raise ZeroDivisionError("by chance")

    handle = model.get_submodule("model.layers.1.mlp").register_forward_hook(hook)
    core, builder = engine.core, RequestBuilder(engine.target, None)
    requests = [builder.build(i, prompt, PARAMS) for i, prompt in enumerate(PROMPTS)]
    for request in requests:
        core.add(request)
    while core.has_work:
        try:
            core.step()
        except ZeroDivisionError as raised:
            core.drop_failed(raised)
    handle.remove()
    failed = [request for request in requests if request.error is not None]
    assert 1 <= len(failed) <= 2
    for request in requests:
        assert request.emitted_ids == expected[request.index][0][: len(request.emitted_ids)]
        assert request in failed or len(request.emitted_ids) == PARAMS.max_new_tokens
    assert vars(model.config) == before
    assert core.pool.is_vacant
    assert engine.drafter.pool.is_vacant
