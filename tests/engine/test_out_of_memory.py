"""Forwards and pools that run out of memory: smaller steps, a typed error for what fails alone, and no other output."""

from __future__ import annotations

import random

import pytest

import specdec_fast as sd
from specdec_fast.engine import core as core_module
from specdec_fast.engine.core import EngineCore
from specdec_fast.engine.input import RequestBuilder
from specdec_fast.kv_cache.page_pool import PagePool
from support.grids import each_value_once
from support.memory_errors import ERRORS
from support.models import VOCAB_SIZE

PARAMS = [
    sd.SamplingParams(max_new_tokens=15, ignore_eos=True, logprobs=True, temperature=0.9 * (i % 2), seed=i)
    for i in range(8)
]
DRAW = random.Random(2)
PROMPTS = [[DRAW.randrange(VOCAB_SIZE) for _ in range(length)] for length in (3, 1, 20, 5, 9, 2, 14, 4)]


@pytest.fixture(scope="module")
def expected(pair):
    return [results(o) for o in sd.Engine(pair[0], None, max_batch_size=1).generate(PROMPTS, PARAMS)]


def results(output):
    return output.token_ids, output.logprobs


def wrap(monkeypatch, owner, name, failing, works_first=True):
    """Let a method raise the error that ``failing(*args)`` returns, if any; usually after it has done its work."""
    original = getattr(owner, name)

    def wrapped(*args):
        error = failing(*args)
        result = original(*args) if error is None or works_first else None
        if error is not None:
            raise error
        return result

    monkeypatch.setattr(owner, name, wrapped)


def rows_of(place, args):
    """Count what a call computes: rows of a forward, sequences of a draft's prefill."""
    if place == "verify_step":
        return len(args[1]) + sum(args[3])
    return len(args[0])


@each_value_once("place", "most", "ahead")
@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("method", ["eqspec", "exspec"])
@pytest.mark.parametrize(
    ("place", "most"), [("verify_step", 1), ("verify_step", 7), ("propose", 1), ("admit", 1), ("emission_scores", 3)]
)
def test_a_step_is_repeated_with_fewer_rows(pair, expected, monkeypatch, place, most, method, error, ahead):
    monkeypatch.setattr(EngineCore, "launches_ahead", ahead)
    engine = sd.Engine(*pair, max_batch_size=4, method=method)
    owner = {"verify_step": engine.target, "emission_scores": core_module}.get(place, engine.drafter)
    wrap(monkeypatch, owner, place, lambda *args: error if rows_of(place, args) > most else None)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [results(output.raise_for_error()) for output in outputs] == expected
    assert engine.last_run.num_out_of_memory > 0
    assert engine.core.pool.is_vacant
    assert engine.drafter.pool.is_vacant


@pytest.mark.parametrize("chunk", [None, 16])
def test_prompts_are_prefilled_in_smaller_chunks(pair, expected, monkeypatch, chunk):
    engine, prefilled = sd.Engine(*pair, max_batch_size=4, max_prefill_tokens=chunk), []
    original = engine.target.forward

    def limited(batch, pool, logit_rows=None, hidden_states=None):
        logits = original(batch, pool, logit_rows, hidden_states)
        if logit_rows is not None:
            prefilled.append(len(batch.token_ids))
            if prefilled[-1] > 3:
                raise ERRORS["gpu"]
        return logits

    monkeypatch.setattr(engine.target, "forward", limited)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [results(output.raise_for_error()) for output in outputs] == expected
    assert max(prefilled) > 3
    assert engine.last_run.num_out_of_memory >= 2


@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize("place", ["verify_step", "compute"])
def test_a_request_that_fails_alone_gets_an_error(pair, expected, monkeypatch, place, ahead):
    """One request has no memory at any number of rows; the others finish, in the same call."""
    monkeypatch.setattr(EngineCore, "launches_ahead", ahead)
    engine = sd.Engine(*pair, max_batch_size=4, max_prefill_tokens=8)  # so the long prompt has several chunks
    owner = engine.target if place == "verify_step" else engine.core.prefilling

    def failing(*args):
        lengths = [sequence.length for sequence in args[1] if sequence.token_ids[:20] == PROMPTS[2]]
        return ERRORS["cpu"] if lengths and (place == "compute" or lengths[0] > 24) else None

    wrap(monkeypatch, owner, place, failing, works_first=place == "verify_step")
    outputs = engine.generate(PROMPTS, PARAMS)
    failed = outputs.pop(2)
    assert isinstance(failed.error, sd.RequestMemoryError)
    assert isinstance(failed.error, MemoryError)
    assert failed.error.__cause__ is ERRORS["cpu"]
    assert (failed.token_ids, failed.logprobs) == tuple(values[: len(failed.token_ids)] for values in expected[2])
    assert [results(output.raise_for_error()) for output in outputs] == [*expected[:2], *expected[3:]]
    assert engine.core.pool.is_vacant
    assert engine.drafter.pool.is_vacant


def fail_verifying_twice(monkeypatch, engine, count, second):
    """Let the ``count``-th verification run out of memory, and the next one raise ``second``."""
    errors = [None] * (count - 1) + [ERRORS["gpu"], second]
    wrap(monkeypatch, engine.target, "verify_step", lambda *args: errors.pop(0) if errors else None)


@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
def test_the_last_request_of_a_core_fails_alone(pair, expected, monkeypatch, ahead):
    """Launching ahead finds the lack of memory after the previous step; its outputs are returned before the error."""
    monkeypatch.setattr(EngineCore, "launches_ahead", ahead)
    engine = sd.Engine(pair[0], None, max_batch_size=1)
    fail_verifying_twice(monkeypatch, engine, 4, None)
    request = RequestBuilder(engine.target, None).build(0, PROMPTS[0], PARAMS[0])
    engine.core.add(request)
    outputs = []
    while engine.core.has_work:
        outputs += engine.core.step()
    assert [(o.request, o.finish_reason) for o in outputs] == [(request, None)] * 3 + [(request, "error")]
    assert isinstance(request.error, sd.RequestMemoryError)
    assert request.emitted_ids == expected[0][0][:3]
    assert engine.core.step() == []

    fail_verifying_twice(monkeypatch, engine, 4, None)
    (output,) = engine.generate(PROMPTS[:1], PARAMS[0])
    assert isinstance(output.error, sd.RequestMemoryError)
    assert output.token_ids == expected[0][0][:3]


@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
def test_a_request_that_failed_alone_keeps_its_error_if_the_next_launch_raises(pair, monkeypatch, ahead):
    monkeypatch.setattr(EngineCore, "launches_ahead", ahead)
    engine = sd.Engine(pair[0], None, max_batch_size=1, window_size=1)
    fail_verifying_twice(monkeypatch, engine, 3, ZeroDivisionError("by chance"))
    builder, call = RequestBuilder(engine.target, None), engine.shared.call()
    requests = [builder.build(i, PROMPTS[i], PARAMS[i]) for i in range(3)]
    call.add(requests)
    outputs = []
    while call.open:
        outputs += call.take()
    assert [o.request for o in outputs if o.finish_reason == "error"] == requests[1::-1]
    assert [type(request.error) for request in requests] == [sd.RequestMemoryError, sd.StepError, type(None)]
    assert not engine.core.has_work


def test_cancelling_all_drops_what_has_failed_alone(pair, monkeypatch):
    monkeypatch.setattr(EngineCore, "launches_ahead", True)
    engine = sd.Engine(pair[0], None, max_batch_size=1)
    fail_verifying_twice(monkeypatch, engine, 2, None)
    engine.core.add(RequestBuilder(engine.target, None).build(0, PROMPTS[0], PARAMS[0]))
    engine.core.step()
    assert engine.core.has_work
    engine.core.cancel_all()
    assert not engine.core.has_work
    assert engine.core.step() == []


def test_a_prompt_that_needs_no_prefill_is_not_blamed(pair, monkeypatch):
    """A prompt of one token has no rows in a prefill."""
    engine = sd.Engine(pair[0], None, max_batch_size=4)

    def failing(*args):  # whether it is prefilled, or has its rows in a verification
        return ERRORS["gpu"] if any(s.index == 1 and s.num_uncomputed > 1 for s in args[1]) else None

    wrap(monkeypatch, engine.core.prefilling, "compute", failing, works_first=False)
    wrap(monkeypatch, engine.target, "verify_step", failing, works_first=False)
    outputs = engine.generate([[5], [1, 2], [3], [9, 8, 7]], PARAMS[0])
    assert [type(output.error) for output in outputs] == [type(None), sd.RequestMemoryError, type(None), type(None)]


def test_a_cancelled_request_that_lacks_memory_alone_is_not_returned(pair, monkeypatch):
    """Its last step was launched before it was cancelled."""
    monkeypatch.setattr(EngineCore, "launches_ahead", True)
    engine = sd.Engine(pair[0], None, max_batch_size=1, window_size=1)
    core, builder = engine.core, RequestBuilder(engine.target, None)
    cancelled, other = (builder.build(i, PROMPTS[i], PARAMS[i]) for i in range(2))
    number, _ = core.add(cancelled), core.add(other)
    core.step()
    assert core.cancel(number)
    errors = [ERRORS["gpu"]]
    wrap(monkeypatch, core_module, "emission_scores", lambda *args: errors.pop() if errors else None)
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert not errors
    assert {output.request for output in outputs} == {other}
    assert cancelled.finish_reason is None
    assert core.pool.is_vacant


def test_steps_that_only_prefill_count(pair, monkeypatch):
    """A long prompt is not prefilled one row a step until another sequence decodes."""
    monkeypatch.setattr("specdec_fast.engine.row_limit._STEPS", 3)
    engine = sd.Engine(pair[0], None, max_batch_size=1)
    core = engine.core
    request = RequestBuilder(engine.target, None).build(0, PROMPTS[2], PARAMS[2])
    core.add(request)
    core.row_limit.num_rows = 100
    while core.row_limit.most != 1:
        core.row_limit.recover(ERRORS["gpu"], [request])
        core.row_limit.num_rows = core.row_limit.most
    found = []
    while not request.emitted_ids:
        core.step()
        found.append(request.target_kv_length)
    assert found[:7] == [1, 2, 3, 5, 7, 9, 13]


@pytest.fixture(params=[True, False], ids=["target", "draft"])
def memory_for(request, pair, monkeypatch):
    """A function that limits the positions of a pool: of the target's, or of the draft model's."""
    original, layers = PagePool.__init__, 3 if request.param else 2

    def limit_to(most):
        def limited(self, layout, num_tokens, page_size, *rest):
            if layout.num_layers == layers and num_tokens > most:
                raise sd.KVCacheAllocationError(f"no {num_tokens} positions")
            original(self, layout, num_tokens, page_size, *rest)

        monkeypatch.setattr(PagePool, "__init__", limited)

    return limit_to


def test_sequences_share_a_pool_for_which_there_is_memory(pair, expected, memory_for):
    engine = sd.Engine(*pair, max_batch_size=4, page_size=4)
    memory_for(60)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [results(output.raise_for_error()) for output in outputs] == expected
    assert engine.last_run.num_preemptions > 0
    assert engine.core.pool.num_tokens <= 60


def test_a_request_for_which_no_pool_can_be_allocated_fails_alone(pair, expected, memory_for):
    engine = sd.Engine(*pair, max_batch_size=4, page_size=4)
    memory_for(32)  # the third request needs 34
    outputs = engine.generate(PROMPTS, PARAMS)
    failed = outputs.pop(2)
    assert isinstance(failed.error, sd.RequestMemoryError)
    assert isinstance(failed.error.__cause__, sd.KVCacheAllocationError)
    assert [results(output.raise_for_error()) for output in outputs] == [*expected[:2], *expected[3:]]
    assert engine.core.pool.is_vacant
