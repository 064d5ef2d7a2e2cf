"""Prompts that take long to encode: short ones pass them, they can be cancelled and late, and closing is not held."""

from __future__ import annotations

import asyncio
from threading import Event
from threading import enumerate as threads
from types import SimpleNamespace

import pytest
import torch

import specdec_fast as sd
from specdec_fast.request.prompt_options import PromptOptions
from specdec_fast.request.prompt_size import SHORT, size_of
from specdec_fast.service import async_engine
from support.services import until

LONG = "a" * (SHORT + 1)
FEW = sd.SamplingParams(max_new_tokens=3, ignore_eos=True)


class Stuck:
    """A tokenizer that encodes any text to two tokens, but long ones only when it may."""

    def __init__(self):
        self.may_encode, self.begun = Event(), []

    def __call__(self, text):
        if len(text) > SHORT:
            self.begun.append(text)
            self.may_encode.wait()
        return SimpleNamespace(input_ids=[1, 2])

    def decode(self, token_ids, **options):
        return "a" * len(token_ids)


@pytest.fixture
def tokenizer():
    tokenizer = Stuck()
    yield tokenizer
    tokenizer.may_encode.set()


@pytest.fixture
def make_engine(pair, tokenizer):
    """Return a function that makes engines with this tokenizer; all are closed when it may encode."""
    engines = []

    def make(**options):
        engines.append(sd.AsyncEngine(*pair, tokenizer=tokenizer, **options))
        return engines[-1]

    yield make
    tokenizer.may_encode.set()
    for engine in engines:
        asyncio.run(engine.close())


def test_short_prompts_pass_long_ones(make_engine, tokenizer):
    engine = make_engine()

    async def main():
        long = [asyncio.create_task(engine.generate(LONG, FEW)) for _ in range(3)]
        await until(lambda: tokenizer.begun)
        short = [await engine.generate(prompt, FEW) for prompt in ("short", [1, 2], [[1, 2]])]
        assert not any(task.done() for task in long)
        assert engine.is_encoding
        tokenizer.may_encode.set()
        return short + await asyncio.gather(*long)

    outputs = asyncio.run(main())
    assert {tuple(output.token_ids) for output in outputs} == {tuple(outputs[0].token_ids)}
    assert not engine.is_encoding


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_request_ends_while_its_prompt_is_encoded_or_waits_for_that(make_engine, tokenizer, how, is_stream):
    engine = make_engine()
    timeout = 0.01 if how == "late" else None

    async def end(name):
        options = {"request_id": name, "timeout": timeout}
        if is_stream:
            stream = engine.stream(LONG, FEW, **options)
            task = asyncio.create_task(anext(aiter(stream)))
        else:
            task = asyncio.create_task(engine.generate(LONG, FEW, **options))
        await until(lambda: tokenizer.begun)
        if how == "cancelled":
            await until(lambda: engine.cancel(name))
        with pytest.raises(sd.RequestCancelledError if how == "cancelled" else sd.DeadlineExceededError):
            await task

    async def main():
        for name in ("is encoded", "waits"):
            await end(name)
        assert not len(engine._live), "their places are free"
        assert len((await engine.generate("short", FEW)).token_ids) == 3
        tokenizer.may_encode.set()
        await until(lambda: not engine.is_encoding)

    asyncio.run(main())
    assert len(tokenizer.begun) == 1, "one that has ended is not encoded any more"
    assert engine.stats().decoding.num_emitted_tokens == 3


def test_closing_does_not_wait_for_prompts(make_engine, tokenizer, monkeypatch):
    monkeypatch.setattr(async_engine, "_ENCODERS_SECONDS", 0.01)
    engine = make_engine(kv_token_budget=10**6)

    async def main():
        tasks = [asyncio.create_task(engine.generate(LONG, FEW)) for _ in range(3)]
        budget = asyncio.create_task(engine.expect_budget([(LONG, FEW, 1)]))
        await until(lambda: tokenizer.begun)
        await engine.close()
        assert not tokenizer.may_encode.is_set()
        return await asyncio.gather(*tasks, return_exceptions=True), await asyncio.gather(
            budget, return_exceptions=True
        )

    found, (counted,) = asyncio.run(main())
    assert [type(error) for error in found] == [sd.RequestCancelledError] * 3
    assert isinstance(counted, sd.EngineClosedError)
    assert len(tokenizer.begun) == 1, "what waits is not encoded any more"


def test_closing_ends_the_threads_of_the_encoders(make_engine, tokenizer):
    engine, before = make_engine(), threads()

    async def main():
        task = asyncio.create_task(engine.generate(LONG, FEW))
        await until(lambda: tokenizer.begun)
        closing = asyncio.create_task(engine.close(finish_within=3600.0))
        await asyncio.sleep(0)
        tokenizer.may_encode.set()
        await closing
        return await task

    assert len(asyncio.run(main()).token_ids) == 3
    assert not [thread.name for thread in threads() if thread not in before and "encoder" in thread.name]


def test_a_budget_is_counted_in_time_or_not_at_all(make_engine, tokenizer):
    engine = make_engine(kv_token_budget=10**6)

    async def main():
        with pytest.raises(sd.DeadlineExceededError, match="was not encoded in time"):
            await engine.expect_budget([(LONG, FEW, 1)], timeout=0.01)
        await engine.expect_budget([("short", FEW, 1)])
        tokenizer.may_encode.set()
        await engine.expect_budget([(LONG, FEW, 1)])

    asyncio.run(main())


def test_seeds_are_drawn_in_the_order_of_the_calls(make_engine, tokenizer):
    engine, params = make_engine(), sd.SamplingParams(max_new_tokens=3, temperature=1.0)

    async def main():
        torch.manual_seed(5)
        long = asyncio.create_task(engine.generate(LONG, params))
        await until(lambda: tokenizer.begun)
        short = await engine.generate("short", params)
        tokenizer.may_encode.set()
        return [(await long).seed, short.seed]

    torch.manual_seed(5)
    drawn = [int(torch.randint(2**63 - 1, (), device="cpu")) for _ in range(2)]
    assert asyncio.run(main()) == drawn


HI = [{"role": "user", "content": "Hi"}]
CYCLE = {}
CYCLE["own"] = [CYCLE] * 2


@pytest.mark.parametrize(
    ("prompt", "options", "is_short"),
    [
        ("a" * SHORT, {"chat_template_kwargs": {"n": 10**5}}, True), (LONG, {}, False),
        ([10**6] * SHORT, {}, True), ([1] * (SHORT + 1), {}, False), (torch.ones(3), {}, False), (None, {}, True),
        (HI, {}, True), (HI * 20_000, {}, False), ([{"role": "user", "content": LONG}], {}, False),
        ([{"role": "user", "content": [{"text": "a" * 20_000}] * 2}], {}, False),
        ([{"role": "user", "n": 10**5}], {}, False),
        (HI, {"chat_template_kwargs": {"enable_thinking": False, "n": 5}}, True),
        (HI, {"chat_template_kwargs": {"n": 10**5}}, False), (HI, {"chat_template_kwargs": {"n": -1e300}}, False),
        (HI, {"chat_template_kwargs": {"n": float("nan")}}, False), (HI, {"chat_template_kwargs": CYCLE}, False),
        (HI, {"tools": [{"name": "f"}]}, True), (HI, {"tools": [LONG]}, False), (HI, {"tools": [print]}, False),
        (HI, {"chat_template": LONG}, False),
    ],
    ids=lambda value: f"{value!r:.20}",
)  # fmt: skip
def test_which_prompts_are_short(prompt, options, is_short):
    assert (size_of(prompt, PromptOptions(**options)) <= SHORT) == is_short
