"""The asynchronous engine: requests come and go, and each is served as if it were alone."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import traceback
from dataclasses import replace
from threading import Thread

import pytest

import specdec_fast as sd
from specdec_fast.engine.core import EngineCore
from specdec_fast.service.receivers import Mailbox
from support.forks import in_a_fork
from support.grids import each_value_once
from support.services import MANY, NUM_REQUESTS, Gate, num_served, read, until, vacant


@each_value_once
@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize(("draft", "method"), [("model", "exspec"), ("ngram", "eqspec")])
def test_requests_that_come_and_go_are_served_as_if_alone(pair, requests, expected, monkeypatch, ahead, draft, method):
    """Some are cancelled by their id, some by cancelling the task, some streams are abandoned."""
    monkeypatch.setattr(EngineCore, "launches_ahead", ahead)
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
                engine.cancel(f"number {i}")  # unless it has ended meanwhile
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


def test_a_call_of_the_engine_beneath_goes_on_when_the_service_has_nothing_left(pair, monkeypatch):
    """The worker runs the steps for both, and its only request ends first."""
    engine, outputs = sd.AsyncEngine(*pair), []
    gate = Gate(monkeypatch, engine)

    def call():
        outputs.extend(engine.engine.generate([[3]], MANY))

    async def main():
        stream = engine.stream([1, 2], replace(MANY, max_new_tokens=3))
        await asyncio.to_thread(gate.is_reached.wait)
        thread = Thread(target=call, daemon=True)
        thread.start()
        await until(lambda: engine.engine.shared._waiting)
        gate.open()
        assert len((await read(stream))[0]) == 3
        await asyncio.to_thread(thread.join)
        await engine.close()

    asyncio.run(main())
    assert [len(output.token_ids) for output in outputs] == [90]


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
            await until(lambda: num_served(engine) == 4)
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


def test_a_model_that_fails_in_a_batch_harms_its_requests_only(pair, requests, expected, monkeypatch):
    engine = sd.AsyncEngine(*pair, max_batch_size=2)
    gate, verify, failed = Gate(monkeypatch, engine), engine.engine.target.verify_step, []

    def fail_once(pool, batch, *args):
        if len(batch) == 2 and not failed:
            failed.extend(batch)
            raise ZeroDivisionError("by chance")
        return verify(pool, batch, *args)

    monkeypatch.setattr(engine.engine.target, "verify_step", fail_once)

    async def main():
        async with engine:
            tasks = [asyncio.create_task(engine.generate(*request)) for request in requests]
            await until(lambda: num_served(engine) == len(requests))
            gate.open()
            return await asyncio.gather(*tasks)

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


@pytest.mark.parametrize("are_encoded", [False, True])
def test_each_request_that_a_closed_engine_ends_has_an_error_of_its_own(pair, are_encoded, monkeypatch):
    """One for all grew by the frames of every task that raised it, and each task's log printed those of all before."""
    engine = sd.AsyncEngine(pair[0], None, max_batch_size=2)
    gate = Gate(monkeypatch, engine)

    async def run():
        tasks = [asyncio.create_task(engine.generate([1, 2, 3 + i], MANY)) for i in range(40)]
        await asyncio.sleep(0)
        if are_encoded:
            await until(lambda: num_served(engine) == 40)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        gate.open()
        await closing
        return await asyncio.gather(*tasks, return_exceptions=True)

    errors = [found if isinstance(found, Exception) else found.error for found in asyncio.run(run())]
    assert all(isinstance(error, sd.RequestCancelledError) for error in errors)
    assert len({id(error) for error in errors}) == 40
    assert max(len(traceback.extract_tb(error.__traceback__)) for error in errors) < 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_an_engine_is_refused_in_a_fork(pair):
    engine = sd.AsyncEngine(*pair)
    params = sd.SamplingParams(max_new_tokens=5)
    before = asyncio.run(engine.generate([1, 2], params)).token_ids
    for call in (lambda: asyncio.run(engine.generate([1, 2], params)), lambda: engine.stream([1, 2], params)):
        assert in_a_fork(call).startswith("ForkedProcessError")
    assert asyncio.run(engine.generate([1, 2], params)).token_ids == before
    asyncio.run(engine.close())
