"""With every learned drafter, tokens and log-probability bits are those of plain decoding, for trees and for chains."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import specdec_fast as sd
from specdec_fast.drafters.clover.training import new_clover, save_clover
from specdec_fast.drafters.medusa.training import new_heads, save_heads
from specdec_fast.drafters.shared.tapped import MOST_QUEUED
from specdec_fast.speculation_length.fixed import FixedLength
from specdec_fast.training.drafter_loss import Teacher
from specdec_fast.training.texts import write_texts
from specdec_fast.training.trainer import Trainer, TrainingSettings
from support import dflash, eagle3, specblock
from support.grids import combinations
from support.mixed_batch import PROMPTS, outputs_of
from support.models import tiny_model
from support.pausing import expect_pause_and_resumption

TREE = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0]]
SMALL_POOL = {"kv_cache_tokens": 64, "page_size": 4}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of each kind, how a checkpoint is written, what an engine is asked for, and the types that every test run compares.
KINDS = {
    "medusa": (None, [{"max_prefill_tokens": 7}, {"draft_tree": "chain"}, {"num_draft_tokens": "auto"}], ()),
    "clover": (
        None,
        [
            {"max_prefill_tokens": 7},
            {"draft_tree": "chain", "max_batch_size": 1},
            {"num_draft_tokens": 3, "max_batch_size": 8},
        ],
        (),
    ),
    "specblock": (
        partial(specblock.write_checkpoint, draft_vocab_size=60),
        [
            {"max_batch_size": 1, "num_draft_tokens": 8, "max_prefill_tokens": 7},
            {"max_batch_size": 3, "draft_tree": "chain"},
            {"max_batch_size": 8, "num_draft_tokens": 3},
            {"num_draft_tokens": 6},
        ],
        (),
    ),
    "eagle3": (
        partial(eagle3.write_checkpoint, draft_vocab_size=60),
        [{}, {"max_prefill_tokens": 7, "num_draft_tokens": 3}, {}],
        DTYPES[2:],
    ),
    "dflash": (
        dflash.write_checkpoint,
        [{"max_batch_size": 1}, {"max_batch_size": 3, "max_prefill_tokens": 7, "num_draft_tokens": 3}, {}],
        (),
    ),
    "dspark": (
        partial(dflash.write_checkpoint, markov="vanilla", draft_vocab_size=60),
        [{"max_batch_size": 1}, {"max_batch_size": 3, "max_prefill_tokens": 7, "num_draft_tokens": 3}, {}],
        DTYPES[1:2],
    ),
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """A function from ``"medusa"`` or ``"clover"`` to heads that have learnt the target's answers to the prompts."""
    trained = {}

    def folder_of(kind):
        if kind not in trained:
            trained[kind] = folder = tmp_path_factory.mktemp(kind)
            target = tiny_model("llama")
            texts, _ = write_texts(sd.Engine(target, None), PROMPTS, 300, 24, seed=3).split(0)
            torch.manual_seed(0)
            new, save, rate = (new_heads, save_heads, 5e-2) if kind == "medusa" else (new_clover, save_clover, 2e-2)
            module = new(target, 3)
            settings = TrainingSettings(epochs=15, batch_tokens=150, learning_rate=rate, num_steps=3)
            Trainer(module, Teacher(target, (3,), None), texts, settings, folder).run(1e9)
            save(module, folder, [[0], [1], [0, 0], [0, 1], [2], [1, 0], [0, 0, 0], [0, 0, 1], [3], [1, 1]])
        return trained[kind]

    return folder_of


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, id=f"{kind}-{dtype}", marks=[] if dtype in in_every_run else pytest.mark.grid)
        for kind, (_, _, in_every_run) in KINDS.items()
        for dtype in DTYPES
    ],
)
def test_outputs_are_those_of_plain_decoding(tmp_path, heads, kind, dtype):
    target = tiny_model("llama").to(dtype)
    write, configs, _ = KINDS[kind]
    if write is not None:
        write(tmp_path, target)
    folder = heads(kind) if write is None else tmp_path
    expected, _ = outputs_of(target, None)
    for config in (*configs[:-1], configs[-1] | SMALL_POOL):
        found, engine = outputs_of(target, f"{'dflash' if kind == 'dspark' else kind}:{folder}", **config)
        assert found == expected
        assert engine.drafter.num_kept_rows == 0, "released sequences leave nothing behind"
        if config.get("num_draft_tokens") != "auto":  # which may stop drafting
            assert engine.last_run.decoding.num_draft_tokens > 100
            assert engine.last_run.decoding.num_accepted_tokens > 7 or write is not None, "heads are trained"
    assert engine.last_run.num_preemptions > 0, "the small pool must preempt"


@combinations(dtype=list(DTYPES), batch_size=[1, 3, 8], tree=[12, 30, TREE])
def test_trees_have_the_bits_of_plain_decoding(tmp_path, dtype, batch_size, tree):
    """Greedy, sampled and penalised requests in one batch; a random drafter, so most levels have close choices."""
    target = tiny_model("llama").to(dtype)
    eagle3.write_checkpoint(tmp_path, target, draft_vocab_size=60)
    expected, _ = outputs_of(target, None)
    pool = SMALL_POOL if batch_size == 3 else {}
    found, engine = outputs_of(target, f"eagle3:{tmp_path}", max_batch_size=batch_size, draft_tree=tree, **pool)
    assert found == expected
    assert engine.last_run.decoding.num_draft_tokens > 5 * engine.last_run.decoding.num_drafts
    assert engine.drafter.num_admitted == 0
    assert bool(engine.last_run.num_preemptions) == bool(pool), "the small pool must preempt"


def test_outputs_are_the_same_where_no_program_drafts(tmp_path, monkeypatch):
    target = tiny_model("llama")
    eagle3.write_checkpoint(tmp_path, target, draft_vocab_size=60)
    expected, plain = outputs_of(target, None)
    monkeypatch.setattr("specdec_fast.runner.row_module.executor_for", lambda *_: (None, "no program here"))
    found, engine = outputs_of(target, f"eagle3:{tmp_path}", **SMALL_POOL)
    assert found == expected
    assert engine.last_run.num_preemptions > 0
    described = engine.describe()
    assert described["draft"]["why_no_program"] == "no program here"
    assert described["forward_program"] == plain.describe()["forward_program"]


@pytest.mark.parametrize(
    ("write", "config"),
    [
        (dflash.write_checkpoint, {}),
        pytest.param(eagle3.write_checkpoint, {"draft_tree": "chain"}, marks=pytest.mark.grid),
        (eagle3.write_checkpoint, {"draft_tree": 12}),
    ],
    ids=["dflash", "chain", "tree"],
)
def test_drafting_pauses_and_resumes(tmp_path, write, config):
    target = tiny_model("llama")
    write(tmp_path, target)
    expect_pause_and_resumption(target, str(tmp_path), MOST_QUEUED, **config)


class Dropping(FixedLength):
    """Drops draft tokens of low scores, others in each step."""

    def __init__(self):
        super().__init__(4)
        self.steps = []

    def least_score(self, scores):
        falling = sorted((score for of_sequence in scores for score in of_sequence), reverse=True)
        return falling[len(self.steps) % len(falling)] if len(self.steps) % 3 else math.inf

    def observe(self, step):
        assert step.scores is not None or not any(step.limits)
        self.steps.append([len(of_sequence) for of_sequence in step.scores or []])


@pytest.mark.parametrize(
    ("write", "config"),
    [
        pytest.param(partial(dflash.write_checkpoint, markov="vanilla"), {}, marks=pytest.mark.grid),
        (partial(eagle3.write_checkpoint, draft_vocab_size=60), {"draft_tree": 12}),
    ],
    ids=["dspark", "tree"],
)
def test_drafts_of_which_a_policy_drops_tokens(tmp_path, write, config):
    """Whatever is dropped, the rest is a chain or a tree, and outputs stay; a step without tokens is plain decoding."""
    target, policy = tiny_model("llama"), Dropping()
    write(tmp_path, target)
    expected, _ = outputs_of(target, None)
    found, engine = outputs_of(target, str(tmp_path), num_draft_tokens=policy, **config)
    assert found == expected
    assert {0, 1, 2, 3} <= {count for step in policy.steps for count in step}
    assert engine.last_run.decoding.num_draft_tokens == sum(map(sum, policy.steps))


def test_auto_with_a_confidence_head(tmp_path):
    target = tiny_model("llama")
    dflash.write_checkpoint(tmp_path, target, markov="vanilla")
    expected, _ = outputs_of(target, None)
    found, engine = outputs_of(target, f"dflash:{tmp_path}", num_draft_tokens="auto")
    assert found == expected
    assert engine.profiler.scores_chains
