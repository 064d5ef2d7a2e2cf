"""Codes of experts: every weight is the checkpoint's, speculation is exact, and what cannot be held is named."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import specdec_fast as sd
from specdec_fast.errors import ConfigError
from specdec_fast.models.experts import entry_name, mixtures_of
from specdec_fast.models.loading import load_model
from specdec_fast.models.quantized_linears import PackedExperts
from specdec_fast.planner.checkpoint import checkpoint_sizes
from specdec_fast.quantization.packed_weight import dequantized, expert_of
from specdec_fast.runner.model_memory import bytes_of, weights_of
from support.checkpoint_codes import CONFIGS, write_mixture_with_codes, write_with_mxfp4
from support.experts import CONFIGS as MIXTURES
from support.experts import mixture_of
from support.grids import grid

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 2, 7, 9, 2, 7], [11, 3, 3, 8], [1]]
# Mixtral's names differ from those of the module, DeepSeek's first layer is dense, gpt-oss transposes its weights.
CASES = [
    *[f"qwen3-moe/{name}" for name in CONFIGS if name != "gptq-act-order"],
    "mixtral/gptq",
    "mixtral/int4",
    "deepseek-v3/fp8-blocks",
    "deepseek-v3/awq",
    "qwen3-moe/int8-narrow",
    "gpt-oss/mxfp4",
]
KEPT = ["qwen3-moe/gptq", "mixtral/int4", "deepseek-v3/fp8-blocks", "qwen3-moe/int8-narrow", "gpt-oss/mxfp4"]


def tiny(architecture, intermediate_size=32):
    config = MIXTURES[architecture]()
    config.hidden_size = 64
    for name in ("moe_intermediate_size", "intermediate_size"):
        if hasattr(config, name):
            setattr(config, name, intermediate_size)
    return mixture_of(type(config)(**{**config.to_dict(), "dtype": None}))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function that writes a checkpoint once: its folder, and that of the exact weights."""
    made = {}

    def write(case):
        architecture, _, name = case.partition("/")
        if case not in made:
            folder = tmp_path_factory.mktemp("codes")
            plain = tmp_path_factory.mktemp("plain")
            if name == "mxfp4":
                write_with_mxfp4(folder, plain, tiny(architecture))
            else:
                size = 24 if name == "int8-narrow" else 32
                write_mixture_with_codes(folder, plain, tiny(architecture, size), name.removesuffix("-narrow"))
            made[case] = folder, plain
        return made[case]

    return write


@pytest.mark.parametrize("case", grid(CASES, keep=KEPT[::2]))
def test_weights_are_those_of_the_codes(case, written):
    """In fp64, in the places where transformers puts the weights of the experts."""
    folder, plain = written(case)
    model = load_model(folder, torch.float32, CPU)
    expected = dict(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64).named_parameters())
    mixtures = mixtures_of(model)
    assert mixtures
    for name, module in mixtures.items():
        for attribute in (entry_name(module), "down_proj"):
            packed = getattr(module, attribute)
            assert isinstance(packed, PackedExperts)
            each = [dequantized(expert_of(packed.packed, e)) for e in range(len(packed.codes))]
            weights = torch.stack([weight.t() if module.is_transposed else weight for weight in each])
            assert torch.equal(weights, expected.pop(f"{name}.{attribute}"))
    assert checkpoint_sizes(folder, torch.float32).weights == bytes_of(weights_of(model))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.double(), expected[name]), name


@pytest.mark.parametrize("case", grid(CASES, keep=KEPT[::4]))
def test_speculation_gives_the_tokens_of_plain_decoding(case, written):
    folder, _ = written(case)
    params = [
        sd.SamplingParams(max_new_tokens=10, ignore_eos=True, logprobs=True, temperature=0.7 * (i % 2), seed=i)
        for i in range(3)
    ]
    plain = sd.Engine(folder, None, dtype="bfloat16", max_batch_size=1)
    assert plain.describe()["why_no_program"] is None
    speculative = sd.Engine(folder, "ngram", dtype="bfloat16", max_batch_size=3, num_draft_tokens=4)
    expected, found = (
        [(each.raise_for_error().token_ids, each.logprobs) for each in engine.generate(PROMPTS, params, progress=False)]
        for engine in (plain, speculative)
    )
    assert found == expected


EXPERT = "model.layers.1.mlp.experts.3.up_proj"


def test_what_cannot_be_held_is_refused_by_name(written, tmp_path):
    folder, _ = written("qwen3-moe/gptq")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    group_of = torch.arange(64).flip(0) // 32
    for changes, message in (
        ({"g_idx": group_of.to(torch.int32)}, rf"{EXPERT}.g_idx has groups whose inputs lie apart \(act-order\), whic"),
        ({"bias": torch.ones(32)}, rf"{EXPERT}.bias is not 0, and the model's experts have no biases"),
        ({"qzeros": None}, rf"model.safetensors: {EXPERT}.qzeros is missing"),
        ({"qweight": None}, r"layers.1.mlp.experts.gate_up_proj has 6 experts, and the checkpoint codes of 6 and 5"),
    ):
        tensors = load_file(folder / "model.safetensors")
        for suffix, tensor in changes.items():
            tensors.pop(f"{EXPERT}.{suffix}", None)
            tensors.update({} if tensor is None else {f"{EXPERT}.{suffix}": tensor})
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError, match=message):
            load_model(tmp_path, None, CPU)


def test_codes_of_fused_experts_are_refused(written, tmp_path):
    """As transformers itself writes those in fp8: no published format, and not converted to bf16 unasked."""
    folder, plain = written("qwen3-moe/fp8-blocks")
    tensors = load_file(plain / "model.safetensors")
    tensors["model.layers.0.mlp.experts.gate_up_proj.weight_scale_inv"] = torch.ones(6, 2, 2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(
        ConfigError, match=r"experts\.gate_up_proj belong to no plain linear of Qwen3Moe.*Only codes of"
    ):
        load_model(tmp_path, None, CPU)
