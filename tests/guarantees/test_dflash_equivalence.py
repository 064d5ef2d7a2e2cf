"""With a DFlash or DSpark drafter, tokens and log-probability bits are those of plain decoding."""

from __future__ import annotations

import math

import pytest
import torch

from specdec_fast.drafters.shared.tapped import MOST_QUEUED
from specdec_fast.speculation_length.fixed import FixedLength
from support.dflash import write_checkpoint
from support.mixed_batch import outputs_of
from support.models import tiny_model
from support.pausing import expect_pause_and_resumption

CONFIGS = (
    {"max_batch_size": 1},
    {"max_batch_size": 3, "max_prefill_tokens": 7, "num_draft_tokens": 3},
    {"max_batch_size": 8, "kv_cache_tokens": 64, "page_size": 4},
)
KINDS = {"dflash": {}, "dspark": {"markov": "vanilla", "draft_vocab_size": 60}}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IN_SLICE = {("dflash", torch.bfloat16), ("dspark", torch.float32)}
GRID = [
    pytest.param(dtype, KINDS[kind], id=f"{kind}-{dtype}", marks=[] if (kind, dtype) in IN_SLICE else pytest.mark.grid)
    for kind in KINDS
    for dtype in DTYPES
]


@pytest.mark.parametrize(("dtype", "options"), GRID)
def test_outputs_are_those_of_plain_decoding(tmp_path, dtype, options):
    target = tiny_model("llama").to(dtype)
    write_checkpoint(tmp_path, target, **options)
    expected, _ = outputs_of(target, None, max_batch_size=3)
    for config in CONFIGS:
        found, engine = outputs_of(target, f"dflash:{tmp_path}", **config)
        assert found == expected
        assert engine.last_run.decoding.num_draft_tokens > 100
        assert not engine.drafter._states
    assert engine.last_run.num_preemptions > 0, "the small pool must preempt"


def test_chains_of_which_a_policy_drops_tokens(tmp_path):
    """Whatever is dropped, outputs stay; a step without draft tokens is one of plain decoding."""

    class Dropping(FixedLength):
        def __init__(self):
            super().__init__(4)
            self.steps = []

        def least_score(self, scores):
            falling = sorted((score for own in scores for score in own), reverse=True)
            return falling[len(self.steps) % len(falling)] if len(self.steps) % 3 else math.inf

        def observe(self, step):
            self.steps.append([len(own) for own in step.scores or []])

    target, policy = tiny_model("llama"), Dropping()
    write_checkpoint(tmp_path, target, markov="vanilla")
    expected, _ = outputs_of(target, None)
    found, engine = outputs_of(target, f"dflash:{tmp_path}", num_draft_tokens=policy)
    assert found == expected
    assert {0, 1, 2, 3} <= {count for step in policy.steps for count in step}
    assert engine.last_run.decoding.num_draft_tokens == sum(map(sum, policy.steps))


def test_auto_with_a_confidence_head(tmp_path):
    target = tiny_model("llama")
    write_checkpoint(tmp_path, target, markov="vanilla")
    expected, _ = outputs_of(target, None)
    found, engine = outputs_of(target, f"dflash:{tmp_path}", num_draft_tokens="auto")
    assert found == expected
    assert engine.profiler.scores_chains


def test_drafting_pauses_and_resumes(tmp_path):
    target = tiny_model("llama")
    write_checkpoint(tmp_path, target)
    expect_pause_and_resumption(target, str(tmp_path), MOST_QUEUED)
