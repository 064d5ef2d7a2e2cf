"""``quantization_config``: what published checkpoints have is read, and what cannot be read is named."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_fast.errors import ConfigError
from specdec_fast.quantization.checkpoint.awq import AWQFormat
from specdec_fast.quantization.checkpoint.compressed_tensors import FLOAT, CompressedTensorsFormat
from specdec_fast.quantization.checkpoint.config import read_quantization_config
from specdec_fast.quantization.checkpoint.fields import Fields
from specdec_fast.quantization.checkpoint.float8 import Float8Format
from specdec_fast.quantization.checkpoint.gptq import GPTQFormat

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def group(**weights):
    entry = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel", **weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": entry}}


# Fields that cannot be read, and what the error says.
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "quantization_config has no field quant_method"),
        ([], r"quantization_config is \[\]; expected an object"),
        ({"quant_method": [1]}, r"quant_method is \[1\]; expected 'compressed-tensors'"),
        ({"quant_method": "hqq"}, "quant_method is 'hqq'; expected 'compressed-tensors' or 'gptq' or 'awq' or 'fp8'"),
        ({**GPTQ, "bits": 3}, "quantization_config.bits is 3; expected 4 or 8"),
        ({**GPTQ, "bits": True}, "quantization_config.bits is True; expected 4 or 8"),
        ({**GPTQ, "group_size": 24}, "group_size is 24; expected -1 or a positive multiple of 16"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; expected 'gptq' or 'gptq_v2'"),
        ({**GPTQ, "rotation": "hadamard"}, "rotation is 'hadamard'; this field is unknown"),
        ({**GPTQ, "dynamic": {"(": {"bits": 8}}}, r"dynamic has '\(', which is no regular expression"),
        ({**GPTQ, "dynamic": {"a": {"bits": 2}}}, "quantization_config.dynamic.a.bits is 2; expected 4 or 8"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv'; expected 'gemm'"),
        ({**AWQ, "backend": "llm-awq"}, "backend is 'llm-awq'; expected a checkpoint of version 'gemm'"),
        ({**AWQ, "zero_point": 1}, "zero_point is 1; expected true or false"),
        ({**AWQ, "w_bit": 3}, "w_bit is 3; expected 4"),
        ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'; expected a list of str"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size is \[128\]; expected two positive integers"),
        ({**FP8, "weight_block_size": [128, 8]}, "the second a multiple of 16"),
        ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'; expected 'e4m3'"),
        (group(strategy="token"), "config_groups.g.weights.strategy is 'token'; expected 'channel' or 'group'"),
        (group(num_bits=2), "config_groups.g.weights.num_bits is 2; expected 4 or 8"),
        (group(type="float"), "config_groups.g.weights.type is 'float'; expected 'int'"),
        (group(dynamic=True), "config_groups.g.weights.dynamic is True; expected False"),
        (group(strategy="group"), "group_size is None; expected a multiple of 16 for strategy 'group'"),
        (group(zp_offset=3), "config_groups.g.weights.zp_offset is 3; this field is unknown"),
        ({**group(), "kv_cache_scheme": {"num_bits": 8}}, r"kv_cache_scheme is \{'num_bits': 8\}; this field is unkn"),
        ({**group(), "format": "marlin-24"}, "format is 'marlin-24'; expected 'pack-quantized'"),
        ({**group(), "quantization_status": "calibration"}, "quantization_status is 'calibration'; expected 'compr"),
        ({**group(), "format": "mixed-precision"}, "config_groups.g has no field format"),
        ({**group(), "sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config.format is 'sparse-bitmask'"),
        ({**group(), "ignore": ["re:("]}, r"quantization_config.ignore has '\(', which is no regular expression"),
        ({**group(), "config_groups": {"W4A16": ["Linear"]}}, r"config_groups.W4A16 is \['Linear'\]; expected an obj"),
        ({**group(), "config_groups": {}}, r"config_groups is \{\}; expected at least one group"),
    ],
)
def test_fields_that_cannot_be_read_are_named(config, message):
    with pytest.raises(ConfigError, match=message):
        read_quantization_config(config)


def test_fields_that_are_off_are_no_errors():
    read_quantization_config({**GPTQ, "rotation": None, "is_marlin_format": False, "dynamic": {}})
    read_quantization_config({**group(), "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {}})


# As published checkpoints have them, with the format that they describe.
PUBLISHED = {
    "gptq of optimum": (
        {
            "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "dataset": None,
            "damp_percent": 0.01, "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128,
            "max_input_length": None, "model_seqlen": None, "module_name_preceding_first_block": None,
            "modules_in_block_to_quantize": None, "pad_token_id": None, "quant_method": "gptq", "sym": True,
            "tokenizer": None, "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True,
        },
        GPTQFormat(4, 128, zeros_are_lower=True),
    ),
    "gptq of gptqmodel": (
        {
            "bits": 8, "group_size": -1, "desc_act": True, "lm_head": False, "method": "gptq", "quant_method": "gptq",
            "format": "gptq_v2", "checkpoint_format": "gptq_v2", "pack_dtype": "int32", "sym": True,
            "meta": {"quantizer": ["gptqmodel:5.0.0"], "damp_percent": 0.05, "fallback": {"strategy": "rtn"}},
        },
        GPTQFormat(8, None, zeros_are_lower=False),
    ),
    "awq of autoawq": (
        {
            "backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None,
            "group_size": 128, "modules_to_fuse": None, "modules_to_not_convert": None, "quant_method": "awq",
            "version": "gemm", "zero_point": True,
        },
        AWQFormat(128),
    ),
    "fp8 of qwen3": (
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        Float8Format((128, 128)),
    ),
    "fp8 of older compressed-tensors": (
        {
            "config_groups": {
                "group_0": {
                    "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
                    "output_activations": None, "targets": ["Linear"],
                    "weights": {
                        "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
                        "observer": "minmax", "observer_kwargs": {}, "strategy": "tensor", "symmetric": True,
                        "type": "float",
                    },
                },
            },
            "format": "naive-quantized", "global_compression_ratio": 1.24, "ignore": ["lm_head"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "frozen",
        },
        CompressedTensorsFormat(FLOAT, 8, "tensor", None, is_symmetric=True),
    ),
    "fp8 blocks of older compressed-tensors": (
        {
            "config_groups": {
                "g": {
                    "targets": ["re:.*layer.*"], "format": "float-quantized",
                    "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"},
                },
            },
            "format": "mixed-precision", "quant_method": "compressed-tensors", "version": "0.9.1",
            "sparsity_config": {"format": "dense"},
        },
        CompressedTensorsFormat(FLOAT, 8, "block", (128, 128), is_symmetric=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    config, expected = PUBLISHED[name]
    assert read_quantization_config(config).format_of("a.layer.up_proj") == expected


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.floats() | st.text(max_size=3) | st.just("re:("),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places_of(fields, path=()):
    """Return the paths of all fields of an object."""
    for name, value in fields.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from places_of(value, (*path, name))


@settings(max_examples=60)
@given(st.data())
def test_any_value_of_any_field_is_read_or_named(data):
    """No value raises anything but a ConfigError."""
    config = copy.deepcopy(PUBLISHED[data.draw(st.sampled_from(sorted(PUBLISHED)))][0])
    *path, name = data.draw(st.sampled_from(list(places_of(config))))
    fields = config
    for each in path:
        fields = fields[each]
    fields[name] = data.draw(ANYTHING)
    with suppress(ConfigError):
        read_quantization_config(config).format_of("a.layer.up_proj")


def test_modules_with_formats():
    config = {**group(), "ignore": ["lm_head", r"re:.*\.mlp\.gate$"]}
    other = {"targets": [r"re:.*down_proj"], "weights": {"num_bits": 8, "type": "int", "group_size": -1}}
    config["config_groups"]["h"] = other
    format_of = read_quantization_config(config).format_of
    assert format_of("lm_head") is None
    assert format_of("a.mlp.gate") is None
    assert format_of("a.mlp.gate_proj").bits == 4
    assert format_of("a.mlp.down_proj").bits == 8
    skipped = read_quantization_config({**FP8, "modules_to_not_convert": ["lm_head", "model.layers.1"]}).format_of
    assert [skipped(name) is None for name in ("lm_head", "model.layers.1.mlp.up_proj", "model.layers.11.up_proj")] == [
        True, True, False]  # fmt: skip


def test_unread_fields():
    fields = Fields({"a": 1, "b": None}, "x")
    assert fields.flag("c", True)
    with pytest.raises(ConfigError, match=r"x.a is 1; expected true or false"):
        fields.flag("a")
    with pytest.raises(ConfigError, match=r"x has no field b"):
        fields.raw("b")


def test_dynamic_overrides_of_gptq():
    config = {**GPTQ, "dynamic": {r"+:.*\.down_proj": {"bits": 8, "group_size": 32}, "-:.*lm_head": {}}}
    quantization = read_quantization_config(config)
    assert (quantization.format_of("a.down_proj").bits, quantization.format_of("a.down_proj").group_size) == (8, 32)
    assert (quantization.format_of("a.up_proj").bits, quantization.format_of("a.up_proj").group_size) == (4, 64)
