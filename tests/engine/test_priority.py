"""Priorities: which waiting request is admitted next, and which resident one gives up its pages. No output changes."""

from __future__ import annotations

from itertools import pairwise

import pytest

import specdec_fast as sd
from specdec_fast.engine.core import EngineCore
from specdec_fast.engine.input import RequestBuilder
from support.grids import each_value_once

PROMPTS = [[7 + i] * (3 + 2 * (i % 4)) for i in range(10)]
PRIORITIES = [0, 0, 5, -1, 5, 0, -1, 2, 0, 5]


def params_of(i, priority=0):
    return sd.SamplingParams(
        max_new_tokens=30, ignore_eos=True, logprobs=True, temperature=0.8 * (i % 2), seed=i, priority=priority
    )


def run(engine, priorities, num_at_once=None):
    """Add so many requests (None: all), then one before each step, and run them.

    Returns the requests, and the requests in the order of their first admission.
    """
    core, builder = engine.core, RequestBuilder(engine.target, None)
    requests = [builder.build(i, PROMPTS[i], params_of(i, priority)) for i, priority in enumerate(priorities)]
    for request in requests[:num_at_once]:
        core.add(request)
    late = [] if num_at_once is None else requests[num_at_once:]
    admitted = []
    while core.has_work:
        if late:
            core.add(late.pop(0))
        before = list(core.resident)
        core.step()
        preempted = [request for request in before if request in core.waiting]
        stay = [request for request in before if request in core.resident]
        assert all(first.turn < last.turn for first in stay for last in preempted), "it gave up its pages too early"
        admitted += [request for request in core.resident if request not in admitted]
        for sequences in (core.waiting, core.resident):
            assert all(first.turn < second.turn for first, second in pairwise(sequences))
    return requests, admitted


@pytest.mark.parametrize("method", ["eqspec", "exspec"])
def test_higher_ones_are_admitted_first_and_equal_ones_by_age(pair, method):
    engine = sd.Engine(*pair, max_batch_size=2, window_size=2, method=method)
    _, admitted = run(engine, PRIORITIES)
    order = sorted(range(len(PRIORITIES)), key=lambda i: (-PRIORITIES[i], i))
    assert [request.index for request in admitted] == order
    _, admitted = run(engine, [3] * len(PROMPTS))
    assert [request.index for request in admitted] == list(range(len(PROMPTS)))


@each_value_once
@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize("draft", ["model", "ngram-trie", None])
@pytest.mark.parametrize("config", [{}, {"method": "eqspec"}, {"max_prefill_tokens": 3}], ids=str)
def test_the_lowest_gives_up_its_pages_and_no_output_changes(pair, monkeypatch, draft, config, ahead):
    monkeypatch.setattr(EngineCore, "launches_ahead", ahead)
    plain = sd.Engine(pair[0], None, max_batch_size=1)
    expected = plain.generate(PROMPTS, [params_of(i) for i in range(len(PROMPTS))])
    drafter = pair[1] if draft == "model" else draft
    engine = sd.Engine(pair[0], drafter, max_batch_size=4, page_size=4, kv_cache_tokens=64, **config)
    requests, _ = run(engine, PRIORITIES, num_at_once=2)
    assert engine.core.stats.num_preemptions > 0
    for request, output in zip(requests, expected, strict=True):
        assert (request.emitted_ids, request.logprobs) == (output.token_ids, output.logprobs)
    assert engine.core.pool.is_vacant


def test_one_that_comes_later_overtakes_those_that_wait(pair):
    """A resident request keeps its pages. A preempted one is older than the others of its priority."""
    engine = sd.Engine(*pair, max_batch_size=1, window_size=1)
    core, builder = engine.core, RequestBuilder(engine.target, None)
    requests = [builder.build(i, PROMPTS[i], params_of(i)) for i in range(3)]
    for request in requests:
        core.add(request)
    core.step()
    urgent = builder.build(3, PROMPTS[3], params_of(3, priority=1))
    core.add(urgent)
    assert [*core.resident, *core.waiting] == [requests[0], urgent, *requests[1:]]
    ended = []
    while core.has_work:
        ended += [output.request for output in core.step() if output.finish_reason]
    assert ended == [requests[0], urgent, *requests[1:]]


def test_texts_are_scored_by_priority_too(pair):
    engine = sd.Engine(pair[0], None, max_batch_size=1, window_size=1)
    params = [sd.SamplingParams(max_new_tokens=0, prompt_logprobs=0, priority=p) for p in (0, 2, 1)]
    assert [output.index for output in engine.as_completed(PROMPTS[:3], params)] == [1, 2, 0]
