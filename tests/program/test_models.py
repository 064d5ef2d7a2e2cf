"""Whole models as forward programs: their logits, and models that PyTorch runs instead."""

from __future__ import annotations

import copy

import pytest
import torch

import specdec_fast as sd
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from support.grids import each_value_once
from support.models import WITH_CHUNKS, tiny_model
from support.programs import CPU, DTYPES, dense_logits, eager, needs_programs, ragged_logits

pytestmark = needs_programs


@each_value_once
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", WITH_CHUNKS)
def test_models_are_computed_as_pytorch_does(architecture, dtype):
    """At most twice as far from the fp64 model as PyTorch's own forward of that dtype."""
    model = RaggedModel(tiny_model(architecture).to(dtype), resolve(CPU))
    assert model.program is not None, model.why_no_program
    truth = dense_logits(copy.deepcopy(model.model).double())
    ours, theirs = ((ragged_logits(m).double() - truth).norm() for m in (model, eager(model)))
    assert ours <= 2 * theirs
    assert torch.equal(ragged_logits(model, torch.tensor([3, 0, 9])), ragged_logits(model)[[3, 0, 9]])


def test_what_cannot_be_written_down_runs_in_pytorch():
    llama = tiny_model("llama")
    llama.model.layers[1].mlp.act_fn = torch.nn.Softshrink()
    model = RaggedModel(llama, resolve(CPU))
    assert model.program is None
    assert "softshrink" in model.why_no_program
    assert sd.Engine(llama, None).describe()["why_no_program"] == model.why_no_program


def test_a_recording_that_fails_leaves_the_model_to_pytorch(monkeypatch):
    def failing(*args, **kwargs):
        raise TypeError("an operation with arguments that nobody has seen")

    monkeypatch.setattr("specdec_fast.runner.ragged_model.compile_forward", failing)
    model = RaggedModel(tiny_model("llama"), resolve(CPU))
    assert model.program is None
    assert model.why_no_program == "recording it failed: TypeError: an operation with arguments that nobody has seen"
    assert ragged_logits(model).isfinite().all()


def test_logit_rows_outside_the_batch_are_refused():
    with pytest.raises(IndexError, match=r"logit_rows\[1\] is 10; there are 10 rows"):
        ragged_logits(RaggedModel(tiny_model("llama"), resolve(CPU)), torch.tensor([0, 10]))


def test_enforce_eager_leaves_forwards_to_pytorch(prompts, target, draft):
    params = sd.SamplingParams(max_new_tokens=12)
    eagerly = sd.Engine(target, draft, enforce_eager=True)
    assert eagerly.describe()["forward_program"] is False
    assert eagerly.describe()["why_no_program"] == "enforce_eager=True"
    expected = [output.token_ids for output in eagerly.generate(prompts[:4], params)]
    engine = sd.Engine(target, draft)
    assert engine.describe()["forward_program"] is True
    assert [output.token_ids for output in engine.generate(prompts[:4], params)] == expected
