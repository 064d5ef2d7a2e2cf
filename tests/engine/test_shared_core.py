"""Calls of several threads on one engine, in one process, whatever interrupts a call or copies an engine."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

import specdec_fast as sd
from specdec_fast.kv_cache.page_pool import PagePool
from support.grids import each_value_once, grid
from support.models import tiny_model

PARAMS = sd.SamplingParams(max_new_tokens=12)
PROMPTS = [[5, 6], [7], [8, 9, 10]]


@pytest.fixture(params=grid([{}, {"enforce_eager": True}], keep=[{}]), ids=str)
def pair(request):
    model = tiny_model("llama")
    return sd.Engine(model, model, max_batch_size=2, **request.param)


def tokens_of(outputs):
    return [output.token_ids for output in outputs]


def vacant(engine):
    return engine.core.pool.is_vacant and engine.drafter.pool.is_vacant


def test_calls_of_threads_are_decoded_in_one_batch(pair, monkeypatch):
    """The first step waits until every thread has called."""
    expected = [tokens_of(pair.generate([prompt], PARAMS))[0] for prompt in PROMPTS]
    all_called, calls, step, add = Event(), [], pair.core.step, pair.shared.add

    def counted(call, requests):
        add(call, requests)
        calls.append(call)
        if len(calls) == len(PROMPTS):
            all_called.set()

    def after_all():
        assert all_called.wait(3600)
        return step()

    monkeypatch.setattr(pair.shared, "add", counted)
    monkeypatch.setattr(pair.core, "step", after_all)
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        found = list(threads.map(lambda prompt: tokens_of(pair.generate([prompt], PARAMS))[0], PROMPTS))
    assert found == expected
    assert pair.last_run.num_sequence_steps > pair.last_run.num_steps, "some steps served several calls"
    assert vacant(pair)


def test_threads_that_call_one_engine(pair):
    expected = tokens_of(pair.generate(PROMPTS, PARAMS))
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: tokens_of(pair.generate(PROMPTS, PARAMS)), range(16)))
    assert found == [expected] * 16
    assert vacant(pair)


def test_streams_that_are_open_at_the_same_time(pair):
    """One is read in turns with calls of the same thread, one is abandoned, one is closed early, one is read later."""
    params = sd.SamplingParams(max_new_tokens=30, ignore_eos=True, logprobs=True)
    expected = pair.generate(PROMPTS, params)
    abandoned, closed, read, late = (pair.stream(PROMPTS, params) for _ in range(4))
    for stream in (abandoned, closed, late):
        next(stream)
    found = []
    for chunk in read:
        found.append(chunk)
        assert tokens_of(pair.generate(PROMPTS[:1], params)) == tokens_of(expected[:1])
        closed.close()
    del abandoned
    late = list(late)
    for output in expected:
        own = [chunk for chunk in found if chunk.index == output.index]
        assert [token for chunk in own for token in chunk.token_ids] == output.token_ids
        assert [value for chunk in own for value in chunk.logprobs] == output.logprobs
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + ["length"]
        later = [chunk for chunk in late if chunk.index == output.index]
        num_later = sum(len(chunk.token_ids) for chunk in later)
        assert [token for chunk in later for token in chunk.token_ids] == output.token_ids[30 - num_later :]
        assert [value for chunk in later for value in chunk.logprobs] == output.logprobs[30 - num_later :]
        assert [chunk.finish_reason for chunk in later] == [None] * (len(later) - 1) + ["length"]
    assert vacant(pair)
    assert not pair.core.has_work


class Calling(sd.Drafter):
    """Calls the engine that asks it for a draft."""

    name = "calling"
    engine: sd.Engine

    def propose(self, sequences, limits):
        self.engine.generate([[1]])


def test_a_step_that_calls_its_engine():
    drafter = Calling()
    drafter.engine = engine = sd.Engine(tiny_model("llama"), drafter)
    with pytest.raises(sd.EngineBusyError, match="a step of this engine called the engine"):
        engine.generate(PROMPTS, PARAMS)
    assert not engine.core.has_work
    assert engine.core.pool.is_vacant


def test_a_failed_step_is_raised_by_the_calls_that_it_served(pair, monkeypatch):
    """Two sequences a step and four resident; a call that waits outside the step is not concerned."""
    params = sd.SamplingParams(max_new_tokens=60, ignore_eos=True)
    expected = tokens_of(pair.generate(PROMPTS, params))
    streams = [pair.stream([prompt], params) for prompt in PROMPTS]
    found = [list(next(stream).token_ids) for stream in streams]
    verify, failed = pair.target.verify_step, []

    def fail_once(pool, batch, *args):
        if not failed:
            failed.extend(batch)
            raise ZeroDivisionError("by chance")
        return verify(pool, batch, *args)

    monkeypatch.setattr(pair.target, "verify_step", fail_once)
    num_raised = 0
    for i, stream in enumerate(streams):
        try:
            for chunk in stream:
                found[i] += chunk.token_ids
            assert found[i] == expected[i]
        except ZeroDivisionError:
            num_raised += 1
    assert num_raised == len(failed) == 2
    assert vacant(pair)


def test_requests_that_the_core_has_dropped_end(pair, monkeypatch):
    stream = pair.stream(PROMPTS, PARAMS)
    next(stream)
    pair.core.cancel_all()
    last = [chunk for chunk in stream if chunk.finish_reason is not None]
    assert {chunk.index for chunk in last} == {0, 1, 2}
    step = pair.core.step

    def step_and_drop():
        outputs = step()
        pair.core.cancel_all()
        return outputs

    monkeypatch.setattr(pair.core, "step", step_and_drop)
    outputs = pair.generate(PROMPTS, sd.SamplingParams(max_new_tokens=90, ignore_eos=True))
    assert all(isinstance(item.error, sd.RequestCancelledError) for item in [*last, *outputs])
    assert vacant(pair)


class Clinging(sd.Drafter):
    """Its release of the first sequence raises."""

    name, num_released = "clinging", 0

    def propose(self, sequences, limits):
        return sd.Draft(torch.zeros(0, dtype=torch.int64), [0] * len(limits))

    def release(self, sequence):
        self.num_released += 1
        if self.num_released == 1:
            raise ZeroDivisionError("by chance")


def test_a_drafter_that_fails_when_a_sequence_leaves():
    engine = sd.Engine(tiny_model("llama"), Clinging(), max_batch_size=1)
    short, long = sd.SamplingParams(max_new_tokens=1), sd.SamplingParams(max_new_tokens=40, ignore_eos=True)
    expected = tokens_of(sd.generate(tiny_model("llama"), None, [[5, 6], [7]], [short, long]))
    other = engine.stream([[7]], long)
    found = list(next(other).token_ids)
    with pytest.raises(ZeroDivisionError):
        engine.generate([[5, 6]], short)
    found += [token for chunk in other for token in chunk.token_ids]
    assert found == expected[1]
    assert tokens_of(engine.generate([[5, 6]], short)) == expected[:1]
    assert engine.core.pool.is_vacant


def test_an_interrupt_of_one_call_is_no_interrupt_of_others(pair, monkeypatch):
    expected = tokens_of(pair.generate(PROMPTS, PARAMS))
    stream = pair.stream(PROMPTS[:1], PARAMS)
    next(stream)
    verify = pair.target.verify_step

    def interrupted(*args):
        monkeypatch.setattr(pair.target, "verify_step", verify)
        raise KeyboardInterrupt

    monkeypatch.setattr(pair.target, "verify_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair.generate(PROMPTS, PARAMS)
    with pytest.raises(sd.StepError, match="failed: KeyboardInterrupt"):
        list(stream)
    assert tokens_of(pair.generate(PROMPTS, PARAMS)) == expected
    assert vacant(pair)


def test_a_stream_moves_between_threads(pair):
    expected = [output.token_ids for output in pair.generate(PROMPTS, PARAMS)]
    found = [[] for _ in PROMPTS]
    stream = pair.stream(PROMPTS, PARAMS)
    threads = [ThreadPoolExecutor(1) for _ in range(3)]
    for i in range(10**6):
        chunk = threads[i % 3].submit(next, stream, None).result()
        if chunk is None:
            break
        found[chunk.index] += chunk.token_ids
    assert found == expected
    other = pair.stream(PROMPTS, PARAMS)
    next(other)
    threads[0].submit(other.close).result()
    assert [output.token_ids for output in pair.generate(PROMPTS, PARAMS)] == expected
    for thread in threads:
        thread.shutdown()


@each_value_once
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("method", ["add", "free", "allocate"])
@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupt_leaves_an_engine_that_serves(pair, monkeypatch, method, moment, count):
    """Ctrl-C, or a timeout by a signal, comes anywhere: also between taking a page and recording who has it."""
    expected = [output.token_ids for output in pair.generate(PROMPTS, PARAMS)]
    original, calls = getattr(PagePool, method), []

    def interrupted(*args):
        calls.append(method)
        if moment == "after":
            original(*args)
        if len(calls) == count:
            raise KeyboardInterrupt
        if moment == "before":
            original(*args)

    monkeypatch.setattr(PagePool, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair.generate(PROMPTS, PARAMS)
    monkeypatch.undo()
    assert [output.token_ids for output in pair.generate(PROMPTS, PARAMS)] == expected
    assert pair.core.pool.is_vacant
    assert pair.drafter.pool.is_vacant
    assert not pair.drafter.draft_kv_length


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.deepcopy], ids=lambda f: f.__name__)
def test_an_engine_is_not_duplicated(pair, duplicate):
    expected = [output.token_ids for output in pair.generate(PROMPTS, PARAMS)]
    with pytest.raises(sd.EngineCopyError, match="make another Engine of the same models"):
        duplicate(pair)
    twin = copy.copy(pair)  # has the same core and models
    stream = pair.stream(PROMPTS, PARAMS)
    next(stream)
    assert [output.token_ids for output in twin.generate(PROMPTS, PARAMS)] == expected
    assert len([chunk for chunk in stream if chunk.finish_reason]) == len(PROMPTS)
