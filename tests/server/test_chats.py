"""A chat over HTTP and of an asynchronous engine: each turn finds the KV entries of the turns before it."""

from __future__ import annotations

import asyncio

import pytest

import specdec_fast as sd
from specdec_fast.server.app import create_app
from support.asgi import served

PAGE = 16
ANSWER = 37
TURNS = ["Count from one to five, and then back again", "Now in words", "And once more"]


def full_pages(num_tokens):
    """The positions of full pages of a text, whose newest token has no entry."""
    return (num_tokens - 1) // PAGE * PAGE


def num_common(ones, others):
    return next((i for i, pair in enumerate(zip(ones, others, strict=False)) if len({*pair}) > 1), len(ones))


@pytest.fixture
def app(make_engine):
    return create_app(make_engine(max_batch_size=4), model_names=["demo"])


def turns_of(app, tokens):
    """Hold a chat whose answers have only these tokens; yield prompt ids, answer ids and cached tokens of each turn."""
    messages = []
    for text in TURNS:
        messages.append({"role": "user", "content": text})
        body = {"model": "demo", "messages": messages, "max_tokens": ANSWER, "temperature": 1, "seed": 5}
        body |= {"allowed_token_ids": tokens, "return_token_ids": True}
        (exchange,) = served(app, ("/v1/chat/completions", body))
        (choice,) = exchange.json["choices"]
        assert len(choice["token_ids"]) == ANSWER
        found = exchange.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        yield exchange.json["prompt_token_ids"], choice["token_ids"], found
        messages.append(choice["message"])


def test_a_turn_whose_template_writes_the_emitted_tokens_finds_all_of_them(app, chat_tokens):
    """Two characters that no token joins."""
    text = []
    for prompt_ids, token_ids, num_cached in turns_of(app, chat_tokens("~^", add_special_tokens=False).input_ids):
        assert prompt_ids[: len(text)] == text
        assert num_cached == (full_pages(len(text)) if text else 0)
        text = prompt_ids + token_ids


def test_a_turn_whose_template_writes_other_tokens_finds_what_is_before_them(app, chat_tokens):
    """The tokenizer joins what the model emitted as two tokens: the answer is computed once more, as it reads now."""
    text = []
    for prompt_ids, token_ids, num_cached in turns_of(app, chat_tokens("o", add_special_tokens=False).input_ids):
        same = num_common(text, prompt_ids)
        assert same == max(0, len(text) - ANSWER)
        assert num_cached == same // PAGE * PAGE
        text = prompt_ids + token_ids


def test_an_asynchronous_engine_keeps_chats_within_a_budget(make_engine):
    """Several at once, as token ids, in which nothing is encoded again."""
    engine = make_engine(max_batch_size=2, memory_bytes=10**7)
    params = sd.SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)

    async def chat(first):
        text = []
        for turn in range(3):
            prompt = [*text, *(first + turn + i for i in range(20))]
            output = await engine.generate(prompt, params)
            assert output.num_cached_tokens == (full_pages(len(text)) if text else 0)
            text = prompt + output.token_ids

    async def main():
        await asyncio.gather(*(chat(first) for first in (5, 105, 205)))

    asyncio.run(main())
    assert engine.engine.describe()["prefix_cache"]["num_evicted_pages"] == 0
