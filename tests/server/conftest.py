"""Fixtures: the bundled pair behind an asynchronous engine, with a chat template."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace

import pytest

import specdec_fast as sd
from specdec_fast.commands import serve
from specdec_fast.sampling_params import OPENAI_DEFAULTS
from specdec_fast.server.app import create_app
from support.chats import chat_tokenizer


@pytest.fixture(autouse=True)
def _without_full_collections(monkeypatch):
    """The command collects garbage, and lets later collections look at all of torch; each takes half a second."""
    monkeypatch.setattr(serve, "_not_collected", nullcontext)


@pytest.fixture(scope="module")
def chat_tokens():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def make_engine(target, draft, chat_tokens):
    """Return a function that makes engines; all are closed at the end."""
    engines = []

    def make(**options):
        engines.append(sd.AsyncEngine(target, draft, tokenizer=chat_tokens, **options))
        return engines[-1]

    yield make
    for engine in engines:
        asyncio.run(engine.close())


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine(max_batch_size=4)


@pytest.fixture(scope="module")
def app(engine):
    """Return the application of this engine, under two names; choices have twelve tokens unless they ask for others."""
    return create_app(
        engine, model_names=["demo", "other-name"], default_params=replace(OPENAI_DEFAULTS, max_new_tokens=12)
    )
