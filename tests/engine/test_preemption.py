"""A pool that runs out of pages: the youngest sequences wait and are prefilled anew, and no output changes."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

import specdec_fast as sd
from specdec_fast.engine.core import EngineCore
from specdec_fast.engine.input import RequestBuilder
from support.grids import each_value_once
from support.models import VOCAB_SIZE
from support.scripted import ByteTokenizer

PAGE, LARGEST = 4, 60  # positions of a page; of the largest request
TOKENIZER = ByteTokenizer([bytes([65 + i % 26]) for i in range(VOCAB_SIZE)])


def _requests():
    """Greedy and sampled requests, some with a K of their own, a penalty or stop strings."""
    draw = random.Random(5)
    found = []
    for i in range(12):
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 20))]
        params = sd.SamplingParams(
            max_new_tokens=draw.randint(5, LARGEST + 1 - len(prompt)),
            ignore_eos=True,
            temperature=0.8 * (i % 2),
            repetition_penalty=1.2 if i % 4 == 3 else 1.0,
            seed=i,
            logprobs=True,
            num_draft_tokens=draw.choice([None, None, 0, 2]),
            stop=("QAJZ", "ABCDEFG") if i % 3 == 0 else (),
        )
        found.append((prompt, params))
    return [*found, ([7] * 20, sd.SamplingParams(max_new_tokens=LARGEST - 19, ignore_eos=True, logprobs=True))]


REQUESTS = _requests()


@pytest.fixture(scope="module")
def expected(pair):
    """What plain decoding makes of each request by itself; with stop strings that end it in the middle."""
    engine, found = sd.Engine(pair[0], None, max_batch_size=1, tokenizer=TOKENIZER), []
    for i, (prompt, params) in enumerate(REQUESTS):
        if params.stop:
            text = engine.generate([prompt], [params])[0].text
            middle = len(text) // 2
            REQUESTS[i] = (prompt, sd.SamplingParams(**{**vars(params), "stop": ("QAJZ", text[middle : middle + 4])}))
        found.append(engine.generate([REQUESTS[i][0]], [REQUESTS[i][1]])[0])
    assert sum(output.finish_reason == "stop" for output in found) >= 3
    return found


def result_of(output):
    return output.token_ids, output.logprobs, output.text, output.finish_reason


def engine_of(pair, draft="model", **config):
    config = {"max_batch_size": 4, "page_size": PAGE, "kv_cache_tokens": LARGEST + 4 * PAGE, **config}
    return sd.Engine(pair[0], pair[1] if draft == "model" else draft, tokenizer=TOKENIZER, **config)


def assert_vacant(engine):
    assert engine.core.pool.is_vacant
    pool = getattr(engine.drafter, "pool", None)
    assert pool is None or pool.is_vacant


@each_value_once("draft", "config")
@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize(
    ("draft", "config"),
    [
        ("model", {}),
        pytest.param("model", {"method": "eqspec"}, marks=pytest.mark.grid),
        ("model", {"max_prefill_tokens": 5}),
        ("model", {"num_draft_tokens": "auto", "max_wait_steps": 1, "window_size": 8}),
        ("model", {"page_size": 1, "kv_cache_tokens": LARGEST}),
        pytest.param("ngram", {}, marks=pytest.mark.grid),
        (None, {"max_wait_steps": 0}),
    ],
    ids=str,
)
def test_no_output_changes(pair, expected, monkeypatch, draft, config, ahead):
    monkeypatch.setattr(EngineCore, "launches_ahead", ahead)
    engine = engine_of(pair, draft, **config)
    prompts, params = map(list, zip(*REQUESTS, strict=True))
    outputs = engine.generate(prompts, params)
    assert engine.last_run.num_preemptions > 2
    for output, wanted in zip(outputs, expected, strict=True):
        assert result_of(output.raise_for_error()) == result_of(wanted)
    assert engine.last_run.decoding.num_emitted_tokens == sum(len(output.token_ids) for output in expected)
    assert_vacant(engine)


@pytest.mark.grid
def test_no_output_changes_in_pytorch(pair):
    """Forwards that PyTorch runs have other bits than a program's, so they have a reference of their own."""
    prompts, params = map(list, zip(*REQUESTS, strict=True))
    plain = sd.Engine(pair[0], None, max_batch_size=1, tokenizer=TOKENIZER, enforce_eager=True)
    engine = engine_of(pair, enforce_eager=True)
    outputs = engine.generate(prompts, params)
    assert engine.last_run.num_preemptions > 2
    assert [*map(result_of, outputs)] == [*map(result_of, plain.generate(prompts, params))]


def test_streams_repeat_nothing(pair, expected):
    engine = engine_of(pair)
    prompts, params = map(list, zip(*REQUESTS, strict=True))
    tokens, texts = [[] for _ in prompts], ["" for _ in prompts]
    for chunk in engine.stream(prompts, params):
        tokens[chunk.index] += chunk.token_ids
        texts[chunk.index] += chunk.text
    assert engine.last_run.num_preemptions > 2
    assert tokens == [output.token_ids for output in expected]
    assert texts == [output.text for output in expected]


def core_with_requests(pair, **config):
    engine = engine_of(pair, **config)
    builder = RequestBuilder(engine.target, TOKENIZER)
    requests = [builder.build(i, *request) for i, request in enumerate(REQUESTS)]
    for request in requests:
        engine.core.add(request)
    return engine, requests


@pytest.mark.parametrize("method", ["eqspec", "exspec"])
def test_the_oldest_goes_on_and_the_youngest_waits(pair, method):
    """What is preempted is younger than all that stay, and nothing is preempted in its first step."""
    engine, requests = core_with_requests(pair, method=method, window_size=4)
    core = engine.core
    lengths, num_preempted = {}, 0
    while core.has_work:
        before, oldest = set(core.resident), next(iter(core.resident), None)
        length = oldest and oldest.length
        counts = {s: s.num_preemptions for s in requests}
        core.step()
        preempted = [s for s in requests if s.num_preemptions > counts[s]]
        assert all(s in before and s.length > lengths[s] for s in preempted), "preempted before it emitted a token"
        num_preempted += len(preempted)
        lengths.update({s: s.prompt_length for s in core.resident if s not in before and s not in lengths})
        lengths.update({s: s.length for s in core.waiting})  # of what is preempted, at its next admission
        ages = [s.request_id for s in (*core.resident, *core.waiting)]
        assert all(older < younger for older, younger in pairwise(ages))
        assert oldest is None or oldest.length > length or oldest.finish_reason
    assert num_preempted == core.stats.num_preemptions > 2
    assert_vacant(engine)


def test_a_preempted_request_is_cancelled(pair, expected):
    """Its counts are part of the run's, and the others get their tokens."""
    engine, requests = core_with_requests(pair)
    core = engine.core
    while not core.stats.num_preemptions:
        core.step()
    waits = core.waiting[0]
    assert waits.emitted_ids
    assert waits.target_kv_length == 0
    assert core.cancel(waits.request_id)
    while core.has_work:
        core.step()
    for request, wanted in zip(requests, expected, strict=True):
        if request is not waits:
            assert (request.emitted_ids, request.logprobs) == (wanted.token_ids, wanted.logprobs)
    assert core.stats.decoding.num_emitted_tokens == sum(len(request.emitted_ids) for request in requests)
    assert_vacant(engine)


def test_a_failed_step_leaves_preempted_requests_alone(pair, expected):
    engine, requests = core_with_requests(pair)
    core = engine.core
    while not core.stats.num_preemptions:
        core.step()
    waits = list(core.waiting)
    core.drop_failed(ZeroDivisionError("by chance"))
    assert list(core.waiting) == waits
    while core.has_work:
        core.step()
    assert any(request.error for request in requests)
    for request in waits:
        assert (request.emitted_ids, request.logprobs) == (
            expected[request.index].token_ids,
            expected[request.index].logprobs,
        )
    assert_vacant(engine)


def test_a_pool_for_one_sequence_serves_all(pair, expected):
    """Prompts are prefilled and preempted again and again; each preemption is paid for by emitted tokens."""
    engine, requests = core_with_requests(pair, kv_cache_tokens=LARGEST, num_draft_tokens=2)
    core = engine.core
    while core.has_work:
        core.step()
    assert [r.emitted_ids for r in requests] == [output.token_ids for output in expected]
    num_tokens = sum(len(output.token_ids) for output in expected)
    assert 0 < core.stats.num_preemptions <= num_tokens / (2 * PAGE)
