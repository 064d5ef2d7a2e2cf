"""MTP layers are found in the target's checkpoint, in every format; what does not fit is refused with the reason."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import specdec_fast as sd
from specdec_fast.cli import main
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import CHECKPOINT_DRAFTERS, DrafterContext, checked_draft, make_drafter
from specdec_fast.drafters.mtp.checkpoint import read_mtp
from specdec_fast.drafters.mtp.drafter import MtpDrafter
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from support.models import tiny_model
from support.mtp import NAMES, NUM_LAYERS, PARTS, Case, write_mtp

OPS = resolve(torch.device("cpu"))
OWN = f"model.layers.{NUM_LAYERS}."


@pytest.fixture(scope="module")
def case():
    return Case("qwen3")


@pytest.fixture(scope="module")
def target(case):
    return RaggedModel(case.target, OPS)


@pytest.fixture
def folder(tmp_path, case):
    case.write(tmp_path, "deepseek")
    return tmp_path


def load(target, folder, **config):
    return MtpDrafter(DrafterContext(target, EngineConfig(**config)), str(folder))


def changed(folder, change):
    """Change the weights of a checkpoint of one file."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    write_mtp(folder, weights)


# What is read


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("shards", [1, 4])
def test_every_part_is_read(tmp_path, case, kind, shards):
    case.write(tmp_path, kind, shards)
    found = read_mtp(str(tmp_path), NUM_LAYERS)
    assert (found.format.name, found.num_layers) == (kind, 1)
    assert set(found.block) == set(case.block.state_dict())
    for name, weight in case.block.state_dict().items():
        assert torch.equal(found.block[name], weight)
    for part in PARTS:
        assert torch.equal(found.parts[f"{part}.weight"], case.parts[part])


@pytest.mark.parametrize(
    ("kind", "further"),
    [
        ("deepseek", [f"model.layers.{NUM_LAYERS + 1}.enorm.weight", f"model.layers.{NUM_LAYERS + 1}.mlp.x"]),
        ("mimo", ["model.mtp_layers.1.token_layernorm.weight"]),
        ("qwen", ["mtp.layers.1.mlp.down_proj.weight", "mtp.layers.1.input_layernorm.weight"]),
    ],
)
def test_of_several_layers_the_first_is_read(tmp_path, case, target, kind, further):
    case.write(tmp_path, kind)
    changed(tmp_path, lambda weights: weights.update({name: torch.ones(3) for name in further}))
    drafter = load(target, tmp_path)
    described = drafter.describe()
    assert (described["mtp_format"], described["num_mtp_layers"], described["graphs"]) == (kind, 2, False)


def test_only_the_layer_of_the_targets_depth_counts(folder):
    """Layer 3 is an MTP layer of a target of three layers, and of no other target."""
    with pytest.raises(sd.ConfigError, match=r"has no MTP layer: none of its \d+ weights is named model\.layers\.4\."):
        read_mtp(str(folder), NUM_LAYERS + 1)


def test_the_target_lends_embedding_and_output_layer_and_stays_as_it_is(folder, case):
    target = RaggedModel(case.target, OPS)
    before = {name: weight.clone() for name, weight in case.target.state_dict().items()}
    drafter = load(target, folder)
    one = drafter.model.ragged
    assert one.model.get_output_embeddings() is case.target.get_output_embeddings()
    assert case.target.config.vocab_size == one.vocab_size == target.vocab_size
    assert case.target.config.num_hidden_layers == NUM_LAYERS
    assert all(torch.equal(weight, before[name]) for name, weight in case.target.state_dict().items())
    assert all(weight.requires_grad for weight in case.target.parameters())
    shared = {weight.data_ptr() for weight in case.target.parameters()}
    own = [weight for weight in drafter.weights() if weight.data_ptr() not in shared]
    expected = sum(w.numel() for w in (*case.block.parameters(), *case.parts.values()))
    rotary = sum(buffer.numel() for buffer in one.model.buffers())
    assert sum(weight.numel() for weight in own) == expected + rotary


def test_kv_entries_are_those_of_one_layer_and_steps_are_counted(folder, target):
    drafter = load(target, folder)
    assert drafter.bytes_per_token * NUM_LAYERS == target.layout.bytes_per_token
    assert drafter.estimates_memory
    small, large = (drafter.step_bytes(count, 4, 64) for count in (1, 64))
    assert 0 < small < large


def test_it_runs_within_a_memory_budget(folder):
    engine = sd.Engine(str(folder), "mtp", max_batch_size=2, num_draft_tokens=2, memory_bytes=64 << 20)
    outputs = engine.generate([[1, 2, 3]] * 3, sd.SamplingParams(max_new_tokens=8, ignore_eos=True), progress=False)
    assert all(len(output.raise_for_error().token_ids) == 8 for output in outputs)


def test_doctor_measures_how_often_it_agrees(folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [1, 2, 3]}\n{"prompt_ids": [5, 6]}\n')
    options = ["--drafter", "mtp", "--prompts", str(prompts), "--num-tokens", "40", "--device", "cpu"]
    assert main(["doctor", "--target", str(folder), *options]) == 0
    header, _, row, *rest = capsys.readouterr().out.strip().splitlines()
    assert header.split() == ["offset", "layers", "agreement", "draft", "tokens"]
    assert row.split()[:2] == ["+0", "final"]
    assert int(row.split()[-1]) > 20
    assert not rest, "the output layer's input has no neighbours"


# How it is asked for


def test_names(folder, target):
    config = EngineConfig()
    for draft in ("mtp", "mtp:x", "mtp:ab"):
        assert checked_draft(draft, config) == draft
    drafter = make_drafter(f"mtp:{folder}", target, config, None)
    assert (type(drafter), drafter.name) == (MtpDrafter, f"mtp:{folder}")
    assert not CHECKPOINT_DRAFTERS["mtp"][1](folder), "a folder alone is a model"


def test_the_targets_own_checkpoint(folder):
    loaded = RaggedModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), OPS)
    drafter = make_drafter("mtp", loaded, EngineConfig(), None)
    assert drafter.name == "mtp"
    assert drafter.describe()["mtp_format"] == "deepseek"


def test_a_target_made_in_memory_has_no_checkpoint():
    loaded = RaggedModel(Case("qwen2").target, OPS)
    with pytest.raises(sd.ConfigError, match=r"made in memory; pass 'mtp:FOLDER'"):
        make_drafter("mtp", loaded, EngineConfig(), None)


def test_settings_that_it_does_not_read_are_refused(folder):
    with pytest.raises(sd.ConfigError, match=r"tap_layers=.* has no effect on the drafter 'mtp'"):
        sd.Engine(str(folder), "mtp", tap_layers=(0, 1))


# What is refused


def without(name):
    return lambda weights: weights.pop(f"{OWN}{name}")


def with_shape(name, *shape):
    return lambda weights: weights.update({f"{OWN}{name}": torch.zeros(shape)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("eh_proj.weight"), r"lacks weights of its MTP layer \(.*\): eh_proj.weight; take a complete"),
        (without("shared_head.norm.weight"), r"lacks weights of its MTP layer .*: shared_head.norm.weight"),
        (without("self_attn.k_proj.weight"), r"lacks weights of a layer of Qwen3ForCausalLM: .*self_attn.k_proj"),
        (with_shape("self_attn.extra.weight", 3), r"has unknown weights of a layer .*self_attn.extra.weight"),
        (with_shape("enorm.weight", 31), r"enorm.weight in the MTP layer of .* has the shape \[31\]; expected \[32\]"),
        (
            with_shape("eh_proj.weight", 32, 32),
            r"eh_proj.weight in the MTP layer of .* has the shape \[32, 32\]; expected \[32, 64\]",
        ),
        (
            with_shape("shared_head.norm.weight", 5),
            r"shared_head.norm.weight in the MTP layer of .* has the shape \[5\]; expected \[32\]",
        ),
        (with_shape("mlp.up_proj.weight", 64, 31), r"mlp.up_proj.weight in the MTP .* \[64, 31\]; expected \[64, 32\]"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused(folder, target, change, message):
    changed(folder, change)
    with pytest.raises(sd.ConfigError, match=message):
        load(target, folder)


def test_unknown_weights_beside_the_layer_are_refused(tmp_path, case):
    case.write(tmp_path, "qwen")
    changed(tmp_path, lambda weights: weights.update({"mtp.gate.weight": torch.zeros(1)}))
    with pytest.raises(sd.ConfigError, match=r"has weights that are not known: mtp.gate.weight \(1 in all\)"):
        read_mtp(str(tmp_path), NUM_LAYERS)


def test_a_checkpoint_without_one_is_refused(tmp_path, case):
    case.target.save_pretrained(tmp_path)
    with pytest.raises(sd.ConfigError, match=r"has no MTP layer: none of its \d+ weights .* model\.layers\.3\."):
        sd.Engine(str(tmp_path), "mtp")


def test_files_that_cannot_be_read_are_refused(tmp_path, folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(sd.ConfigError, match="is no folder or downloaded model with weights in safetensors"):
        read_mtp(str(empty), NUM_LAYERS)
    (empty / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(sd.ConfigError, match="cannot read the weights in"):
        read_mtp(str(empty), NUM_LAYERS)
    (empty / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(sd.ConfigError, match="cannot read the index of weights"):
        read_mtp(str(empty), NUM_LAYERS)
    names = {f"{OWN}{name}.weight": "gone.safetensors" for name in NAMES["deepseek"][1:]}
    (empty / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(sd.ConfigError, match=r"cannot read model\.layers\.3\..* in .*gone\.safetensors"):
        read_mtp(str(empty), NUM_LAYERS)


def test_a_target_with_sliding_windows_is_refused(folder):
    target = RaggedModel(tiny_model("mistral-window"), OPS)
    with pytest.raises(sd.NotYetSupportedError, match="sliding windows, chunks or indexers in 3 of its 3 layers"):
        load(target, folder)
