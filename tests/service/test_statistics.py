"""What the asynchronous engine counts: requests now, tokens and drafts so far, and the times of each request."""

from __future__ import annotations

import asyncio
import itertools

import pytest

import specdec_fast as sd
from support.services import MANY, SOME_STEPS, Gate, num_served, read, until


def test_counts_are_those_of_the_outputs_and_never_decrease(pair, requests):
    engine = sd.AsyncEngine(*pair, max_batch_size=3)
    seen = []

    async def generate(request):
        output = await engine.generate(*request)
        seen.append(engine.stats())
        return output

    async def main():
        async with engine:
            return await asyncio.gather(*map(generate, requests))

    outputs = asyncio.run(main())
    expected = sd.DecodingStats()
    for output in outputs:
        expected.add(output.stats)
    stats = engine.stats()
    assert stats.decoding == expected
    assert stats.num_prompt_tokens == sum(len(output.prompt_ids) for output in outputs)
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    for earlier, later in itertools.pairwise(seen):
        assert earlier.num_prompt_tokens <= later.num_prompt_tokens
        assert earlier.decoding.num_draft_tokens <= later.decoding.num_draft_tokens
        assert earlier.decoding.num_emitted_tokens <= later.decoding.num_emitted_tokens


def test_running_and_waiting_requests_are_counted_now(pair, monkeypatch):
    engine = sd.AsyncEngine(*pair, max_batch_size=1, window_size=1, num_draft_tokens=0)
    gate = Gate(monkeypatch, engine)

    async def main():
        async with engine:
            streams = [engine.stream([i + 1, 5], MANY) for i in range(3)]
            await until(lambda: num_served(engine) == 3)
            gate.permits.release(SOME_STEPS)
            await anext(aiter(streams[0]))
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting) == (1, 2)
            assert 0 < stats.kv_usage <= 1
            assert stats.decoding.num_emitted_tokens >= 1, "tokens count before a request has ended"
            assert stats.num_prompt_tokens == 2
            assert streams[0].prompt_ids == [1, 5]
            gate.open()
            await asyncio.gather(*map(read, streams))

    asyncio.run(main())
    assert engine.stats().num_prompt_tokens == 6


def test_an_observer_that_raises_is_logged_and_harms_no_request(pair, caplog):
    engine, records = sd.AsyncEngine(*pair, max_batch_size=4), []

    def fails(record):
        raise ValueError("the observer is broken")

    engine.add_observer(fails)
    engine.add_observer(records.append)

    async def main():
        async with engine:
            tasks = [engine.generate([i + 1], MANY) for i in range(6)]
            outputs = await asyncio.gather(*tasks)
            dropped = engine.stream([4, 5], MANY)
            await anext(aiter(dropped))
            await dropped.aclose()
            return outputs

    assert [len(output.token_ids) for output in asyncio.run(main())] == [90] * 6
    assert len(records) == 7, "the other observers see every request"
    assert caplog.text.count("ValueError: the observer is broken") == 7


def test_an_observer_is_a_function(pair):
    with pytest.raises(sd.ConfigError, match=r"observer is a str; expected a function"):
        sd.AsyncEngine(*pair).add_observer("log")


def test_every_request_that_was_served_is_recorded_once(pair, monkeypatch):
    engine, records = sd.AsyncEngine(*pair, num_draft_tokens=0, max_batch_size=2, window_size=2), []
    engine.add_observer(records.append)
    gate = Gate(monkeypatch, engine)
    params = sd.SamplingParams(max_new_tokens=60, ignore_eos=True)

    async def main():
        async with engine:
            ended = asyncio.create_task(engine.generate([1, 2, 3], params))
            dropped = engine.stream([4, 5], MANY)
            failed = engine.stream([6], MANY, request_id="cancelled")
            await until(lambda: num_served(engine) == 3)
            gate.permits.release(SOME_STEPS)
            await anext(aiter(dropped))
            await dropped.aclose()
            engine.cancel("cancelled")
            gate.open()
            await ended
            await read(failed)
            with pytest.raises(sd.InvalidPromptError):
                await engine.generate([])

    asyncio.run(main())
    by_reason = {record.finish_reason: record for record in records}
    assert len(records) == 3
    assert by_reason.keys() == {"length", "abort", "error"}
    for record, prompt in (("length", 3), ("abort", 2), ("error", 1)):
        assert by_reason[record].num_prompt_tokens == prompt
    record = by_reason["length"]
    assert record.num_emitted_tokens == 60
    assert 0 <= record.queue_seconds <= record.first_token_seconds <= record.seconds
    assert 1 <= by_reason["abort"].num_emitted_tokens < 90
    error = by_reason["error"]
    assert (error.first_token_seconds is None) == (error.num_emitted_tokens == 0)
