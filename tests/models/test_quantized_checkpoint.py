"""Checkpoints with codes of their own: logits, exactness under speculation, memory, and refusals."""

from __future__ import annotations

import copy
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import specdec_fast as sd
from specdec_fast.errors import ConfigError
from specdec_fast.models.loading import load_model
from specdec_fast.models.quantized_linears import QuantizedLinear, quantized_linears
from specdec_fast.planner.checkpoint import checkpoint_sizes
from specdec_fast.runner.model_memory import bytes_of, weights_of
from support.checkpoint_codes import CONFIGS, write_with_codes
from support.grids import grid
from support.models import TINY_GROUPED, VOCAB_SIZE

SIZES = {**TINY_GROUPED, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
PROMPTS = [[5, 9, 2, 7, 9, 2, 7], [11, 3, 3, 8], [1]]


def tiny(name):
    """Return a random model; some with biases and with heads whose width is not that of the inputs."""
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, head_dim=32) if name in ("gptq", "fp8-blocks") else LlamaConfig(**SIZES)
    config.attention_bias = name in ("awq", "int8")
    model = AutoModelForCausalLM.from_config(config).eval()
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            parameter.data.normal_(std=0.3)
    return model


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function that writes a checkpoint of a format once: its folder, and the model of exact weights."""
    made = {}

    def write(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, write_with_codes(folder, tiny(name), name)
        return made[name]

    return write


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_weights_in_fp64(name, written):
    """At most four times as far as the logits of PyTorch's own linears in fp32 with the same weights."""
    folder, exact = written(name)
    ids = torch.arange(40).view(2, 20) * 7 % VOCAB_SIZE
    with torch.no_grad():
        expected = exact(ids).logits
        model = load_model(folder, torch.float32, torch.device("cpu"))
        found = model(ids).logits
        plain = tiny(name)
        plain.load_state_dict(exact.state_dict())
        rounding = (plain(ids).logits - expected).abs().max()
    assert len(quantized_linears(model)) == 14
    assert type(model.lm_head) is nn.Linear
    assert (found - expected).abs().max() <= 4 * rounding


@pytest.mark.parametrize("name", grid(list(CONFIGS), keep=["gptq-act-order"]))
def test_speculation_gives_the_tokens_of_plain_decoding(name, written, tmp_path):
    """In a forward program, act-order included. The draft has the same weights in bf16, so most of its tokens agree."""
    folder, exact = written(name)
    copy.deepcopy(exact).bfloat16().save_pretrained(tmp_path)
    params = [
        sd.SamplingParams(max_new_tokens=24, logprobs=True),
        sd.SamplingParams(max_new_tokens=24, logprobs=True, temperature=1.0, seed=3),
        sd.SamplingParams(max_new_tokens=24, logprobs=True),
    ]
    plain = sd.Engine(folder, None, dtype="bfloat16", max_batch_size=1)
    assert plain.describe()["forward_program"], plain.describe()["why_no_program"]
    speculative = sd.Engine(folder, tmp_path, dtype="bfloat16", max_batch_size=3, num_draft_tokens=4)
    expected = plain.generate(PROMPTS, params, progress=False)
    found = speculative.generate(PROMPTS, params, progress=False)
    assert all(each.error is None and len(each.token_ids) == 24 for each in expected)
    assert [(each.token_ids, each.logprobs) for each in found] == [
        (each.token_ids, each.logprobs) for each in expected
    ]  # fmt: skip
    assert all(each.stats.mean_acceptance_length > 2 for each in found)


def test_no_weight_exists_in_full_precision(written, monkeypatch):
    """Every linear but the output layer has codes alone, and none of its size exists while the model is loaded."""
    folder, _ = written("int4")
    largest = []
    original = torch.empty_like

    def seen(tensor, **kwargs):
        largest.append(tensor.shape)
        return original(tensor, **kwargs)

    monkeypatch.setattr(torch, "empty_like", seen)
    model = load_model(folder, None, torch.device("cpu"))
    names = {key for key, _ in model.named_parameters()}
    assert names == {key for key in names if "norm" in key or "embed" in key or "lm_head" in key}
    assert not [shape for shape in largest if len(shape) == 2]
    assert not hasattr(model.config, "quantization_config")
    assert all(isinstance(each, QuantizedLinear) and not each.training for each in quantized_linears(model).values())


def rewritten(folder, tmp_path, change, config=None):
    """Copy a checkpoint with other tensors or another config."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"].update(config or {})
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{DOWN}.qzeros"), f"model.safetensors: {DOWN}.qzeros is missing"),
        (lambda t: t.pop(f"{DOWN}.qweight"), f"model.safetensors: {DOWN}.qweight is missing, although"),
        (lambda t: t[f"{DOWN}.scales"].fill_(float("inf")), f"model.safetensors: {DOWN}.scales has numbers that are"),
        (lambda t: t[f"{DOWN}.g_idx"].fill_(99), f"model.safetensors: {DOWN}.g_idx has group 99 at 0; expected 0 to 3"),
        (lambda t: t.update({f"{DOWN}.extra": torch.ones(1)}), f"{DOWN}.extra is a tensor that its format does not"),
        (lambda t: t.update({f"{DOWN}.bias": torch.ones(64)}), f"{DOWN}.bias is not 0, and the model's linear has no"),
        (lambda t: t.update({"a.b.qweight": torch.ones(1)}), "tensors of codes of a.b belong to no plain linear of Q"),
        (lambda t: t.pop("model.norm.weight"), "lacks weights of Qwen3ForCausalLM: model.norm.weight"),
    ],
)
def test_damaged_tensors_are_refused_with_file_and_name(change, message, written, tmp_path):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        load_model(rewritten(written("gptq")[0], tmp_path, change), None, torch.device("cpu"))


class RunsCode:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("quantization", [None, "int4"], ids=["codes", "rounded"])
def test_no_code_in_files_is_run(quantization, written, tmp_path):
    """Of a checkpoint with codes, and of one that is rounded while it is loaded."""
    fields = json.loads((written("gptq")[0] / "config.json").read_text())
    if quantization is not None:
        del fields["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    torch.save({"model.norm.weight": RunsCode(tmp_path / "made")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError) as caught:
        load_model(tmp_path, None, torch.device("cpu"), quantization=quantization)
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "made").exists()


def test_config_and_tensors_must_agree(written, tmp_path):
    folder = rewritten(written("gptq")[0], tmp_path, lambda t: None, {"group_size": 128, "desc_act": False})
    with pytest.raises(ConfigError, match=r"qzeros has shape \[2, 16\]; expected \[1, 16\]"):
        load_model(folder, None, torch.device("cpu"))
    folder = rewritten(written("int4")[0], tmp_path, lambda t: None, {"ignore": ["lm_head", "re:.*q_proj"]})
    with pytest.raises(ConfigError, match=r"q_proj\.weight_packed is a tensor of codes, but quantization_config"):
        load_model(folder, None, torch.device("cpu"))
    folder = rewritten(written("gptq")[0], tmp_path, lambda t: None, {"bits": 3})
    with pytest.raises(ConfigError, match=r"quantization_config\.bits is 3; expected 4 or 8"):
        load_model(folder, None, torch.device("cpu"))


def test_a_bias_of_zeros_is_dropped(written, tmp_path):
    """GPTQ stores one for every linear, also for those without a bias."""
    folder = rewritten(written("gptq")[0], tmp_path, lambda t: t.update({f"{DOWN}.bias": torch.zeros(64).half()}))
    assert load_model(folder, None, torch.device("cpu")).get_submodule(DOWN).bias is None


def test_codes_of_a_tied_output_layer_are_refused(written, tmp_path):
    folder = rewritten(written("gptq")[0], tmp_path, lambda t: t.update({"lm_head.qweight": torch.ones(1)}))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    with pytest.raises(ConfigError, match=r"codes of lm_head, whose weight is that of model\.embed_tokens\.weight"):
        load_model(folder, None, torch.device("cpu"))


@pytest.mark.parametrize(("role", "setting"), [("target", "quantization"), ("draft", "draft_quantization")])
def test_a_checkpoint_with_codes_is_not_rounded(written, role, setting):
    folder, _ = written("int4")
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match=rf"{setting}='int8' .* quantised already \(compressed-tensors\)"):
        load_model(folder, None, cpu, role, quantization="int8")
    with pytest.raises(ConfigError, match=rf"{setting}='int8' .*LlamaForCausalLM are quantised already \(int4\)"):
        load_model(load_model(folder, None, cpu), None, cpu, role, quantization="int8")
    with pytest.raises(ConfigError, match=r"quantised already \(int4\)"):
        checkpoint_sizes(folder, torch.bfloat16, "int4")


def test_rows_are_rounded_for_codes_of_whole_numbers_alone(written):
    cpu = torch.device("cpu")
    model = load_model(written("gptq")[0], None, cpu, quantization="a8")
    assert all(module.rounds_rows for module in quantized_linears(model).values())
    with pytest.raises(ConfigError, match=r"draft_quantization='a8' does not serve model\..* are float8_e4m3"):
        load_model(written("fp8")[0], None, cpu, "draft", quantization="a8")


@pytest.mark.parametrize("name", grid(list(CONFIGS), keep=list(CONFIGS)[::3]))
def test_bytes_are_known_before_loading(name, written):
    """From the files, codes unread."""
    folder, _ = written(name)
    model = load_model(folder, torch.bfloat16, torch.device("cpu"))
    held = bytes_of(weights_of(model))
    assert checkpoint_sizes(folder, torch.bfloat16).weights == held
    assert checkpoint_sizes(model, None).weights == held


def test_a_budget_that_only_the_codes_meet(written):
    folder, exact = written("int4")
    whole = bytes_of(exact.parameters()) // 4  # in bf16
    with pytest.raises(sd.MemoryBudgetError):
        sd.Engine(folder, None, dtype="bfloat16", memory_bytes=whole // 2)
    engine = sd.Engine(folder, None, dtype="bfloat16", memory_bytes=whole * 2)
    planned = engine.memory_plan.describe()
    assert planned["planned_bytes"] <= whole * 2
    assert planned["terms"]["target weights"] == checkpoint_sizes(folder, torch.bfloat16).weights < whole
