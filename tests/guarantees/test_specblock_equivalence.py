"""With a SpecBlock drafter, tokens and log-probability bits are those of plain decoding, for trees and for chains."""

from __future__ import annotations

import pytest
import torch

from support.mixed_batch import outputs_of
from support.models import tiny_model
from support.specblock import write_checkpoint

CONFIGS = [
    {"max_batch_size": 1, "num_draft_tokens": 8, "max_prefill_tokens": 7},
    {"max_batch_size": 3, "draft_tree": "chain"},
    {"max_batch_size": 8, "num_draft_tokens": 3},
    {"kv_cache_tokens": 64, "page_size": 4, "num_draft_tokens": 6},
]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(dtype, marks=pytest.mark.grid) for dtype in (torch.bfloat16, torch.float16))],
    ids=str,
)
def test_outputs_are_those_of_plain_decoding(tmp_path, dtype):
    target = tiny_model("llama").to(dtype)
    write_checkpoint(tmp_path, target, draft_vocab_size=60)
    expected, _ = outputs_of(target, None)
    for config in CONFIGS:
        found, engine = outputs_of(target, f"specblock:{tmp_path}", **config)
        assert found == expected
        assert not engine.drafter._states
        assert engine.last_run.decoding.num_draft_tokens > 100
    assert engine.last_run.num_preemptions > 0, "the small pool must preempt"
