"""Several texts of one prompt: one encoding, one prefill, one id; accepted, refused and cancelled together."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

import specdec_fast as sd
from support.services import MANY, Gate, num_served, until, vacant

PROMPT = [7, 1, 8, 2] * 10 + [3]
SAMPLED = sd.SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.9, seed=5, logprobs=1, n=3)


def fields_of(output):
    return output.choice, output.token_ids, output.logprobs, output.top_logprobs, output.seed, output.finish_reason


@pytest.mark.parametrize("at_once", [True, False], ids=["in one step", "as they come"])
def test_the_texts_are_those_of_an_engine_and_share_one_prefill(pair, monkeypatch, at_once):
    expected = sd.Engine(pair[0], None, max_batch_size=1).generate([PROMPT], SAMPLED)
    engine = sd.AsyncEngine(*pair, page_size=4)
    gate = Gate(monkeypatch, engine)

    async def main():
        async with engine:
            if not at_once:
                gate.open()
            texts = asyncio.create_task(engine.generate_choices(PROMPT, SAMPLED))
            if at_once:
                await until(lambda: num_served(engine) == 3)
                gate.open()
            return await texts

    outputs = asyncio.run(main())
    assert [fields_of(output) for output in outputs] == [fields_of(output) for output in expected]
    assert [output.num_cached_tokens for output in outputs] == [0, 40, 40], "all pages but the last"
    assert vacant(engine)


def test_a_stream_has_the_chunks_of_every_text(pair):
    expected = sd.Engine(pair[0], None, max_batch_size=1).generate([PROMPT], SAMPLED)
    engine = sd.AsyncEngine(*pair)

    async def main():
        async with engine:
            stream = engine.stream(PROMPT, SAMPLED)
            chunks = [chunk async for chunk in stream]
            assert stream.prompt_ids == PROMPT
            return chunks

    chunks = asyncio.run(main())
    assert all(chunk.index == 0 for chunk in chunks)
    for output in expected:
        own = [chunk for chunk in chunks if chunk.choice == output.choice]
        assert [token for chunk in own for token in chunk.token_ids] == output.token_ids
        assert [value for chunk in own for value in chunk.logprobs] == output.logprobs
        assert [chunk.finish_reason for chunk in own][-1:] == ["length"]
        assert all(chunk.finish_reason is None for chunk in own[:-1])


def test_a_reader_that_is_late_gets_one_chunk_of_every_text(pair):
    engine = sd.AsyncEngine(*pair)

    async def main():
        async with engine:
            stream = engine.stream(PROMPT, SAMPLED)
            await until(lambda: engine.stats().decoding.num_emitted_tokens == 36)
            await until(lambda: not engine._live)
            return [chunk async for chunk in stream]

    chunks = asyncio.run(main())
    assert sorted((chunk.choice, len(chunk.token_ids)) for chunk in chunks) == [(0, 12), (1, 12), (2, 12)]


@pytest.mark.parametrize("how", ["cancel", "aclose"])
def test_all_texts_end_together(pair, monkeypatch, how):
    engine = sd.AsyncEngine(*pair)
    gate = Gate(monkeypatch, engine)

    async def main():
        async with engine:
            stream = engine.stream(PROMPT, replace(MANY, n=3), request_id="mine")
            await until(lambda: num_served(engine) == 3)
            with pytest.raises(sd.ConfigError, match="request_id='mine' belongs to a request"):
                engine.stream(PROMPT, MANY, request_id="mine")
            if how == "cancel":
                assert engine.cancel("mine")
                gate.open()
                errors = [chunk.error async for chunk in stream if chunk.finish_reason is not None]
                assert [type(error) for error in errors] == [sd.RequestCancelledError] * 3
            else:
                await stream.aclose()
                gate.open()
            assert not engine.cancel("mine")

    asyncio.run(main())
    assert vacant(engine)


def test_limits_count_every_text(pair, monkeypatch):
    engine = sd.AsyncEngine(*pair, max_batch_size=1, window_size=1, max_waiting=2, kv_token_budget=300)
    gate = Gate(monkeypatch, engine)

    async def main():
        async with engine:
            with pytest.raises(sd.InvalidParamsError, match="n=4: at most 3 texts"):
                engine.stream([1], replace(MANY, n=4))
            with pytest.raises(sd.KVCacheTooSmallError, match="needs 303 KV positions"):
                await engine.generate_choices([1] * 12, replace(MANY, n=3))
            with pytest.raises(sd.PromptTooLongError):
                await engine.generate_choices([1] * 5000, replace(MANY, n=2))
            stream = engine.stream([1], replace(MANY, n=2))
            with pytest.raises(sd.EngineOverloadedError, match="2 requests are running or waiting, the limit is 3"):
                engine.stream([2], replace(MANY, n=2))
            with pytest.raises(sd.InvalidParamsError, match="n=2: generate returns one text; use generate_choices"):
                await engine.generate([1], replace(MANY, n=2))
            gate.open()
            chunks = [chunk async for chunk in stream]
            assert sum(len(chunk.token_ids) for chunk in chunks) == 180
            assert len(await engine.generate_choices([2], replace(MANY, n=3))) == 3, "all limits are free again"

    asyncio.run(main())
    assert vacant(engine)
