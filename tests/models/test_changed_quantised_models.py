"""Models whose weights are codes: ``half()`` and ``to(dtype)`` keep the weights, and no broken checkpoint is saved."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

import specdec_fast as sd
from specdec_fast.models.loading import load_model
from specdec_fast.models.quantized_linears import PackedModule
from specdec_fast.models.rounded_models import rounded_copy
from specdec_fast.quantization.packed_weight import TENSORS
from support.experts import tiny_mixture
from support.models import tiny_model

CASTS = {
    "half": (lambda model: model.half(), torch.float16),
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16),
    "to": (lambda model: model.to(torch.bfloat16), torch.bfloat16),
    "back": (lambda model: model.to("cpu", torch.float16).float(), torch.float32),
}
each_cast = pytest.mark.parametrize(("cast", "dtype"), list(CASTS.values()), ids=list(CASTS))


def codes_of(model):
    modules = {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}
    assert modules
    return {
        (name, tensor): copy.deepcopy(getattr(module, tensor)) for name, module in modules.items() for tensor in TENSORS
    }


@each_cast
@pytest.mark.parametrize(
    "make", [partial(tiny_model, "llama"), partial(tiny_mixture, "qwen3-moe")], ids=["dense", "experts"]
)
def test_casts_keep_the_weights_and_change_the_rows(make, cast, dtype):
    model = rounded_copy(make(), "int4")
    before = codes_of(model)
    changed = cast(model)
    after = codes_of(changed)
    assert {key for key, value in before.items() if value is not None} >= {
        key for key in after if after[key] is not None
    }
    for key, value in before.items():
        assert value is None or (after[key].dtype == value.dtype and torch.equal(after[key], value)), key
    assert {module.dtype for module in changed.modules() if isinstance(module, PackedModule)} == {dtype}
    assert {parameter.dtype for parameter in changed.parameters()} == {dtype}


@pytest.mark.parametrize("quantization", ["int8", "int4-a8"])
def test_a_model_that_was_cast_is_served(quantization):
    model = rounded_copy(tiny_model("llama"), quantization).bfloat16()
    prompts = [[5, 9, 23, 5, 9], [7, 8]]
    params = sd.SamplingParams(max_new_tokens=6)
    outputs = [sd.Engine(model, draft).generate(prompts, params) for draft in (None, "ngram")]
    assert [each.raise_for_error().token_ids for each in outputs[0]] == [each.token_ids for each in outputs[1]]
    assert sd.Engine(model, None).describe()["dtype"] == "bfloat16"


def test_a_bias_is_cast():
    linear = rounded_copy(tiny_model("gpt-neox"), "int8").half().gpt_neox.layers[0].mlp.dense_4h_to_h
    assert isinstance(linear, PackedModule)
    assert linear.bias.dtype == torch.float16


def loaded(folder):
    tiny_model("llama").save_pretrained(folder)
    return load_model(folder, None, None, "target", "int8")


def copied(folder):
    return rounded_copy(tiny_mixture("qwen3-moe"), "int4")


@pytest.mark.parametrize("make", [loaded, copied])
def test_no_checkpoint_is_saved_that_nothing_reads(make, tmp_path):
    model = make(tmp_path / "plain")
    for part in (model, model.model, copy.deepcopy(model)):
        with pytest.raises(sd.NotYetSupportedError, match="keep the folder or file that it was loaded from"):
            part.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_the_target_of_a_self_draft_is_saved_as_before(tmp_path):
    model = tiny_model("llama")
    sd.Engine(model, "self")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_codes_are_kept_by_a_state_dict():
    model = rounded_copy(tiny_model("llama"), "int4")
    other = rounded_copy(tiny_model("llama", seed=1), "int4")
    other.load_state_dict(model.state_dict())
    before = codes_of(model)
    assert all(value is None or torch.equal(value, before[key]) for key, value in codes_of(other).items())
