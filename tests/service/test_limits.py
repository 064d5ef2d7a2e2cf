"""Limits of the asynchronous engine: the queue, the KV budget, deadlines, closing, and what it refuses."""

from __future__ import annotations

import asyncio
from threading import enumerate as threads

import pytest

import specdec_fast as sd
from support.services import MANY, Gate, read, vacant


def test_a_full_queue_refuses_at_once(pair, monkeypatch):
    engine = sd.AsyncEngine(*pair, max_batch_size=1, window_size=1, max_waiting=1)
    gate = Gate(monkeypatch, engine)

    async def main():
        async with engine:
            streams = [engine.stream([i + 1], MANY) for i in range(2)]
            with pytest.raises(sd.EngineOverloadedError, match=r"2 requests are running or waiting, the limit is 2 "):
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


def test_a_request_beyond_the_whole_kv_budget_is_not_to_be_sent_again(pair):
    engine = sd.AsyncEngine(*pair, kv_token_budget=50)

    async def main():
        async with engine:
            with pytest.raises(sd.KVCacheTooSmallError, match=r"needs 90 KV positions .*budget=50"):
                await engine.generate([3], MANY)
            params = sd.SamplingParams(max_new_tokens=50, ignore_eos=True)
            assert len((await engine.generate([3], params)).token_ids) == 50

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
    return {thread for thread in threads() if thread.name.startswith("specdec_fast")}


@pytest.mark.parametrize("finish_within", [0.0, 3600.0])
def test_closing_cancels_or_finishes(pair, monkeypatch, finish_within):
    engine = sd.AsyncEngine(*pair, max_batch_size=2, num_draft_tokens=0)
    gate = Gate(monkeypatch, engine)

    async def main():
        tasks = [asyncio.create_task(engine.generate([i + 1], MANY)) for i in range(6)]
        streams = [engine.stream([i + 7], MANY) for i in range(2)]
        gate.permits.release(3)
        await anext(aiter(streams[0])) if finish_within else await asyncio.sleep(0)
        closing = asyncio.create_task(engine.close(finish_within))
        await asyncio.sleep(0)  # so that nothing ends before it is being closed
        gate.open()
        await closing
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
    assert own_threads() <= before
    assert vacant(engine) if engine.engine.core.pool else not engine.engine.core.has_work


def test_what_is_wrong_with_a_request_is_raised(pair, monkeypatch):
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
            gate = Gate(monkeypatch, engine)
            stream = engine.stream([1], sd.SamplingParams(max_new_tokens=30), request_id="twice")
            with pytest.raises(sd.ConfigError, match=r"request_id='twice' belongs to a request"):
                engine.stream([1], request_id="twice")
            await stream.aclose()
            gate.open()
            assert [chunk async for chunk in stream] == []
            assert not engine.cancel("twice")
            assert not engine.cancel("nobody")
            assert len((await fine).token_ids) == 9
            assert not len(engine._live)

    asyncio.run(main())
    assert vacant(engine)


def test_a_name_that_is_made_belongs_to_no_other_request(pair, monkeypatch):
    engine = sd.AsyncEngine(*pair)
    gate = Gate(monkeypatch, engine)

    async def main():
        async with engine:
            own = [engine.stream([1], MANY, request_id=f"request-{number}") for number in (1, 2)]
            made = engine.stream([2], MANY)
            assert made.request_id not in [stream.request_id for stream in own]
            gate.open()
            assert [len((await read(stream))[0]) for stream in (*own, made)] == [90, 90, 90]

    asyncio.run(main())


@pytest.mark.parametrize("seconds", [-1, float("nan"), "30", None, True], ids=repr)
def test_a_time_to_close_that_is_none_closes_nothing(pair, seconds):
    engine = sd.AsyncEngine(*pair)

    async def main():
        async with engine:
            with pytest.raises(sd.ConfigError, match=r"finish_within=.*: expected a number of seconds >= 0"):
                await engine.close(finish_within=seconds)
            assert len((await engine.generate([1], sd.SamplingParams(max_new_tokens=3))).token_ids) == 3

    asyncio.run(main())


@pytest.mark.parametrize("limits", [{"max_waiting": -1}, {"max_waiting": 1.5}, {"kv_token_budget": 0}], ids=str)
def test_limits_are_checked(pair, limits):
    with pytest.raises(sd.ConfigError, match=r"expected an integer >="):
        sd.AsyncEngine(*pair, **limits)
