"""Texts of the asynchronous engine, on the bundled pair: encoded and decoded in threads of their own."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from threading import Thread

import pytest

import specdec_fast as sd
from specdec_fast.engine.output import ChunkMaker
from specdec_fast.service import worker
from support.programs import needs_programs

STOPS = [(), (".",), ("the", "a "), ("\n",)]


@pytest.fixture(scope="module")
def engine(target, draft, tokenizer):
    engine = sd.AsyncEngine(target, draft, max_batch_size=4, tokenizer=tokenizer)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def requests(prompts):
    return [(prompt, sd.SamplingParams(max_new_tokens=30, stop=STOPS[i % 4])) for i, prompt in enumerate(prompts[:12])]


@pytest.fixture(scope="module")
def whole(engine, requests):
    return engine.engine.generate([prompt for prompt, _ in requests], [params for _, params in requests])


async def texts_of(engine, requests):
    """Stream and generate every prompt at the same time; return both texts and reasons of each."""

    async def streamed(prompt, params):
        chunks = [chunk async for chunk in engine.stream(prompt, params)]
        return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason

    async def generated(prompt, params):
        output = await engine.generate(prompt, params)
        return output.text, output.finish_reason

    found = await asyncio.gather(*(f(*request) for request in requests for f in (streamed, generated)))
    return list(zip(found[::2], found[1::2], strict=True))


def test_texts_equal_those_of_the_engine(engine, requests, whole):
    for output, found in zip(whole, asyncio.run(texts_of(engine, requests)), strict=True):
        assert found == ((output.text, output.finish_reason),) * 2


def test_texts_of_threads_that_read_streams(engine, requests, whole):
    """A thread reads what the steps of another one have emitted."""
    found = {}

    def read(i):
        prompt, params = requests[i]
        chunks = list(engine.engine.stream([prompt], params))
        found[i] = "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason

    threads = [Thread(target=read, args=(i,)) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(requests))] == [(output.text, output.finish_reason) for output in whole]


@needs_programs
def test_texts_are_made_while_the_model_verifies(engine, requests, whole, monkeypatch):
    """Before that, the model's thread would have to wait for Python's lock again and again."""
    target, seen = engine.engine.target, []
    assert target.has_fused_step

    def noted(name, run, *args):
        seen.append((name, target.verifies.is_set()))
        return run(*args)

    for model, name in ((target, "verify"), (engine.engine.drafter.model, "draft")):
        monkeypatch.setattr(model.program, name, partial(noted, name, getattr(model.program, name)))
    monkeypatch.setattr(worker, "_MOST_SECONDS_HELD", 600)  # what is not released in time, hangs
    for output, found in zip(whole, asyncio.run(texts_of(engine, requests)), strict=True):
        assert found == ((output.text, output.finish_reason),) * 2
    assert set(seen) == {("draft", False), ("verify", True)}
    assert target.verifies.is_set()


class Broken:
    """A tokenizer that cannot decode more than three tokens."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __call__(self, text):
        return self._tokenizer(text)

    def decode(self, ids, **options):
        if len(ids) > 3:
            raise ZeroDivisionError("by chance")
        return self._tokenizer.decode(ids, **options)


def test_a_tokenizer_that_fails_ends_a_request_with_its_tokens(target, draft, tokenizer, requests, whole):
    engine = sd.AsyncEngine(target, draft, tokenizer=Broken(tokenizer))
    prompt, params = requests[0]

    async def main():
        async with engine:
            chunks = [chunk async for chunk in engine.stream(prompt, params)]
            return chunks, await engine.generate(prompt, params)

    chunks, output = asyncio.run(main())
    assert isinstance(output.error, sd.DetokenizationError)
    assert isinstance(chunks[-1].error, sd.DetokenizationError)
    assert [token for chunk in chunks for token in chunk.token_ids] == output.token_ids == whole[0].token_ids


async def last_chunk(stream):
    async for chunk in stream:
        last = chunk
    return last


@pytest.mark.parametrize("name", ["make", "output_of"])
def test_a_text_that_cannot_be_made_ends_its_request_only(engine, requests, whole, monkeypatch, name):
    """The writer fails for one request, which it finds by its prompt."""
    owner = ChunkMaker if name == "make" else sys.modules["specdec_fast.service.requests"]
    original = getattr(owner, name)

    def failing(*args):
        sequence = args[0] if name == "output_of" else args[1].request
        is_first = sequence.token_ids[: sequence.prompt_length] == whole[0].prompt_ids
        if is_first and sequence.finish_reason is not None and args[-1] is not None:
            raise ZeroDivisionError("by chance")
        return original(*args)

    monkeypatch.setattr(owner, name, failing)

    async def main():
        if name == "output_of":
            return await asyncio.gather(*(engine.generate(*request) for request in requests[:4]))
        return await asyncio.gather(*(last_chunk(engine.stream(*request)) for request in requests[:4]))

    first, *others = asyncio.run(main())
    assert first.finish_reason == "error"
    assert isinstance(first.error, sd.StepError)
    assert isinstance(first.error.__cause__, ZeroDivisionError)
    assert [one.finish_reason for one in others] == [output.finish_reason for output in whole[1:4]]
    assert not len(engine._live)
