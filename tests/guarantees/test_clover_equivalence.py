"""With Clover heads, tokens and log-probability bits are those of plain decoding, for trees and for chains."""

from __future__ import annotations

import pytest
import torch

import specdec_fast as sd
from specdec_fast.drafters.clover.training import new_clover, save_clover
from specdec_fast.training.drafter_loss import Teacher
from specdec_fast.training.texts import write_texts
from specdec_fast.training.trainer import Recipe, Trainer
from support.mixed_batch import PROMPTS, outputs_of
from support.models import tiny_model

TREE = [[0], [0, 0], [1], [0, 0, 0], [0, 1], [1, 0], [0, 0, 1], [1, 1], [2]]


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Heads that have learnt the target's answers to the prompts, so that some drafts are accepted."""
    folder, target = tmp_path_factory.mktemp("heads"), tiny_model("llama")
    texts, _ = write_texts(sd.Engine(target, None), PROMPTS, 300, 24, seed=3).split(0)
    torch.manual_seed(0)
    module = new_clover(target, 3)
    recipe = Recipe(epochs=15, batch_tokens=150, learning_rate=2e-2, num_steps=3)
    Trainer(module, Teacher(target, (3,), None), texts, recipe, folder).run(1e9)
    save_clover(module, folder, TREE)
    return folder


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.grid) for dtype in (torch.float32, torch.float16))],
    ids=str,
)
def test_outputs_are_those_of_plain_decoding(heads, dtype):
    target = tiny_model("llama").to(dtype)
    expected, _ = outputs_of(target, None)
    for config in (
        {"max_prefill_tokens": 7},
        {"draft_tree": "chain", "max_batch_size": 1},
        {"kv_cache_tokens": 64, "page_size": 4, "num_draft_tokens": 3, "max_batch_size": 8},
    ):
        found, engine = outputs_of(target, f"clover:{heads}", **config)
        assert found == expected
        assert not engine.drafter._states
        assert engine.last_run.decoding.num_draft_tokens > 100
        assert engine.last_run.decoding.num_accepted_tokens > 7
    assert engine.last_run.num_preemptions > 0, "the small pool must preempt"
