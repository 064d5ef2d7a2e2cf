"""What a drafter of the target's own weights shares, holds, reports and refuses."""

from __future__ import annotations

from threading import Lock

import pytest
import torch

import specdec_fast as sd
from specdec_fast.drafters.self_draft.drafter import SelfDrafter
from specdec_fast.models.quantized_linears import quantized_linears
from specdec_fast.models.rounded_models import rounded_copy
from support.models import tiny_model
from support.recurrent_models import recurrent_model
from support.sharded import take_for_sharded


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def own_tensors(engine):
    shared = {tensor.data_ptr() for tensor in (*engine.target.model.parameters(), *engine.target.model.buffers())}
    return [tensor for tensor in engine.drafter.weights() if tensor.data_ptr() not in shared]


@pytest.mark.parametrize(("draft", "name"), [("self", "self:int4"), ("self:int4", "self:int4"), ("self:int8",) * 2])
def test_the_copy_holds_its_codes_alone(model, draft, name):
    engine = sd.Engine(model, draft)
    linears = quantized_linears(engine.drafter.model.model)
    described = engine.describe()
    assert described["drafter"] == name
    own = own_tensors(engine)
    assert described["draft"]["own_weight_bytes"] == sum(tensor.nbytes for tensor in own)
    assert sum(linear.packed.nbytes for linear in linears.values()) == sum(tensor.nbytes for tensor in own)
    whole = sum(linear.weight.nbytes for linear in model.modules() if isinstance(linear, torch.nn.Linear))
    assert sum(tensor.nbytes for tensor in own) < whole / 2
    assert not quantized_linears(model), "the target stays as it is"


def test_the_plan_counts_the_codes_and_no_pages(model):
    engine = sd.Engine(model, "self", memory_bytes=10**7)
    plain = sd.Engine(model, None, memory_bytes=10**7)
    terms, without = engine.memory_plan.terms, plain.memory_plan.terms
    assert terms["drafter weights"] == engine.describe()["draft"]["own_weight_bytes"]
    assert terms["drafter steps"] > 0
    assert "drafter KV entries" not in terms or terms["drafter KV entries"] == 0
    assert terms["target weights"] == without["target weights"]


def test_a_budget_without_room_for_the_codes_decodes_plainly(model):
    settings = {"kv_cache_tokens": 64, "max_batch_size": 1, "max_prefill_tokens": 1}
    least = sum(sd.Engine(model, None, memory_bytes=10**7, **settings).memory_plan.terms.values())
    engine = sd.Engine(model, "self", memory_bytes=least, **settings)
    assert engine.describe()["drafter"] == "none"
    output = engine.generate([[5, 9, 23]], sd.SamplingParams(max_new_tokens=8))[0]
    assert output.raise_for_error().stats.num_draft_tokens == 0


def test_a_budget_without_room_for_the_codes_makes_no_copy(model, tmp_path, monkeypatch):
    """Known from the config, before anything is loaded."""
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(SelfDrafter, "__init__", None)
    settings = {"kv_cache_tokens": 64, "max_batch_size": 1, "max_prefill_tokens": 1, "dtype": "float32"}
    whole = sum(sd.Engine(tmp_path, None, memory_bytes=10**7, **settings).memory_plan.terms.values())
    assert sd.Engine(tmp_path, "self", memory_bytes=whole + 1000, **settings).drafter.name == "none"


def test_costs_are_measured(model):
    drafter = sd.Engine(model, "self").drafter
    seconds = drafter.forward_seconds([1, 2, 8])
    assert set(seconds) == {0, 1, 2, 8}
    assert all(value >= 0 for value in seconds.values())
    assert seconds[1] > 0


def test_a_changed_target_is_noticed(model):
    changed = tiny_model("llama")
    engine = sd.Engine(changed, "self")
    engine.drafter.model.model.model.layers[0].mlp = torch.nn.Identity()
    with pytest.raises(sd.UnsupportedModelError, match="have been replaced"):
        engine.generate([[5, 9, 23]], sd.SamplingParams(max_new_tokens=4))


def test_recurrent_targets_are_refused():
    with pytest.raises(sd.NotYetSupportedError, match=r"draft='self:int4' does not serve .*: its recurrent layers"):
        sd.Engine(recurrent_model("qwen3.5"), "self")


def test_sharded_targets_are_refused(model, monkeypatch):
    take_for_sharded(monkeypatch)
    with pytest.raises(sd.NotYetSupportedError, match=r"draft='self:int8' does not serve .*: its weights are sharded"):
        sd.Engine(model, "self:int8")


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_quantised_targets_are_refused(model, quantization):
    with pytest.raises(
        sd.ConfigError, match="its linears are quantised already; a copy of 4-bit weights gains nothing"
    ):
        sd.Engine(rounded_copy(model, quantization), "self", enforce_eager=True)


def test_trees_are_refused(model):
    with pytest.raises(sd.ConfigError, match="draft_tree=8 has no effect on the drafter 'self:int4'"):
        sd.Engine(model, "self", draft_tree=8)
    assert sd.Engine(model, "self", draft_tree="chain").drafter.max_nodes == 0


def test_a_model_without_linears_is_refused(model, monkeypatch):
    monkeypatch.setattr("specdec_fast.models.rounded_models.linears_to_round", lambda *_: {})
    with pytest.raises(sd.ConfigError, match=r"draft='self:int4': .*LlamaForCausalLM has no linear layers"):
        sd.Engine(model, "self")


def test_other_numbers_of_bits_are_compared_with_known_ones(model):
    with pytest.raises(sd.ConfigError, match=r"draft='self:int5': did you mean 'self:int[48]'"):
        sd.Engine(model, "self:int5")


def test_a_model_that_cannot_be_copied_is_refused():
    model = tiny_model("llama")
    model.lock = Lock()
    with pytest.raises(sd.NotYetSupportedError, match=r"LlamaForCausalLM cannot be copied: cannot pickle.*lock"):
        sd.Engine(model, "self")


def test_a_weight_that_cannot_be_rounded_is_named():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 1e9  # finite, and too large for a scale
    with pytest.raises(sd.ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight cannot be quantised"):
        sd.Engine(model, "self")
