"""Prompts prefilled a chunk in every step: the same bits, and other sequences decode meanwhile."""

from __future__ import annotations

import random

import pytest

import specdec_fast as sd
from specdec_fast.engine.core import EngineCore
from specdec_fast.engine.input import RequestBuilder
from specdec_fast.runner import prefill
from support.grids import each_value_once
from support.models import VOCAB_SIZE, tiny_model, truncated_copy


@pytest.fixture(scope="module")
def pair():
    target = tiny_model("llama")
    return target, truncated_copy(target, 2)


@pytest.fixture
def num_rows(monkeypatch):
    """Rows of every forward that prefills."""
    found, lay_out = [], prefill.lay_out

    def counted(pool, rows, token_ids):
        found.append(sum(r.count for r in rows))
        return lay_out(pool, rows, token_ids)

    monkeypatch.setattr(prefill, "lay_out", counted)
    return found


def prompt_of(length, seed=0):
    draw = random.Random(seed)
    return [draw.randrange(VOCAB_SIZE) for _ in range(length)]


PROMPTS = [prompt_of(length, seed=length) for length in (1, 2, 30, 7, 19, 3)]


def params_of(i):
    return sd.SamplingParams(max_new_tokens=9, ignore_eos=True, logprobs=True, temperature=0.9 * (i % 2), seed=i)


@each_value_once
@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize(("chunk", "method"), [(1, "exspec"), (5, "exspec"), (5, "eqspec"), (16, "exspec")])
def test_no_bit_depends_on_the_chunks(pair, num_rows, monkeypatch, ahead, chunk, method):
    monkeypatch.setattr(EngineCore, "launches_ahead", ahead)
    params = [params_of(i) for i in range(len(PROMPTS))]
    plain = sd.Engine(pair[0], None, max_batch_size=1).generate(PROMPTS, params)
    num_rows.clear()
    engine = sd.Engine(*pair, method=method, max_batch_size=3, max_prefill_tokens=chunk)
    outputs = engine.generate(PROMPTS, params)
    assert [(o.token_ids, o.logprobs) for o in outputs] == [(o.token_ids, o.logprobs) for o in plain]
    assert num_rows
    assert max(num_rows) <= chunk
    assert engine.core.pool.is_vacant
    assert engine.drafter.pool.is_vacant


def test_other_sequences_decode_while_a_long_prompt_is_prefilled(pair, num_rows):
    """While target and draft model prefill it, each by eight tokens a step, the others emit in every step."""
    engine = sd.Engine(*pair, max_batch_size=4, max_prefill_tokens=8, num_draft_tokens=2)
    core, builder = engine.core, RequestBuilder(engine.target, None, 2)
    params = sd.SamplingParams(max_new_tokens=90, ignore_eos=True)
    running = [builder.build(i, prompt_of(2, i), params) for i in range(2)]
    for request in running:
        core.add(request)
    core.step()
    late = builder.build(2, prompt_of(60), sd.SamplingParams(max_new_tokens=40, ignore_eos=True))
    core.add(late)
    num_rows.clear()
    num_steps = 0
    while not late.stats.num_drafts:
        before = len(num_rows)
        served = {output.request for output in core.step()}
        assert served >= set(running)
        assert all(rows <= 8 for rows in num_rows[before:])
        assert len(num_rows) - before <= 2, "one forward of each model"
        num_steps += 1
    assert num_steps >= 59 / 8
    assert sum(num_rows) >= 2 * 59, "both models prefilled the prompt"


def test_a_prompt_is_cancelled_in_the_middle(pair):
    engine = sd.Engine(*pair, max_prefill_tokens=4)
    core, builder = engine.core, RequestBuilder(engine.target, None)
    first, second = (core.add(builder.build(i, prompt_of(20, i), params_of(i))) for i in range(2))
    assert core.step() == []
    assert core.cancel(first)
    assert core.step() == []
    assert core.has_work
    assert core.cancel(second)
    assert not core.has_work
    assert core.pool.is_vacant
    assert engine.generate([prompt_of(20)], params_of(0))[0].error is None


@pytest.mark.parametrize("chunk", [0, -1, 2.5, True, "8"])
def test_a_chunk_is_a_positive_integer(chunk):
    with pytest.raises(sd.ConfigError, match=r"max_prefill_tokens=.*expected an integer >= 1"):
        sd.EngineConfig(max_prefill_tokens=chunk)
