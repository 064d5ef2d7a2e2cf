"""Models in training mode: outputs would be random, so the engine refuses them with a typed error."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import specdec_fast as sd
from support.models import tiny_model


@pytest.mark.parametrize(
    ("part", "message"),
    [
        pytest.param("", "training mode since", marks=pytest.mark.grid),
        ("transformer.h.1", r"other logits each time, and its module transformer\.h\.1"),
    ],
)
def test_training_mode_after_the_engine_was_made(part, message):
    model = tiny_model("gpt2")
    engine = sd.Engine(model, None, enforce_eager=True)
    model.get_submodule(part).train()
    with pytest.raises(sd.UnsupportedModelError, match=rf"{message}.*call model\.eval\(\) first"):
        engine.generate([[1, 2]])
    model.eval()
    assert engine.generate([[1, 2]])[0].error is None


class Operations(TorchDispatchMode):
    """Collects the operations of PyTorch that run while it is active."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ran.append(function)
        return function(*args, **(kwargs or {}))


def test_asking_whether_a_model_has_changed_computes_nothing():
    """Every call of an engine asks."""
    model = sd.Engine(tiny_model("llama"), None, enforce_eager=True).target
    with Operations() as operations:
        model.expect_same_weights()
    assert not operations.ran


def test_training_mode(target):
    model = copy.deepcopy(target).train()
    with pytest.raises(sd.ConfigError, match=r"model.eval\(\)"):
        sd.Engine(model, None)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_of_a_part_in_training_mode(role, dtype):
    """It would make outputs random, though the model itself is in evaluation mode."""
    models = {name: tiny_model("gpt2").to(dtype) for name in ("target", "draft")}
    block = models[role].transformer.h[1]
    block.mlp.dropout.p = 0.01  # too little to be noticed as other logits on a paged KV cache
    block.train()
    message = r"computes other logits each time, and its module transformer\.h\.1 is in training.*model\.eval\(\)"
    with pytest.raises(sd.UnsupportedModelError, match=message):
        sd.Engine(models["target"], models["draft"])


def test_a_part_without_dropout_may_be_in_training_mode(target):
    """As every module is that replaces another one."""
    model = copy.deepcopy(target)
    model.model.layers[1].mlp.act_fn = torch.nn.SiLU()
    assert model.model.layers[1].mlp.act_fn.training
    outputs = [sd.Engine(one, None, enforce_eager=True).generate([[1, 2]])[0].token_ids for one in (model, target)]
    assert outputs[0] == outputs[1]


def test_draft_in_training_mode(target, draft):
    with pytest.raises(sd.ConfigError, match=r"draft LlamaForCausalLM is in training mode.*model.eval\(\)"):
        sd.Engine(target, copy.deepcopy(draft).train())
