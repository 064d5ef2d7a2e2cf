"""Engines whose K changes from step to step and from sequence to sequence: the same tokens, and less work."""

from __future__ import annotations

import random

import pytest
import torch

import specdec_fast as sd
from bench.common.simulation import World
from specdec_fast.batch.ragged_batch import RowPadding
from specdec_fast.runner import profiling
from specdec_fast.speculation_length.adaptive import AdaptiveLength
from specdec_fast.speculation_length.base import LengthPolicy
from support.demo import MAX_NEW_TOKENS
from support.grids import combinations, grid
from support.invariants import CheckedEngine
from support.models import VOCAB_SIZE, tiny_model, truncated_copy
from support.scripted_drafter import Scripted

PARAMS = sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS)


class RandomLengths(LengthPolicy):
    """Any K for anybody, and long stretches of nothing, so that a draft model has much to catch up with."""

    def __init__(self, seed, most):
        self.max_draft_tokens = most
        self.random, self.most, self.num_steps, self.records = random.Random(seed), most, 0, []

    def limits(self, batch):
        self.num_steps += 1
        if self.num_steps % 16 < 11:
            return [0] * len(batch)
        return [min(self.random.choice([0, 1, self.most]), s.num_remaining - 1) for s in batch]

    def observe(self, step):
        self.records.append(step)


@combinations(method=["eqspec", "exspec"], draft_name=["model", "ngram"])
def test_auto_gives_the_tokens_of_plain_decoding(target, draft, prompt_ids, expected, method, draft_name):
    chosen = draft if draft_name == "model" else "ngram"
    engine = sd.Engine(target, chosen, method=method, max_batch_size=4, num_draft_tokens="auto")
    for _ in range(2):  # what it learned in the first call changes K in the second, and no token
        assert [o.token_ids for o in engine.generate(prompt_ids, PARAMS)] == expected
    assert engine.describe()["num_draft_tokens"] == "auto"
    drawn = sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0.8, top_p=0.9, seed=5, logprobs=True)
    plain = sd.Engine(target, None, method="eqspec", max_batch_size=1)
    ours, theirs = ([(o.token_ids, o.logprobs) for o in e.generate(prompt_ids, drawn)] for e in (engine, plain))
    assert ours == theirs
    assert engine.core.pool.num_free_pages == engine.core.pool.num_pages


@pytest.mark.parametrize("largest", grid([512, 12], keep=[12]))
def test_any_lengths_give_the_tokens_of_plain_decoding(largest):
    """All invariants, a draft model that is far behind, and in fewer rows than it lacks."""
    target = tiny_model("llama")
    engine = sd.Engine(target, truncated_copy(target, 2), page_size=4, max_batch_size=3, num_draft_tokens="auto")
    model = engine.drafter.model
    model.row_padding = RowPadding(model.row_padding.multiple, largest)
    engine.core.drafting.length_policy = lengths = RandomLengths(0, 5)
    rows, forward, drafting = [], model.forward, model.program and model.program.draft

    def counted(batch, *rest):
        rows.append(len(batch.token_ids))
        return forward(batch, *rest)

    def counted_drafting(spans, token_ids, *rest):
        rows.append(len(token_ids))
        return drafting(spans, token_ids, *rest)

    model.forward = counted
    if model.program:
        model.program.draft = counted_drafting
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (1, 9, 30, 5, 17)]
    checked = CheckedEngine(engine)
    checked.generate(prompts, sd.SamplingParams(max_new_tokens=45))
    assert 9 < max(rows) <= largest, "the lag was fed in no larger forwards"
    records = lengths.records
    assert any(len(set(r.limits)) > 1 for r in records), "K was not ragged"
    stats = engine.last_run.decoding
    assert stats.num_draft_tokens == sum(sum(r.num_draft_tokens) for r in records)
    assert stats.num_accepted_tokens == sum(sum(r.num_accepted) for r in records)
    assert stats.num_drafts == sum(k > 0 for r in records for k in r.num_draft_tokens)
    assert 0 < stats.num_drafts < stats.num_steps
    assert all(min(r.verify_seconds, r.other_seconds) > 0 for r in records)


def test_draft_model_computes_nothing_where_nothing_is_drafted(target, draft, prompt_ids, expected, monkeypatch):
    engine = sd.Engine(target, draft, max_batch_size=4, num_draft_tokens="auto")
    monkeypatch.setattr(engine.core.drafting.length_policy, "limits", lambda batch: [0] * len(batch))
    monkeypatch.setattr(engine.drafter.model, "forward", None)
    monkeypatch.setattr(engine.drafter.model, "program", None)
    assert [o.token_ids for o in engine.generate(prompt_ids, PARAMS)] == expected
    assert engine.last_run.decoding.num_draft_tokens == 0


def steps_take(engine, world):
    """Let the engine choose K as if its steps took the simulated times: a busy machine would decide otherwise."""
    engine.core.drafting.length_policy = lengths = world.prepared(AdaptiveLength())
    observe = lengths.observe

    def observe_simulated(step):
        num_rows = len(step.batch) + sum(step.num_draft_tokens)
        draft_seconds = world.draft(len(step.batch)) if any(step.num_draft_tokens) else 0.0
        observe(
            step._replace(
                draft_seconds=draft_seconds, verify_seconds=world.verify(num_rows), other_seconds=world.overhead
            )
        )

    lengths.observe = observe_simulated


def test_useless_drafter_is_given_up_and_a_perfect_one_used(target, prompt_ids, expected):
    world = World(lambda rows: 1e-3 + 1e-4 * rows, lambda _: 3e-4, lambda *_: 0.5, batch_size=4, overhead=1e-4)

    def tokens_drafted(script, rounds):
        engine = sd.Engine(target, Scripted(script), max_batch_size=4, num_draft_tokens="auto")
        steps_take(engine, world)
        for _ in range(rounds):
            assert [o.token_ids for o in engine.generate(prompt_ids, PARAMS)] == expected
        return engine.last_run.decoding

    def replay(sequence, limit):
        done = sequence.length - sequence.prompt_length
        return expected[sequence.index][done : done + limit]

    assert tokens_drafted(lambda s, limit: [7] * limit, 3).num_draft_tokens < 0.5 * sum(map(len, expected))
    assert tokens_drafted(replay, 2).mean_acceptance_length > 4


def test_plain_decoding_has_nothing_to_adapt(target, prompt_ids, expected):
    engine = sd.Engine(target, None, num_draft_tokens="auto")
    assert not isinstance(engine.core.drafting.length_policy, AdaptiveLength)
    assert [o.token_ids for o in engine.generate(prompt_ids, PARAMS)] == expected


def test_misspelt_auto_is_told():
    with pytest.raises(sd.ConfigError, match="num_draft_tokens='adaptive': expected an integer >= 0, or 'auto'"):
        sd.EngineConfig(num_draft_tokens="adaptive")


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_draft_model_tells_what_drafting_takes(target, draft, enforce_eager):
    """Forwards by sequences, and at 0 what a proposal takes besides; nothing is left behind."""
    drafter = sd.Engine(target, draft, enforce_eager=enforce_eager).drafter
    seconds = drafter.forward_seconds([1, 2, 16])
    assert set(seconds) == {0, 1, 2, 16}
    assert all(seconds[count] > 0 for count in (1, 2, 16))
    assert seconds[0] >= 0
    assert drafter.draft_kv_length == {}
    assert drafter.pool.num_free_pages == drafter.pool.num_pages


def test_what_drafting_takes_is_taken_apart(monkeypatch):
    """A proposal of 1 token takes 5 s, of 4 tokens 11 s: 2 s a forward, 3 s besides, 1 s of a timed forward."""
    monkeypatch.setattr(profiling, "forward_seconds", lambda model, row_counts, most: {1: 3.0, 2: 3.5, 16: 9.0})
    assert profiling.drafting_seconds(None, [1, 2, 16], 16, {1: 5.0, 4: 11.0}.get) == {1: 2.0, 2: 2.5, 16: 8.0, 0: 3.0}
