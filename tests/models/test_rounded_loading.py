"""Weights rounded while a folder is loaded: the bits of rounding after loading, memory, and refusals."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from specdec_fast.errors import ConfigError
from specdec_fast.models import rounded_loading
from specdec_fast.models.loading import load_model
from specdec_fast.models.quantized_linears import quantized_linears
from specdec_fast.models.rounded_models import round_weights
from specdec_fast.planner.checkpoint import checkpoint_sizes
from specdec_fast.runner.model_memory import bytes_of, weights_of
from support.experts import CONFIGS as MIXTURES
from support.experts import tiny_mixture
from support.grids import grid
from support.models import CONFIGS, TINY_GROUPED, tiny_model
from support.peak_memory import peak_bytes
from support.recurrent_models import FAMILIES, recurrent_model

CPU = torch.device("cpu")


def tied():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**TINY_GROUPED, "tie_word_embeddings": True})).eval()


MODELS = {
    "tied": tied,
    **{name: lambda name=name: tiny_model(name) for name in CONFIGS},
    **{f"mixture-{name}": lambda name=name: tiny_mixture(name) for name in MIXTURES},
    **{f"recurrent-{name}": lambda name=name: recurrent_model(name) for name in FAMILIES},
}
KEEP_FP32 = ["mixture-dots1", "mixture-deepseek-v3", "recurrent-bailing"]  # some buffers, whatever the dtype
KEPT = ["tied", "llama", "gpt2", "mixture-qwen3-moe", "mixture-gpt-oss", "mixture-deepseek-v3", "recurrent-mamba"]


def rounded_after_loading(folder, dtype, quantization):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    round_weights(model, quantization)
    return model


def expect_same(found, expected):
    """The same modules with the same bits, nothing left on the meta device, and nothing said to be quantised."""
    assert [(name, type(each)) for name, each in found.named_modules()] == [
        (name, type(each)) for name, each in expected.named_modules()
    ]
    tensors = dict(found.state_dict())
    assert list(tensors) == list(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name
    assert not any(module.training for module in found.modules())
    assert not hasattr(found.config, "quantization_config")
    assert not hasattr(found, "hf_quantizer")


@pytest.mark.parametrize("name", grid(list(MODELS), keep=list(KEPT)[::3]))
def test_bits_are_those_of_rounding_after_loading(name, tmp_path, monkeypatch):
    MODELS[name]().bfloat16().save_pretrained(tmp_path)
    expected = rounded_after_loading(tmp_path, torch.bfloat16, "int4")
    streamed = []
    take = rounded_loading._RoundingLoader.take
    monkeypatch.setattr(
        rounded_loading._RoundingLoader,
        "take",
        lambda self, name, weight: take(self, name, weight) and not streamed.append(name),
    )
    model = load_model(tmp_path, torch.bfloat16, CPU, quantization="int4")
    expect_same(model, expected)
    if name not in KEEP_FP32:
        assert checkpoint_sizes(tmp_path, torch.bfloat16, "int4").weights == bytes_of(weights_of(model))
    linears = {f"{each}.weight" for each, module in quantized_linears(model).items() if module.dtype == torch.bfloat16}
    tied = {each for pair in getattr(model, "all_tied_weights_keys", {}).items() for each in pair}
    assert linears - set(streamed) <= tied


@pytest.mark.parametrize("quantization", grid(["int8", "int8-a8"], keep=["int8-a8"]))
def test_every_quantization_in_every_dtype(quantization, tmp_path):
    """Weights are converted to the dtype before they are rounded."""
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    for dtype in (torch.float16, torch.float32):
        expected = rounded_after_loading(tmp_path, dtype, quantization)
        expect_same(load_model(tmp_path, dtype, CPU, quantization=quantization), expected)


def test_a_model_that_cannot_run_without_weights_is_rounded_after_loading(tmp_path, monkeypatch):
    tiny_model("llama").save_pretrained(tmp_path)
    expected = rounded_after_loading(tmp_path, torch.float32, "int4")
    original = type(expected).forward

    def forward(self, input_ids, **kwargs):
        assert not input_ids.is_meta
        return original(self, input_ids, **kwargs)

    monkeypatch.setattr(type(expected), "forward", forward)
    expect_same(load_model(tmp_path, torch.float32, CPU, quantization="int4"), expected)


def test_other_files_than_safetensors(tmp_path):
    model = tiny_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    expected = rounded_after_loading(tmp_path, torch.float32, "int4")
    expect_same(load_model(tmp_path, torch.float32, CPU, quantization="int4"), expected)


def test_the_whole_model_never_exists_in_its_dtype(tmp_path, monkeypatch):
    """Files in bf16 are loaded as fp32, in one thread, where the profiler sees it; it counts mapped files as well."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    sizes = {**TINY_GROUPED, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    whole = 2 * bytes_of(model.parameters())
    assert peak_bytes(lambda: load_model(tmp_path, torch.float32, CPU)) >= whole
    assert peak_bytes(lambda: load_model(tmp_path, torch.float32, CPU, quantization="int4")) < 0.8 * whole


UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[UP][3].fill_(float("inf")), rf"{UP} cannot be quantised: the weight has numbers that are not fin"),
        (lambda t: t.update({UP: t[UP][:5].clone()}), rf"other shapes than its config says: {UP} is \[5, 32\], expect"),
        (lambda t: t.update({NORM: t[NORM][:5].clone()}), rf"other shapes than its config says: {NORM} is \[5\], expe"),
        (lambda t: t.pop(UP), rf"lacks weights of LlamaForCausalLM: {UP} \(1 in all\)"),
    ],
)
def test_damaged_weights_are_refused_by_name(change, message, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, None, CPU, quantization="int4")
