"""With an EAGLE-3 drafter, tokens and log-probability bits are those of plain decoding."""

from __future__ import annotations

import json
import math

import pytest
import torch

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.drafters.shared.tapped import MOST_QUEUED
from specdec_fast.speculation_length.fixed import FixedLength
from support.eagle3 import write_checkpoint
from support.grids import combinations, grid
from support.mixed_batch import outputs_of
from support.models import tiny_model
from support.pausing import expect_pause_and_resumption


def model_in(dtype):
    return tiny_model("llama").to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.grid), torch.float16], ids=str
)
def test_outputs_are_those_of_plain_decoding(tmp_path, dtype):
    target = model_in(dtype)
    write_checkpoint(tmp_path, target, draft_vocab_size=60)
    expected, _ = outputs_of(target, None)
    for config in ({}, {"max_prefill_tokens": 7, "num_draft_tokens": 3}, {"kv_cache_tokens": 64, "page_size": 4}):
        found, engine = outputs_of(target, f"eagle3:{tmp_path}", **config)
        assert found == expected
        assert engine.last_run.decoding.num_draft_tokens > 100
        assert not engine.drafter._states
    assert engine.last_run.num_preemptions > 0, "the small pool must preempt"


TREE = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0]]


@combinations(dtype=[torch.float32, torch.bfloat16, torch.float16], batch_size=[1, 3, 8], tree=[12, 30, TREE])
def test_trees_have_the_bits_of_plain_decoding(tmp_path, dtype, batch_size, tree):
    """Greedy, sampled and penalised requests in one batch; a random drafter, so most levels have close choices."""
    target = model_in(dtype)
    write_checkpoint(tmp_path, target, draft_vocab_size=60)
    expected, _ = outputs_of(target, None)
    pool = {"kv_cache_tokens": 64, "page_size": 4} if batch_size == 3 else {}
    found, engine = outputs_of(target, f"eagle3:{tmp_path}", max_batch_size=batch_size, draft_tree=tree, **pool)
    assert found == expected
    assert engine.last_run.decoding.num_draft_tokens > 5 * engine.last_run.decoding.num_drafts
    assert not engine.drafter._states
    assert bool(engine.last_run.num_preemptions) == bool(pool), "the small pool must preempt"


def test_outputs_are_the_same_where_no_program_drafts(tmp_path, monkeypatch):
    target = model_in(torch.float32)
    write_checkpoint(tmp_path, target, draft_vocab_size=60)
    expected, plain = outputs_of(target, None)
    monkeypatch.setattr("specdec_fast.runner.row_module.executor_for", lambda *_: (None, "no program here"))
    found, engine = outputs_of(target, f"eagle3:{tmp_path}", kv_cache_tokens=64, page_size=4)
    assert found == expected
    assert engine.last_run.num_preemptions > 0
    described = engine.describe()
    assert described["draft"]["why_no_program"] == "no program here"
    assert described["forward_program"] == plain.describe()["forward_program"]


@pytest.mark.parametrize("tree", ["chain", 12])
def test_drafting_pauses_and_resumes(tmp_path, tree):
    target = model_in(torch.float32)
    write_checkpoint(tmp_path, target)
    expect_pause_and_resumption(target, str(tmp_path), MOST_QUEUED, draft_tree=tree)


def test_trees_of_which_a_policy_drops_nodes(tmp_path):
    """Whatever is dropped, the rest is a tree, and outputs stay; that of all nodes is plain decoding."""

    class Dropping(FixedLength):
        def __init__(self):
            super().__init__(4)
            self.steps = []

        def least_score(self, scores):
            falling = sorted((score for own in scores for score in own), reverse=True)
            return falling[len(self.steps) % len(falling)] if len(self.steps) % 3 else math.inf

        def observe(self, step):
            assert step.scores is not None or not any(step.limits)
            self.steps.append([len(own) for own in step.scores or []])

    target = model_in(torch.float32)
    write_checkpoint(tmp_path, target, draft_vocab_size=60)
    expected, _ = outputs_of(target, None)
    policy = Dropping()
    found, engine = outputs_of(target, str(tmp_path), num_draft_tokens=policy, draft_tree=12)
    assert found == expected
    assert {0, 1, 2, 3} <= {count for step in policy.steps for count in step}
    assert engine.last_run.decoding.num_draft_tokens == sum(map(sum, policy.steps))


def test_the_bundled_drafter_is_accepted():
    """Its features are those that it was trained on: with every tap one layer too early, much less is accepted."""
    lines = (demo_pair() / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[:12]]
    params = sd.SamplingParams(max_new_tokens=40)
    lengths, outputs = [], []
    for draft, taps in (
        ("none", None),
        ("eagle3:" + str(demo_pair() / "eagle3"), None),
        (demo_pair() / "eagle3", (0, 1, 2)),
    ):
        engine = sd.Engine(demo_pair() / "target", draft, dtype="float32", tap_layers=taps)
        outputs.append([output.token_ids for output in engine.generate(prompts, params)])
        lengths.append(engine.last_run.decoding.mean_acceptance_length)
    assert outputs[1] == outputs[2] == outputs[0]
    assert lengths[1] > 2.8
    assert lengths[2] < lengths[1] - 1


@pytest.mark.parametrize("temperature", grid([0.0, 1.0], keep=[1.0]))
def test_a_tree_of_the_bundled_drafter_is_accepted_more_often_than_its_chain(temperature):
    lines = (demo_pair() / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[:4]]
    params = [sd.SamplingParams(max_new_tokens=40, temperature=temperature, seed=i) for i in range(len(prompts))]
    lengths = []
    for tree in ("chain", 16):
        engine = sd.Engine(demo_pair() / "target", demo_pair() / "eagle3", dtype="float32", draft_tree=tree)
        engine.generate(prompts, params)
        lengths.append(engine.last_run.decoding.mean_acceptance_length)
    assert lengths[1] > lengths[0] + 0.3
