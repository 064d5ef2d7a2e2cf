"""The asynchronous engine: requests come and go, and each is served as if it were alone."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from threading import Semaphore, Thread
from threading import enumerate as threads

import pytest

import specdec_fast as sd
from specdec_fast.engine.core import EngineCore
from specdec_fast.service.receivers import Mailbox
from support.forks import in_a_fork
from support.models import VOCAB_SIZE, tiny_model, truncated_copy

NUM_REQUESTS = 14
MANY = sd.SamplingParams(max_new_tokens=90, ignore_eos=True)


@pytest.fixture(scope="module")
def pair():
    target = tiny_model("llama")
    return target, truncated_copy(target, 2)


@pytest.fixture(scope="module")
def requests():
    """Greedy and sampled ones, of many lengths, some with a K of their own."""
    draw = random.Random(3)
    return [
        (
            [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 30))],
            sd.SamplingParams(
                max_new_tokens=draw.randint(1, 40),
                ignore_eos=True,
                temperature=0.8 * (i % 2),
                seed=i,
                logprobs=True,
                num_draft_tokens=draw.choice([None, 0, 2]),
            ),
        )
        for i in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module")
def expected(pair, requests):
    """What plain decoding makes of each request by itself."""
    engine = sd.Engine(pair[0], None, max_batch_size=1)
    outputs = [engine.generate([prompt], [params])[0] for prompt, params in requests]
    return [(output.token_ids, output.logprobs) for output in outputs]


def vacant(engine):
    core, pool = engine.engine.core, getattr(engine.engine.drafter, "pool", None)
    return not core.has_work and core.pool.is_vacant and (pool is None or pool.is_vacant)


class Gate:
    """Lets steps through one at a time, and notes how many came."""

    def __init__(self, monkeypatch, engine):
        self.permits, self.num_steps, core = Semaphore(0), 0, engine.engine.core
        step = core.step

        def gated():
            assert self.permits.acquire(timeout=3600)
            self.num_steps += 1
            return step()

        monkeypatch.setattr(core, "step", gated)

    def open(self):
        self.permits.release(10**6)


async def read(stream, most=10**6):
    """Return the tokens, log-probabilities and last chunk of a stream, of which ``most`` chunks are read."""
    tokens, logprobs, chunk = [], [], None
    async for chunk in stream:
        tokens += chunk.token_ids
        logprobs += chunk.logprobs or []
        most -= 1
        if not most:
            break
    return tokens, logprobs, chunk


@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize(("draft", "method"), [("model", "exspec"), ("ngram", "eqspec")])
def test_requests_that_come_and_go_are_served_as_if_alone(pair, requests, expected, monkeypatch, ahead, draft, method):
    """Some are cancelled by their id, some by cancelling the task, some streams are abandoned."""
    monkeypatch.setattr(EngineCore, "_overlap", ahead)
    draw = random.Random(f"{draft} {method}")
    engine = sd.AsyncEngine(
        pair[0],
        pair[1] if draft == "model" else draft,
        method=method,
        max_batch_size=3,
        page_size=4,
        max_prefill_tokens=8,
    )

    async def serve(i):
        prompt, params = requests[i]
        for _ in range(draw.randrange(30)):
            await asyncio.sleep(0)
        kind = i % 5
        if kind == 0:
            output = await engine.generate(prompt, params)
            assert (output.token_ids, output.logprobs) == expected[i]
            return
        stream = engine.stream(prompt, params, request_id=f"number {i}")
        if kind == 1:
            found = await read(stream, draw.randint(1, 3))
        elif kind == 2:
            found = await read(stream, 1)
            if found[2].finish_reason is None:
                assert engine.cancel(f"number {i}")
                rest = await read(stream)
                assert rest[2].finish_reason == "length" or isinstance(rest[2].error, sd.RequestCancelledError)
                found = found[0] + rest[0], found[1] + rest[1], rest[2]
        elif kind == 3:
            task = asyncio.create_task(read(stream))
            for _ in range(draw.randrange(20)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        else:
            found = await read(stream)
            assert found[2].finish_reason == "length"
            assert found[:2] == expected[i]
        assert found[0] == expected[i][0][: len(found[0])]
        assert found[1] == expected[i][1][: len(found[1])]
        assert len(found[0]) == len(found[1])

    async def main():
        async with engine:
            await asyncio.gather(*map(serve, range(NUM_REQUESTS)))
            gc.collect()
            output = await engine.generate(*requests[0])
            assert (output.token_ids, output.logprobs) == expected[0], "it serves after all of that"

    asyncio.run(main())
    assert vacant(engine)


def test_event_loops_and_threads_share_an_engine(pair, requests, expected):
    """Three loops stream, and the engine beneath is called meanwhile."""
    engine, found = sd.AsyncEngine(*pair, max_batch_size=4), {}

    def loop(numbers):
        async def main():
            return await asyncio.gather(*(read(engine.stream(*requests[i])) for i in numbers))

        found.update(zip(numbers, asyncio.run(main()), strict=True))

    loops = [Thread(target=loop, args=(range(start, NUM_REQUESTS, 3),)) for start in range(3)]
    for thread in loops:
        thread.start()
    outputs = engine.engine.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    for thread in loops:
        thread.join()
    assert [(output.token_ids, output.logprobs) for output in outputs] == expected
    assert [found[i][:2] for i in range(NUM_REQUESTS)] == expected
    assert vacant(engine)
    asyncio.run(engine.close())


def test_a_step_calls_each_loop_back_once(pair, monkeypatch):
    engine, posts = sd.AsyncEngine(*pair, max_batch_size=4), []
    gate, post = Gate(monkeypatch, engine), Mailbox.post

    def counted(self, loop, items):
        posts.append(len(items))
        return post(self, loop, items)

    monkeypatch.setattr(Mailbox, "post", counted)

    async def main():
        async with engine:
            streams = [engine.stream([i + 1], MANY) for i in range(4)]
            gate.open()
            await asyncio.gather(*map(read, streams))

    asyncio.run(main())
    assert len(posts) <= gate.num_steps
    assert sum(posts) > 2 * len(posts), "most steps serve several streams"


def test_a_slow_reader_gets_what_came_as_one_chunk(pair):
    engine = sd.AsyncEngine(*pair, num_draft_tokens=0)
    params = sd.SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=True)

    async def main():
        async with engine:
            stream = engine.stream([1, 2], params)
            await engine.generate([3], MANY)
            return [chunk async for chunk in stream]

    (chunk,) = asyncio.run(main())
    output = engine.engine.generate([[1, 2]], params)[0]
    assert (chunk.token_ids, chunk.logprobs, chunk.finish_reason) == (output.token_ids, output.logprobs, "length")


def test_an_abandoned_stream_frees_its_pages_within_a_step(pair, monkeypatch):
    engine = sd.AsyncEngine(*pair, num_draft_tokens=0)
    gate = Gate(monkeypatch, engine)

    async def main():
        gate.permits.release()
        stream = engine.stream([1, 2], MANY)
        async for _ in stream:
            break
        assert not engine.engine.core.pool.is_vacant
        del stream
        gate.open()
        await engine.close(finish_within=3600)

    asyncio.run(main())
    assert gate.num_steps <= 3, "the one that was under way, and one that finds nothing to do"
    assert vacant(engine)


def test_a_full_queue_refuses_at_once(pair, monkeypatch):
    engine = sd.AsyncEngine(*pair, max_batch_size=1, window_size=1, max_waiting=1)
    gate = Gate(monkeypatch, engine)

    async def main():
        async with engine:
            streams = [engine.stream([i + 1], MANY) for i in range(2)]
            with pytest.raises(sd.EngineOverloadedError, match=r"2 requests are running or waiting, .* may be 2"):
                engine.stream([3], MANY)
            with pytest.raises(sd.EngineOverloadedError):
                await engine.generate([3], MANY)
            gate.open()
            assert [len((await read(stream))[0]) for stream in streams] == [90, 90]
            assert len((await engine.generate([3], MANY)).token_ids) == 90

    asyncio.run(main())
    assert vacant(engine)


def test_a_kv_budget_refuses_what_exceeds_it(pair, monkeypatch):
    engine = sd.AsyncEngine(*pair, kv_token_budget=200)
    gate = Gate(monkeypatch, engine)

    async def main():
        async with engine:
            streams = [engine.stream([i + 1], MANY) for i in range(2)]
            with pytest.raises(sd.EngineOverloadedError, match=r"needs 90 KV positions .* need 180, .*budget=200"):
                await engine.generate([3], MANY)
            gate.open()
            assert [len((await read(stream))[0]) for stream in streams] == [90, 90]
            assert len((await engine.generate([3], MANY)).token_ids) == 90, "the budget is free again"

    asyncio.run(main())


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_deadline_ends_a_request_and_keeps_its_tokens(pair, monkeypatch, is_stream):
    engine = sd.AsyncEngine(*pair, num_draft_tokens=0)
    gate, now = Gate(monkeypatch, engine), [1000.0]
    for module in ("async_engine", "worker"):
        monkeypatch.setattr(f"specdec_fast.service.{module}.monotonic", lambda: now[0])

    async def main():
        async with engine:
            other = engine.stream([7], MANY)
            gate.permits.release(2)
            await anext(aiter(other))
            late = engine.stream([1, 2], MANY, timeout=5.0) if is_stream else None
            task = asyncio.create_task(read(late) if is_stream else engine.generate([1, 2], MANY, timeout=5.0))
            while not any(request.deadline for request in engine._worker._served.values()):
                await asyncio.sleep(0)
            gate.permits.release(4)
            while gate.num_steps < 6:  # chunks that are not read are merged, so they do not count steps
                await asyncio.sleep(0)
            now[0] += 10.0
            gate.open()
            return await task, await read(other)

    late, other = asyncio.run(main())
    tokens, last = (late[0], late[2]) if is_stream else (late.token_ids, late)
    assert last.finish_reason == "error"
    assert isinstance(last.error, sd.DeadlineExceededError)
    assert isinstance(last.error, TimeoutError)
    assert len(tokens) < 90
    assert tokens == engine.engine.generate([[1, 2]], MANY)[0].token_ids[: len(tokens)]
    assert other[2].finish_reason == "length"
    assert vacant(engine)


def own_threads():
    return [thread.name for thread in threads() if thread.name.startswith("specdec_fast")]


@pytest.mark.parametrize("finish_within", [0.0, 3600.0])
def test_closing_cancels_or_finishes(pair, monkeypatch, finish_within):
    engine = sd.AsyncEngine(*pair, max_batch_size=2, num_draft_tokens=0)
    gate = Gate(monkeypatch, engine)

    async def main():
        tasks = [asyncio.create_task(engine.generate([i + 1], MANY)) for i in range(6)]
        streams = [engine.stream([i + 7], MANY) for i in range(2)]
        gate.permits.release(3)
        await anext(aiter(streams[0])) if finish_within else await asyncio.sleep(0)
        gate.open()
        await engine.close(finish_within)
        with pytest.raises(sd.EngineClosedError):
            await engine.generate([1], MANY)
        with pytest.raises(sd.EngineClosedError):
            engine.stream([1], MANY)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        return [*found, *(await asyncio.gather(*map(read, streams), return_exceptions=True))]

    before = own_threads()
    found = asyncio.run(main())
    for one in found:
        last = one[2] if isinstance(one, tuple) else one
        if finish_within:
            assert last.finish_reason == "length"
        else:  # what was not even encoded is raised
            assert isinstance(last if isinstance(last, Exception) else last.error, sd.RequestCancelledError)
    assert own_threads() == before
    assert vacant(engine) if engine.engine.core.pool else not engine.engine.core.has_work


def test_a_model_that_fails_in_a_batch_harms_its_requests_only(pair, requests, expected, monkeypatch):
    engine = sd.AsyncEngine(*pair, max_batch_size=2)
    verify, failed = engine.engine.target.verify_step, []

    def fail_once(pool, batch, *args):
        if len(batch) == 2 and not failed:
            failed.extend(batch)
            raise ZeroDivisionError("by chance")
        return verify(pool, batch, *args)

    monkeypatch.setattr(engine.engine.target, "verify_step", fail_once)

    async def main():
        async with engine:
            return await asyncio.gather(*(engine.generate(*request) for request in requests))

    outputs = asyncio.run(main())
    with_errors = [output for output in outputs if output.error is not None]
    assert len(with_errors) == 2
    for output, (tokens, logprobs) in zip(outputs, expected, strict=True):
        if output.error is None:
            assert (output.token_ids, output.logprobs) == (tokens, logprobs)
        else:
            assert isinstance(output.error, sd.StepError)
            assert isinstance(output.error.__cause__, ZeroDivisionError)
            assert output.token_ids == tokens[: len(output.token_ids)]
    assert vacant(engine)


def test_what_is_wrong_with_a_request_is_raised(pair):
    engine = sd.AsyncEngine(*pair, kv_cache_tokens=64, num_draft_tokens=3)

    async def main():
        async with engine:
            fine = asyncio.create_task(engine.generate([1, 2], sd.SamplingParams(max_new_tokens=9, ignore_eos=True)))
            for prompt, kind in (([], sd.InvalidPromptError), ([10**6], sd.InvalidPromptError), (5, sd.ConfigError),
                                 ([[1], [2]], sd.ConfigError), ("text", sd.InvalidPromptError)):  # fmt: skip
                with pytest.raises(kind):
                    await engine.generate(prompt)
                with pytest.raises(kind):
                    await read(engine.stream(prompt))
            for params, kind in ((MANY, sd.KVCacheTooSmallError),
                                 (sd.SamplingParams(num_draft_tokens=4), sd.TooManyDraftTokensError)):  # fmt: skip
                with pytest.raises(kind):
                    await engine.generate([1], params)
            with pytest.raises(sd.InvalidParamsError):
                engine.stream([1], params=5)
            for keywords in ({"timeout": 0}, {"timeout": float("nan")}, {"timeout": "1"}, {"request_id": 5}):
                with pytest.raises(sd.ConfigError, match=next(iter(keywords))):
                    engine.stream([1], **keywords)
            stream = engine.stream([1], sd.SamplingParams(max_new_tokens=30), request_id="twice")
            with pytest.raises(sd.ConfigError, match=r"request_id='twice' belongs to a request"):
                engine.stream([1], request_id="twice")
            await stream.aclose()
            assert [chunk async for chunk in stream] == []
            assert not engine.cancel("twice")
            assert not engine.cancel("nobody")
            assert len((await fine).token_ids) == 9
            assert not len(engine._live)

    asyncio.run(main())
    assert vacant(engine)


@pytest.mark.parametrize("limits", [{"max_waiting": -1}, {"max_waiting": 1.5}, {"kv_token_budget": 0}], ids=str)
def test_limits_are_checked(pair, limits):
    with pytest.raises(sd.ConfigError, match=r"expected an integer >="):
        sd.AsyncEngine(*pair, **limits)


def test_requests_of_a_loop_that_was_closed_are_dropped(pair):
    engine = sd.AsyncEngine(*pair, num_draft_tokens=0)

    async def begin():
        stream = engine.stream([1, 2], MANY)
        await anext(aiter(stream))
        return stream

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(begin())
    loop.close()
    output = asyncio.run(engine.generate([5], MANY))
    assert len(output.token_ids) == 90
    asyncio.run(engine.close())
    assert vacant(engine)
    assert stream.request_id == "request-1"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_an_engine_is_refused_in_a_fork(pair):
    engine = sd.AsyncEngine(*pair)
    params = sd.SamplingParams(max_new_tokens=5)
    before = asyncio.run(engine.generate([1, 2], params)).token_ids
    for call in (lambda: asyncio.run(engine.generate([1, 2], params)), lambda: engine.stream([1, 2], params)):
        assert in_a_fork(call).startswith("ForkedProcessError")
    assert asyncio.run(engine.generate([1, 2], params)).token_ids == before
    asyncio.run(engine.close())
