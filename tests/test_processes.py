"""Engines and forks: a typed error instead of a wait for threads that are not there."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from models import tiny_model

import specdec_fast as sd

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")


def in_a_fork(action: Callable[[], object]) -> str:
    """Return what a forked child raised, or the result, as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = repr(action())
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(write, found.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return found


@pytest.fixture
def engine():
    return sd.Engine(tiny_model("llama"), "ngram")


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
