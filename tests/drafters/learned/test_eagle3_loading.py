"""EAGLE-3 checkpoints of three projects load alike, and one that does not fit is refused with the reason."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec_fast as sd
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import CHECKPOINT_DRAFTERS, DrafterContext, make_drafter
from specdec_fast.drafters.eagle3.checkpoint import is_eagle3, read_config
from specdec_fast.drafters.eagle3.drafter import Eagle3Drafter
from specdec_fast.drafters.eagle3.model import load_eagle3
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from support.eagle3 import FORMATS, HIDDEN, write_checkpoint
from support.models import TINY_GROUPED, VOCAB_SIZE, tiny_model

OPTIONS = {"draft_vocab_size": 30, "norm_before_residual": True, "fc_norm": True, "norm_output": True, "num_layers": 2}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_loads_alike(tmp_path, model, target, kind, shards):
    write_checkpoint(tmp_path / "one", model, "raw", (1, 2, 3), **OPTIONS)
    write_checkpoint(tmp_path / "other", model, kind, (1, 2, 3), **OPTIONS, shards=shards)
    one, other = (load_eagle3(tmp_path / name, target) for name in ("one", "other"))
    assert one.taps == other.taps == (1, 2, 3), "ids count from 1 in one format, and from 0 in the others"
    assert len(one.weights()) == len(other.weights()) > 20
    assert all(map(torch.equal, one.weights(), other.weights()))
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size")
    assert [getattr(one.config, name) for name in flags] == [getattr(other.config, name) for name in flags]
    assert other.target_ids.tolist() == (torch.arange(30) + load_weights(tmp_path / "one")["d2t"]).tolist()


def load_weights(folder):
    return torch.load(folder / "pytorch_model.bin", weights_only=True)


def test_weights_get_the_targets_dtype(tmp_path):
    model = tiny_model("llama").to(torch.bfloat16)
    target = RaggedModel(model, resolve(torch.device("cpu")))
    write_checkpoint(tmp_path, model)
    loaded = load_eagle3(tmp_path, target)
    assert {t.dtype for t in loaded.weights()} == {torch.bfloat16}
    assert loaded.layout.dtype == torch.bfloat16


def test_the_targets_embedding_is_shared(tmp_path, monkeypatch):
    model = type(tiny_model("llama"))(type(tiny_model("llama").config)(**TINY_GROUPED | {"hidden_size": HIDDEN})).eval()
    target = RaggedModel(model, resolve(torch.device("cpu")))
    write_checkpoint(tmp_path, model, shares_embedding=True)
    embedding = model.get_input_embeddings().weight.data_ptr()
    assert embedding in {weight.data_ptr() for weight in load_eagle3(tmp_path, target).weights()}


def test_default_taps_and_other_ones(tmp_path, model, target):
    write_checkpoint(tmp_path, model, taps=None)
    with pytest.raises(sd.ConfigError, match="layers has no default taps"):
        load_eagle3(tmp_path, target)
    assert load_eagle3(tmp_path, target, (0, 1, 3)).taps == (0, 1, 3)
    with pytest.raises(sd.ConfigError, match=r"do not fit .*contain 9.*tap_layers"):
        load_eagle3(tmp_path, target, (0, 1, 9))
    with pytest.raises(
        sd.ConfigError, match=r"fc.weight has the shape \[24, 96\]; expected \[24, 64\] \(2 taps of 32\)"
    ):
        load_eagle3(tmp_path, target, (0, 1))
    context = DrafterContext(target, EngineConfig(tap_layers=[1, 2, 0]))
    assert Eagle3Drafter(context, str(tmp_path)).taps == (1, 2, 0)
    with pytest.raises(sd.ConfigError, match=r"tap_layers=\[-1\]"):
        EngineConfig(tap_layers=[-1])


def test_missing_residual_flag_of_speculators_is_warned_of(tmp_path, model):
    write_checkpoint(tmp_path, model, "speculators")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["norm_before_residual"]
    path.write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="norm_before_residual"):
        assert not read_config(tmp_path).norm_before_residual


# What is wrong, and what the message says.
CONFIGS = {
    "architecture": (
        {"speculators_config": {"verifier": {"architectures": ["QwenForCausalLM"]}}},
        "for QwenForCausalLM",
    ),
    "hidden size": ({"target_hidden_size": 48}, "hidden states of 48, target .* has 32"),
    "kind": ({"speculators_model_type": "dflash"}, "kind 'dflash'"),
    "no layer": ({"transformer_layer_config": None}, "transformer_layer_config"),
    "vocabulary to draft": ({"draft_vocab_size": "many"}, "draft_vocab_size is 'many'"),
    "taps": ({"eagle_aux_hidden_state_layer_ids": "all"}, "eagle_aux_hidden_state_layer_ids is 'all'"),
    "no such tap": ({"eagle_aux_hidden_state_layer_ids": [0, 1, 77]}, "contain 77"),
}


@pytest.mark.parametrize(("wrong", "message"), CONFIGS.values(), ids=CONFIGS)
def test_configurations_that_do_not_fit_are_refused(tmp_path, model, target, wrong, message):
    write_checkpoint(tmp_path, model, "speculators", config=wrong)
    with pytest.raises(sd.ConfigError, match=message):
        load_eagle3(tmp_path, target)


LAYERS = {
    "vocabulary": ({"vocab_size": VOCAB_SIZE + 1}, "98 ids, target .* has 97"),
    "rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    "heads": ({"num_key_value_heads": 3}, "heads"),
    "size": ({"intermediate_size": None}, "lacks intermediate_size"),
    "window": ({"layer_types": ["sliding_attention"]}, "sliding_window"),
    "layer types": ({"layer_types": ["linear_attention"]}, "linear_attention"),
}


@pytest.mark.parametrize(("wrong", "message"), LAYERS.values(), ids=LAYERS)
def test_layers_that_do_not_fit_are_refused(tmp_path, model, target, wrong, message):
    write_checkpoint(tmp_path, model, "raw", config=wrong)
    with pytest.raises((sd.ConfigError, sd.VocabularyMismatchError), match=message):
        load_eagle3(tmp_path, target)


def edited(weights, **changes):
    weights = dict(weights)
    for key, value in changes.items():
        name = key.replace("__", ".")
        weights.pop(name, None) if value is None else weights.update({name: value})
    return weights


WEIGHTS = {
    "missing": (
        {"midlayer__mlp__up_proj__weight": None},
        r"lacks the weights layers.0.mlp.up_proj.weight \(1 in all\)",
    ),
    "no head": ({"lm_head__weight": None}, "lacks the weights lm_head.weight"),
    "no map": ({"d2t": None}, "lacks the weights d2t"),
    "unknown": ({"midlayer__mlp__router__weight": torch.ones(2)}, "layers.0.mlp.router.weight"),
    "shape": ({"norm__weight": torch.ones(5)}, r"norm.weight has the shape \[5\]; expected \[24\]"),
    "another width": ({"embed_tokens__weight": None}, r"no embed_tokens, and the target's is \[\d+, 32\]"),
    "id twice": ({"d2t": -torch.arange(30)}, "d2t maps 30 draft ids to 1 ids"),
    "id outside": ({"d2t": torch.full((30,), 90)}, "d2t"),
    "maps differ": ({"t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool)}, "t2d and d2t"),
}


@pytest.mark.parametrize(("changes", "message"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_that_do_not_fit_are_refused(tmp_path, model, target, changes, message):
    write_checkpoint(tmp_path, model, "raw", draft_vocab_size=30)
    torch.save(edited(load_weights(tmp_path), **changes), tmp_path / "pytorch_model.bin")
    with pytest.raises(sd.ConfigError, match=message):
        load_eagle3(tmp_path, target)


def test_files_that_cannot_be_read_are_refused(tmp_path, model, target):
    with pytest.raises(sd.ConfigError, match=r"config.json.*expected the folder of an EAGLE-3 drafter"):
        load_eagle3(tmp_path / "nowhere", target)
    write_checkpoint(tmp_path, model, "sglang", shards=2)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(sd.ConfigError, match=r"model-1\.safetensors"):
        load_eagle3(tmp_path, target)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(sd.ConfigError, match="has no weights"):
        load_eagle3(tmp_path, target)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(sd.ConfigError, match="cannot read the weights"):
        load_eagle3(tmp_path, target)


def test_buffers_of_other_tools_are_ignored(tmp_path, model, target):
    write_checkpoint(tmp_path, model, "speculators")
    path = tmp_path / "model.safetensors"
    extra = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "verifier_lm_head.weight": torch.ones(2, 2)}
    save_file(load_file(path) | extra, path)
    load_eagle3(tmp_path, target)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_folder_is_recognised_and_a_prefix_is_understood(tmp_path, model, target, kind):
    write_checkpoint(tmp_path, model, kind)
    assert is_eagle3(tmp_path)
    for draft in (str(tmp_path), f"eagle3:{tmp_path}", tmp_path):
        drafter = make_drafter(draft, target, EngineConfig(), None)
        assert isinstance(drafter, Eagle3Drafter)
        assert drafter.name == f"eagle3:{tmp_path}"


def test_folders_of_models_are_not_taken_for_drafters(tmp_path, model):
    model.save_pretrained(tmp_path)
    assert not is_eagle3(tmp_path)
    assert not is_eagle3(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", [kind for kind in CHECKPOINT_DRAFTERS if kind != "suffix"])  # which needs no file
def test_kind_without_a_folder_is_refused(model, kind):
    with pytest.raises(sd.ConfigError, match=f"pass '{kind}:FOLDER'"):
        sd.Engine(model, kind)
