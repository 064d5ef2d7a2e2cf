"""With a DFlash or DSpark drafter, tokens and log-probability bits are those of plain decoding."""

from __future__ import annotations

import pytest
import torch

from specdec_fast.drafters.tapped import MOST_QUEUED
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


def test_drafting_pauses_and_resumes(tmp_path):
    target = tiny_model("llama")
    write_checkpoint(tmp_path, target)
    expect_pause_and_resumption(target, str(tmp_path), MOST_QUEUED)
