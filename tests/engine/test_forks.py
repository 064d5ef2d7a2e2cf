"""Engines in a process that is a fork: they are refused where they need threads; their streams can be closed."""

from __future__ import annotations

import os

import pytest
import torch

import specdec_fast as sd
from support.forks import in_a_fork
from support.models import tiny_model

PARAMS = sd.SamplingParams(max_new_tokens=12)
PROMPTS = [[5, 6], [7], [8, 9, 10]]
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")


@pytest.fixture
def engine():
    return sd.Engine(tiny_model("llama"), "ngram")


@needs_fork
def test_an_engine_is_refused_in_a_fork(engine):
    params = sd.SamplingParams(max_new_tokens=4)
    before = engine.generate([[1, 2, 3]], params)[0].token_ids
    for action in (
        lambda: engine.generate([[1, 2, 3]], params),
        lambda: list(engine.stream([[1, 2, 3]], params)),
    ):
        found = in_a_fork(action)
        assert found.startswith("ForkedProcessError")
        assert "spawn" in found
    assert engine.generate([[1, 2, 3]], params)[0].token_ids == before


@needs_fork
def test_an_engine_is_made_in_a_fork_only_where_it_needs_no_threads(engine):
    def make() -> list[int]:
        return sd.generate(tiny_model("llama"), "ngram", [[1, 2, 3]], sd.SamplingParams(max_new_tokens=4))[0].token_ids

    expected = repr(engine.generate([[1, 2, 3]], sd.SamplingParams(max_new_tokens=4))[0].token_ids)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert in_a_fork(make).startswith("ForkedProcessError")
        torch.set_num_threads(1)
        assert in_a_fork(make) == expected
    finally:
        torch.set_num_threads(threads)


@needs_fork
def test_a_stream_is_closed_in_a_fork(engine):
    stream = engine.stream(PROMPTS, PARAMS)
    next(stream)
    assert in_a_fork(stream.close) == "None"
    assert len([chunk for chunk in stream if chunk.finish_reason]) == len(PROMPTS)
