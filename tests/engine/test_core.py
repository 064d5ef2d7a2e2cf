"""The engine's core: requests join and leave between steps, and each gets the tokens of plain decoding."""

from __future__ import annotations

import random
import weakref

import pytest
import torch

import specdec_fast as sd
from specdec_fast.drafters import Draft, Drafter
from specdec_fast.engine.core import EngineCore
from specdec_fast.engine.input import RequestBuilder
from specdec_fast.kv_cache.page_pool import PagePool
from support.grids import each_value_once
from support.models import VOCAB_SIZE

NUM_REQUESTS = 12


@pytest.fixture(params=[False, True], ids=["no_overlap", "overlap"])
def overlap(request, monkeypatch):
    """Whether the core launches the next step before it returns a step's outputs, as on a GPU."""
    monkeypatch.setattr(EngineCore, "launches_ahead", request.param)
    return request.param


def request_of(engine, index, prompt, **params):
    params = sd.SamplingParams(**{"max_new_tokens": 12, "ignore_eos": True, **params})
    return RequestBuilder(engine.target, None).build(index, prompt, params)


def requests_of(engine, seed=0):
    """Return greedy and sampled requests of many lengths that ask for log-probabilities."""
    draw = random.Random(seed)
    return [
        request_of(
            engine,
            i,
            [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 30))],
            max_new_tokens=draw.randint(1, 20),
            temperature=0.8 * (i % 2),
            seed=i,
            logprobs=True,
        )
        for i in range(NUM_REQUESTS)
    ]


def alone(target):
    """Return tokens and log-probabilities of each request by plain decoding at batch 1."""
    engine = sd.Engine(target, None, max_batch_size=1)
    found = []
    for request in requests_of(engine):
        output = engine.generate([request.token_ids], [request.params])[0]
        found.append((output.token_ids, output.logprobs))
    return found


def drain(core):
    """Step until no request is left; return the tokens of each request."""
    emitted = {}
    while core.has_work:
        for output in core.step():
            emitted.setdefault(output.request.index, []).extend(output.token_ids)
    return emitted


def vacant(engine):
    pools = [engine.core.pool, getattr(engine.drafter, "pool", None)]
    return all(pool is None or pool.is_vacant for pool in pools)


@each_value_once
@pytest.mark.parametrize("draft", ["model", "ngram", None])
@pytest.mark.parametrize("method", ["eqspec", "exspec"])
def test_requests_that_join_and_leave_get_the_tokens_of_plain_decoding(pair, overlap, method, draft):
    """The test adds and cancels requests while others are decoded, and pools grow between steps."""
    target, expected = pair[0], alone(pair[0])
    draw = random.Random(f"{method} {draft}")
    engine = sd.Engine(target, pair[1] if draft == "model" else draft, method=method, max_batch_size=3, page_size=4)
    core, requests, ids, cancelled, sizes = engine.core, requests_of(engine), {}, set(), set()
    to_come = list(requests)
    while to_come or core.has_work:
        for _ in range(draw.choice([0, 0, 1, 2])):
            if to_come:
                request = to_come.pop(0)
                ids[request.index] = core.add(request)
        unfinished = [r for r in requests if r.index in ids and r.finish_reason is None and r.index not in cancelled]
        if unfinished and len(cancelled) < 3 and draw.random() < 0.4:
            index = draw.choice(unfinished).index
            assert core.cancel(ids[index])
            cancelled.add(index)
        for output in core.step():
            assert output.request.index not in cancelled
            assert output.finish_reason == output.request.finish_reason
        sizes.add(core.pool.num_pages if core.pool else 0)
    for request in requests:
        tokens, logprobs = expected[request.index]
        count = len(request.emitted_ids)
        assert request.emitted_ids == tokens[:count]
        assert request.logprobs == logprobs[:count]
        assert request.index in cancelled or count == len(tokens)
    assert cancelled
    assert len(sizes - {0}) > 1, "no pool grew"
    assert vacant(engine)


def test_a_pool_grows_under_running_sequences(pair):
    """Sequences keep their KV entries, in the target's pool and in the draft model's."""
    engine = sd.Engine(*pair, max_batch_size=4, page_size=4)
    expected = alone(pair[0])
    short, *long = sorted(requests_of(engine), key=lambda request: request.max_length)
    core = engine.core
    core.add(long[0])
    core.step()
    before = core.pool
    assert before.num_pages == before.num_pages_for(long[0].max_length - 1)
    for request in (*long[1:], short):
        core.add(request)
    assert core.pool is before, "a pool grows in a step"
    core.step()
    assert core.pool.num_pages > before.num_pages
    assert engine.drafter.pool.num_pages == core.pool.num_pages
    drain(core)
    for request in (short, *long):
        assert (request.emitted_ids, request.logprobs) == expected[request.index]


def test_requests_wait_if_there_is_no_memory_for_a_larger_pool(pair, monkeypatch):
    engine = sd.Engine(*pair, max_batch_size=4)
    core, (first, second, *_) = engine.core, requests_of(engine)
    expected = alone(pair[0])
    core.add(first)
    core.step()
    before, made = core.pool, []
    original = PagePool.__init__

    def limited(self, layout, num_tokens, *rest):
        made.append(num_tokens)
        if core.resident:
            raise sd.KVCacheAllocationError("none left")
        original(self, layout, num_tokens, *rest)

    monkeypatch.setattr(PagePool, "__init__", limited)
    core.add(second)
    while first.finish_reason is None:
        core.step()
        assert core.pool is before
        assert second.target_kv_length == 0
    assert made
    drain(core)
    assert [r.emitted_ids for r in (first, second)] == [tokens for tokens, _ in expected[:2]]


def test_pages_of_a_cancelled_request_are_free_after_the_next_step(pair, overlap):
    engine = sd.Engine(*pair, max_batch_size=2)
    core = engine.core
    ids = [core.add(request_of(engine, i, [5 + i, 6], max_new_tokens=100)) for i in range(3)]
    core.step()
    assert core.cancel(ids[2]), "it waits"
    assert core.cancel(ids[0]), "it is resident"
    assert not core.cancel(ids[0]), "it has been cancelled before"
    assert {output.request.request_id for output in core.step()} == {ids[1]}
    assert len(core.resident) == 1
    assert core.cancel(ids[1])
    core.step()
    assert not core.has_work
    assert vacant(engine)
    assert core.step() == []
    assert not core.cancel(12345)


def test_a_request_larger_than_the_pool_is_refused_at_once(pair):
    core = sd.Engine(*pair, kv_cache_tokens=64).core
    with pytest.raises(sd.KVCacheTooSmallError, match=r"needs 66 KV positions .*whole pool has 64; raise"):
        core.add(request_of(core, 0, [1, 2], max_new_tokens=65))
    assert not core.has_work


def test_a_pool_of_fixed_size_does_not_grow(pair):
    engine = sd.Engine(*pair, kv_cache_tokens=64, max_batch_size=8)
    expected = alone(pair[0])
    core = engine.core
    requests = requests_of(engine)
    for request in requests:
        core.add(request)
        core.step()
        assert core.pool.num_tokens == 64
    drain(core)
    assert [r.emitted_ids for r in requests] == [tokens for tokens, _ in expected]


def test_generate_is_refused_while_the_core_has_requests(pair):
    engine = sd.Engine(*pair)
    request = request_of(engine, 0, [1, 2, 3])
    engine.core.add(request)
    with pytest.raises(sd.EngineBusyError, match=r"step\(\) until core.has_work is False, or core.cancel_all"):
        engine.generate([[4]])
    drain(engine.core)
    assert len(request.emitted_ids) == 12
    assert engine.generate([[4]], sd.SamplingParams(max_new_tokens=2))[0].error is None


class Observing(Drafter):
    """Proposes tokens around the expected ones, and records every StepResult."""

    name = "observing"

    def __init__(self, expected):
        self.expected, self.seen = expected, []

    def propose(self, sequences, limits):
        """Propose two right tokens and a wrong one for the first sequence, nothing for the second."""
        sequence = sequences[0]
        start = len(sequence.emitted_ids)
        right = self.expected[start : start + 2] if limits[0] >= 3 else []
        tokens = [*right, (self.expected[start + 2] + 1) % VOCAB_SIZE] if right else []
        self.counts = [len(tokens)] + [0] * (len(limits) - 1)
        return Draft(torch.tensor(tokens, dtype=torch.int64), self.counts)

    def commit(self, sequences, result):
        self.seen.append(([s.index for s in sequences], result.accepted_rows, result.hidden_states))


def test_a_drafter_learns_which_rows_were_accepted(pair):
    params = sd.SamplingParams(max_new_tokens=9, ignore_eos=True)
    prompts = [[1, 2, 3], [7, 8]]
    expected = [o.token_ids for o in sd.generate(pair[0], None, prompts, params)]
    drafter = Observing(expected[0])
    outputs = sd.Engine(pair[0], drafter, max_batch_size=2, num_draft_tokens=3).generate(prompts, params)
    assert [o.token_ids for o in outputs] == expected
    first, second = drafter.seen[0], drafter.seen[1]
    assert first == ([0, 1], [range(3), range(4, 5)], None), "rows 0 to 3 are the first sequence's, row 3 was rejected"
    assert second == first


def test_nothing_of_a_finished_step_is_kept_while_the_next_one_is_launched(pair, monkeypatch):
    """Its logits and hidden states are large."""
    monkeypatch.setattr(EngineCore, "launches_ahead", True)
    engine = sd.Engine(*pair, max_batch_size=4)
    core = engine.core
    for request in requests_of(engine)[:2]:
        core.add(request)
    verify_step, launched = engine.target.verify_step, []

    def watched(*args, **keywords):
        assert all(verification() is None for verification in launched)
        verification = verify_step(*args, **keywords)
        launched.append(weakref.ref(verification))
        return verification

    monkeypatch.setattr(engine.target, "verify_step", watched)
    drain(core)
    assert len(launched) > 3
