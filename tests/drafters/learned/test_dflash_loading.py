"""DFlash and DSpark checkpoints of three projects load alike; one that does not fit is refused with the reason."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import specdec_fast as sd
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import DrafterContext, make_drafter
from specdec_fast.drafters.dflash.checkpoint import is_dflash, read_config
from specdec_fast.drafters.dflash.drafter import DFlashDrafter
from specdec_fast.drafters.dflash.model import load_dflash
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from support.dflash import FORMATS, MASK, RANK, write_checkpoint
from support.lazy_signs import with_lazy_weights
from support.models import TINY_GROUPED, VOCAB_SIZE, tiny_model
from support.peak_memory import peak_bytes

KINDS = {"dflash": {}, "dspark": {"markov": "gated", "draft_vocab_size": 40, "own_embedding": True, "bias": True}}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_every_format_loads_alike(tmp_path, model, target, options):
    loaded = []
    for kind in FORMATS:
        write_checkpoint(tmp_path / kind, model, kind, **options)
        loaded.append(load_dflash(tmp_path / kind, target))
    settings = [{name: value for name, value in vars(each.config).items() if name != "folder"} for each in loaded]
    assert settings[2].pop("verifiers") == (type(model).__name__,)
    assert [own.pop("layer").to_dict() for own in settings] == [loaded[0].config.layer.to_dict()] * 3
    for own in settings[:2]:
        assert own.pop("verifiers") == ()
    assert settings == settings[:1] * 3
    assert [each.taps for each in loaded] == [(1, 2)] * 3, "ids count from 1 in one format, and from 0 in the others"
    for each in loaded[1:]:
        assert all(map(torch.equal, each.weights(), loaded[0].weights()))
    config = loaded[0].config
    assert (config.mask_token_id, config.sample_from_anchor) == (MASK, bool(options))
    assert config.markov_rank == (RANK if options else 0)
    embedding = model.get_input_embeddings().weight.data_ptr()
    shares = embedding in {weight.data_ptr() for weight in loaded[0].weights()}
    assert shares is not bool(options), "a checkpoint without an embedding of its own uses the target's memory"


@pytest.mark.parametrize("kind", FORMATS)
def test_a_folder_is_recognised_and_a_prefix_is_understood(tmp_path, model, target, kind):
    write_checkpoint(tmp_path, model, kind, draft_vocab_size=30)
    assert is_dflash(tmp_path)
    for draft in (str(tmp_path), f"dflash:{tmp_path}", tmp_path):
        drafter = make_drafter(draft, target, EngineConfig(), None)
        assert isinstance(drafter, DFlashDrafter)
        assert drafter.name == f"dflash:{tmp_path}"
        assert drafter.describe()["block_size"] == 6


def test_folders_of_others_are_not_taken_for_dflash(tmp_path, model):
    model.save_pretrained(tmp_path)
    assert not is_dflash(tmp_path)
    assert not is_dflash(tmp_path / "nowhere")


def test_the_taps_of_the_settings_replace_those_of_the_checkpoint(tmp_path, model, target):
    write_checkpoint(tmp_path, model)
    assert load_dflash(tmp_path, target, (0, 3)).taps == (0, 3)
    with pytest.raises(sd.ConfigError, match=r"fc.weight has the shape .*3 taps of 32"):
        load_dflash(tmp_path, target, (0, 1, 3))
    write_checkpoint(tmp_path, model, taps=None)
    with pytest.raises(sd.ConfigError, match="pass tap_layers"):
        load_dflash(tmp_path, target)


CAUSAL = {
    "layer types": ({"windows": (None, 9)}, (False, True)),
    "no windows": ({}, (False, False)),
    "setting": ({"causal": True}, (True, True)),
    "setting against types": ({"windows": (9, 9), "causal": True}, (True, True)),
}


@pytest.mark.parametrize(("options", "causal"), CAUSAL.values(), ids=CAUSAL)
def test_which_layers_are_causal(tmp_path, model, options, causal):
    write_checkpoint(tmp_path, model, **options)
    config = read_config(tmp_path)
    assert config.causal == causal
    assert config.sliding_windows == options.get("windows", (None, None))


SETTINGS = {
    "vocabulary": ({"vocab_size": 50}, sd.VocabularyMismatchError, "made for 50 ids"),
    "hidden size": ({"target_hidden_size": 48}, sd.ConfigError, "made for hidden states of 48"),
    "taps": ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 9]}}, sd.ConfigError, "Pass tap_layers"),
    "no list": ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": 4}}, sd.ConfigError, "list of integers"),
    "mask": ({"dflash_config": {"mask_token_id": VOCAB_SIZE}}, sd.ConfigError, f"an id below {VOCAB_SIZE}"),
    "no mask": ({"dflash_config": {"target_layer_ids": [0, 1]}}, sd.ConfigError, "mask_token_id is None"),
    "block": ({"block_size": 1}, sd.ConfigError, "block_size is 1; expected at least 2"),
    "head": ({"markov_head_type": "deep"}, sd.ConfigError, "markov_head_type is 'deep'"),
    "confidence": (
        {"enable_confidence_head": True, "confidence_head_with_markov": True},
        sd.ConfigError,
        "markov_rank is not",
    ),
    "domino": ({"projector_type": "domino"}, sd.ConfigError, "projector_type 'domino'"),
    "rope": ({"rope_is_neox_style": False}, sd.ConfigError, "interleaved rotary"),
    "sinks": ({"add_swa_attention_sink_bias": True}, sd.ConfigError, "attention sinks"),
    "rope type": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, sd.ConfigError, "rotary embedding"),
    "sees ahead": (
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "is_causal": False},
        sd.ConfigError,
        "not causal",
    ),
    "another kind": ({"speculators_model_type": "dflash2"}, sd.ConfigError, "kind 'dflash2'"),
}


@pytest.mark.parametrize(("wrong", "error", "message"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_do_not_fit_are_refused(tmp_path, model, target, wrong, error, message):
    write_checkpoint(tmp_path, model, config=wrong)
    with pytest.raises(error, match=message):
        load_dflash(tmp_path, target)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path, model, target):
    verifier = {"speculators_config": {"verifier": {"architectures": ["Qwen3ForCausalLM"]}}}
    write_checkpoint(tmp_path, model, "speculators", config=verifier)
    with pytest.raises(sd.ConfigError, match="made for Qwen3ForCausalLM; the target is a LlamaForCausalLM"):
        load_dflash(tmp_path, target)


@pytest.mark.parametrize("settings", [{}, {"output_multiplier": 2.0}, {"final_logit_softcapping": 5.0}], ids=str)
def test_the_memory_of_logits_is_estimated(tmp_path, monkeypatch, settings):
    """A wide vocabulary, and few hidden states that wait, so that logits are most of it."""
    monkeypatch.setattr("specdec_fast.drafters.shared.tapped.MOST_QUEUED_BYTES", 0)
    model = LlamaForCausalLM(LlamaConfig(**TINY_GROUPED | {"vocab_size": 16_000})).eval()
    write_checkpoint(tmp_path, model, config=settings)
    target = RaggedModel(model, resolve(torch.device("cpu")))
    drafter = DFlashDrafter(DrafterContext(target, EngineConfig()), str(tmp_path))
    hidden = torch.randn(8 * 5, model.config.hidden_size)
    needed = peak_bytes(lambda: drafter.model.logits(hidden))
    assert needed <= drafter.step_bytes(8, 5, 8) < 1.4 * needed


def test_a_shared_output_layer_has_the_sign_that_it_shows(tmp_path, model):
    write_checkpoint(tmp_path, model)
    hidden = torch.randn(4, model.config.hidden_size)
    targets = [tiny_model("llama"), with_lazy_weights(tiny_model("llama"))]
    plain, lazy = (load_dflash(tmp_path, RaggedModel(each, resolve(torch.device("cpu")))) for each in targets)
    assert torch.equal(lazy.logits(hidden), plain.logits(hidden))


WEIGHTS = {
    "missing": ({"layers.1.self_attn.k_norm.weight": None}, r"lacks the weights layers.1.self_attn.k_norm.weight"),
    "no Markov head": ({"markov_head.markov_w2.weight": None}, "lacks the weights markov_head.markov_w2.weight"),
    "no head": ({"lm_head.weight": None}, "lacks the weights lm_head.weight"),
    "no map": ({"d2t": None}, "lacks the weights d2t"),
    "unknown": ({"candidate_selector.hidden_projection.weight": torch.ones(2)}, "weights that DSpark does not: cand"),
    "shape": ({"hidden_norm.weight": torch.ones(5)}, r"hidden_norm.weight has the shape \[5\]; expected \[24\]"),
    "another width": ({"embed_tokens.weight": None}, r"has no embed_tokens, and the target's is \[\d+, 32\]"),
    "id twice": ({"d2t": -torch.arange(40)}, "d2t maps 40 draft ids to 1 ids"),
}


@pytest.mark.parametrize(("changes", "message"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_that_do_not_fit_are_refused(tmp_path, model, target, changes, message):
    write_checkpoint(tmp_path, model, **KINDS["dspark"])
    path = tmp_path / "model.safetensors"
    weights = load_file(path) | changes
    save_file({name: weight for name, weight in weights.items() if weight is not None}, path)
    with pytest.raises(sd.ConfigError, match=message):
        load_dflash(tmp_path, target)
