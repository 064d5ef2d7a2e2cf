"""One call at a time, in one process: typed errors for all others, whatever interrupts a call or copies an engine."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import specdec_fast as sd
from specdec_fast.kv_cache.page_pool import PagePool
from support.models import tiny_model

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
PARAMS = sd.SamplingParams(max_new_tokens=12)
PROMPTS = [[5, 6], [7], [8, 9, 10]]


def in_a_fork(action: Callable[[], object]) -> str:
    """Return what a forked child raised, or the result, as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = repr(action())
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(write, found.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return found


@pytest.fixture
def engine():
    return sd.Engine(tiny_model("llama"), "ngram")


@needs_fork
def test_an_engine_is_refused_in_a_fork(engine):
    params = sd.SamplingParams(max_new_tokens=4)
    before = engine.generate([[1, 2, 3]], params)[0].token_ids
    for action in (
        lambda: engine.generate([[1, 2, 3]], params),
        lambda: list(engine.stream([[1, 2, 3]], params)),
    ):
        found = in_a_fork(action)
        assert found.startswith("ForkedProcessError")
        assert "spawn" in found
    assert engine.generate([[1, 2, 3]], params)[0].token_ids == before


@needs_fork
def test_an_engine_is_made_in_a_fork_only_where_it_needs_no_threads(engine):
    def make() -> list[int]:
        return sd.generate(tiny_model("llama"), "ngram", [[1, 2, 3]], sd.SamplingParams(max_new_tokens=4))[0].token_ids

    expected = repr(engine.generate([[1, 2, 3]], sd.SamplingParams(max_new_tokens=4))[0].token_ids)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert in_a_fork(make).startswith("ForkedProcessError")
        torch.set_num_threads(1)
        assert in_a_fork(make) == expected
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(params=[{}, {"enforce_eager": True}], ids=str)
def pair(request):
    model = tiny_model("llama")
    return sd.Engine(model, model, max_batch_size=2, **request.param)


def test_a_call_that_begins_while_another_begins(pair, monkeypatch):
    """The second call comes after the first has found the engine idle, and before it has taken it."""
    refused = []

    def statistics():
        monkeypatch.undo()
        with pytest.raises(sd.EngineBusyError, match="has not ended"):
            pair.generate(PROMPTS, PARAMS)
        refused.append(True)
        return sd.RunStats()

    monkeypatch.setattr("specdec_fast.engine.engine.RunStats", statistics)
    assert all(output.error is None for output in pair.generate(PROMPTS, PARAMS))
    assert refused


def test_threads_that_call_one_engine(pair):
    expected = [output.token_ids for output in pair.generate(PROMPTS, PARAMS)]

    def call(_):
        try:
            return [output.token_ids for output in pair.generate(PROMPTS, PARAMS)]
        except sd.EngineBusyError:
            return None

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(call, range(32)))
    assert expected in found
    assert all(tokens in (None, expected) for tokens in found)


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


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("method", ["reserve", "free", "allocate", "_make_place"])
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
    twin = copy.copy(pair)  # has the same call guard, pool and models
    stream = pair.stream(PROMPTS, PARAMS)
    next(stream)
    with pytest.raises(sd.EngineBusyError):
        twin.generate(PROMPTS, PARAMS)
    stream.close()
    assert [output.token_ids for output in twin.generate(PROMPTS, PARAMS)] == expected
