"""Lazy negative views in a model: their memory holds other numbers than they do, and ops read memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import specdec_fast as sd
from specdec_fast.equivalence.compare import transformers_greedy
from support.experts import tiny_mixture
from support.grids import each_value_once
from support.lazy_signs import negative_view, with_lazy_weights
from support.models import tiny_model
from support.programs import needs_programs

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
PARAMS = sd.SamplingParams(max_new_tokens=4, logprobs=True)


def decoded(model: nn.Module, eager: bool) -> list[tuple[list[int], object]]:
    engine = sd.Engine(model, None, enforce_eager=eager)
    assert engine.target.has_program != eager, engine.describe()["why_no_program"]
    return [(output.token_ids, output.logprobs) for output in engine.generate(PROMPTS, PARAMS)]


# Linears with and without biases and as Conv1D, sinks, experts, transposed experts with biases.
@each_value_once
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        *(lambda name=name: tiny_model(name) for name in ("llama", "gpt2", "granite-swa")),
        *(lambda name=name: tiny_mixture(name) for name in ("mixtral", "gpt-oss")),
    ],
    ids=["llama", "gpt2", "granite-swa", "mixtral", "gpt-oss"],
)
@needs_programs
def test_weights_have_the_sign_that_they_show(make, eager):
    assert decoded(with_lazy_weights(make()), eager) == decoded(make(), eager)


def test_the_tokens_are_those_of_transformers():
    model = with_lazy_weights(tiny_model("llama"))
    outputs = sd.generate(model, None, PROMPTS, PARAMS, enforce_eager=True)
    assert [output.token_ids for output in outputs] == [transformers_greedy(model, ids, 4) for ids in PROMPTS]


# Queries, keys and values without RoPE, values, rows of linears, rows of experts, logits.
@pytest.mark.parametrize(
    ("architecture", "part"),
    [
        ("gpt2", "c_attn"),
        pytest.param("llama", "v_proj", marks=pytest.mark.grid),
        ("llama", "input_layernorm"),
        pytest.param("mixtral", "post_attention_layernorm", marks=pytest.mark.grid),
        ("llama", "lm_head"),
    ],
)
def test_results_of_a_module_have_the_sign_that_they_show(architecture, part):
    def with_hooks(change: Callable[[Tensor], Tensor]) -> nn.Module:
        model = tiny_mixture(architecture) if architecture == "mixtral" else tiny_model(architecture)
        for name, module in model.named_modules():
            if name.endswith(part):
                module.register_forward_hook(lambda module, args, output: change(output))
        return model

    assert decoded(with_hooks(negative_view), eager=True) == decoded(with_hooks(torch.clone), eager=True)


@needs_programs
def test_a_weight_that_becomes_lazy_in_place_is_noticed():
    """It stays the same parameter, at the same address."""
    engine = sd.Engine(tiny_model("llama"), None)
    weight = engine.target.model.lm_head.weight
    weight.data = torch._neg_view(weight.data)
    with pytest.raises(sd.UnsupportedModelError, match="moved, cast or negated"):
        engine.generate(PROMPTS, PARAMS)
