"""Codes of checkpoints: the weights are bit for bit those of the packages that wrote them, and damage is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_fast.errors import ConfigError
from specdec_fast.quantization.checkpoint.config import read_quantization_config
from specdec_fast.quantization.checkpoint.linear import CheckpointLinear, LinearTensors
from specdec_fast.quantization.checkpoint.mxfp4 import read_experts
from specdec_fast.quantization.packed_weight import INT8, TABLE, dequantized
from support.checkpoint_codes import awq, gptq, integer_weights, integers, numbers

OUT = 48
IN = 256


def read(config, tensors, out_features=OUT, in_features=IN):
    linear_format = read_quantization_config(config).format_of("layer")
    return linear_format.read(LinearTensors("layer", tensors), out_features, in_features)


def weights_of(linear: CheckpointLinear):
    """Return the weights in fp64, inputs in the order of the model."""
    weights = dequantized(linear.weight)
    if linear.permutation is None:
        return weights
    ordered = torch.empty_like(weights)
    ordered[:, linear.permutation] = weights
    return ordered


# compressed-tensors: layout, and what `weights` has in config.json.
SCHEMES = {
    "int4-group": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}),
    "int4-group32": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    "int4-channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "int4-group-zeros": (
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False}),
    "int4-channel-zeros": (
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False}),
    "int8-group": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128}),
    "int8-group-zeros": (
        "pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False}),
    "w8a8-channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "w8a8-tensor": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    "w8a8-channel-zeros": (
        "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-block": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 128]}),
}  # fmt: skip


def compressed(layout, weights, scale_dtype, out_features=OUT, in_features=IN):
    """Return the config, and the tensors that compressed-tensors makes of random weights."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights={"symmetric": True, "dynamic": False, **weights})
    shape = {
        "group": (out_features, in_features // weights.get("group_size", 1)),
        "channel": (out_features, 1),
        "tensor": (1,),
        "block": (-(-out_features // 32), -(-in_features // 128)),
    }[weights["strategy"]]
    is_float = weights["type"] == "float"
    scales = (numbers(*shape).abs() * 0.05 + 0.01).to(scale_dtype) / (1 if weights["num_bits"] == 4 or is_float else 16)
    half = 1 << (weights["num_bits"] - 1)
    state = {"weight": numbers(out_features, in_features, seed=1) * 0.3, "weight_scale": scales}
    if not weights.get("symmetric", True):
        state["weight_zero_point"] = integers(-half, half, *shape).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(layout)
    tensors = compressor.compress(state, scheme)
    exact = compressor.decompress({**tensors, "weight_scale": scales.double()}, scheme)["weight"]
    assert exact.dtype == torch.float64
    group = scheme.model_dump(mode="json", exclude_none=True)
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    return config, tensors, exact


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_compressed_tensors(name, scale_dtype):
    layout, weights = SCHEMES[name]
    if scale_dtype == torch.float32 and name in ("int8-group-zeros", "w8a8-channel-zeros"):
        config, tensors, _ = compressed(layout, weights, scale_dtype)
        with pytest.raises(ConfigError, match="products float32 cannot represent"):
            read(config, tensors)
        return
    config, tensors, exact = compressed(layout, weights, scale_dtype)
    linear = read(config, tensors)
    assert torch.equal(weights_of(linear), exact)
    if weights.get("symmetric", True) or weights["type"] == "float":
        assert linear.weight.mins is None
        assert linear.weight.scales.dtype == scale_dtype


def test_zero_points_that_fp32_cannot_multiply_are_held_as_8_bits():
    config, tensors, _ = compressed(*SCHEMES["int4-group-zeros"], torch.float32)
    assert read(config, tensors).weight.kind == INT8
    config, tensors, _ = compressed(*SCHEMES["int4-group-zeros"], torch.float16)
    weight = read(config, tensors).weight
    assert (weight.kind, weight.mins.dtype) == (TABLE, torch.float32)


def test_sizes_without_a_common_divisor():
    """Outputs that fill no panel and no word, inputs that fill no block."""
    for name in ("int4-channel", "int4-channel-zeros", "fp8-block"):
        config, tensors, exact = compressed(*SCHEMES[name], torch.bfloat16, out_features=37, in_features=200)
        assert torch.equal(weights_of(read(config, tensors, 37, 200)), exact)


def test_compressed_tensors_of_older_versions():
    """They store the zero points of symmetric weights, and the group of each input, also where it is -1 or in order."""
    config, tensors, exact = compressed(*SCHEMES["int4-group"], torch.bfloat16)
    older = {**tensors, "weight_zero_point": torch.zeros(OUT, 2, dtype=torch.int8)}
    assert torch.equal(weights_of(read(config, older)), exact)
    assert torch.equal(weights_of(read(config, {**tensors, "weight_g_idx": torch.full((IN,), -1)})), exact)
    group_of = torch.arange(IN) % 2
    linear = read(config, {**tensors, "weight_g_idx": group_of.to(torch.int32)})
    codes = weights_of(read(config, {**tensors, "weight_scale": torch.ones(OUT, 2)}))
    assert torch.equal(weights_of(linear), codes * tensors["weight_scale"].double()[:, group_of])
    with pytest.raises(ConfigError, match=r"layer.weight_zero_point is a tensor that its format does not have"):
        read(config, {**tensors, "weight_zero_point": torch.ones(OUT, 2, dtype=torch.int8)})


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}


def gptq_linear(bits=4, group_size=64, order=None, symmetric=False, layout="gptq", out_features=OUT):
    """Return the config, the tensors, and the weights in fp64."""
    size = IN if group_size == -1 else group_size
    group_of = torch.arange(IN) // size
    group_of = group_of if order is None else group_of[order]
    shape = (out_features, IN // size)
    codes = integers(0, 1 << bits, out_features, IN)
    zeros = torch.full(shape, 1 << (bits - 1)) if symmetric else integers(0, 1 << bits, *shape, seed=3)
    scales = numbers(*shape, seed=2).half()
    config = {**GPTQ, "bits": bits, "group_size": group_size, "checkpoint_format": layout}
    tensors = gptq(codes, zeros, scales, bits, group_of, lower=layout == "gptq")
    return config, tensors, integer_weights(codes, zeros, scales, group_of)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq(bits, group_size, layout, symmetric):
    config, tensors, exact = gptq_linear(bits, group_size, None, symmetric, layout)
    linear = read(config, tensors)
    assert linear.permutation is None
    assert torch.equal(weights_of(linear), exact)
    assert (linear.weight.mins is None) == symmetric
    assert linear.weight.scales.dtype == (torch.float16 if symmetric else torch.float32)


@pytest.mark.parametrize("bits", [4, 8])
def test_act_order(bits):
    """Inputs are sorted by group; the group's codes meet the right inputs again through the permutation."""
    order = torch.randperm(IN, generator=torch.Generator().manual_seed(4))
    config, tensors, exact = gptq_linear(bits, order=order)
    linear = read(config, tensors)
    assert linear.permutation is not None
    assert torch.equal(weights_of(linear), exact)
    rows = numbers(3, IN).double()
    assert torch.allclose(rows[:, linear.permutation] @ dequantized(linear.weight).T, rows @ exact.T)


def test_equal_zeros_move_the_table():
    codes = integers(0, 16, OUT, IN)
    zeros = torch.full((OUT, 4), 5)
    tensors = gptq(codes, zeros, numbers(OUT, 4).half(), 4, torch.arange(IN) // 64, lower=True)
    weight = read(GPTQ, tensors).weight
    assert weight.mins is None
    assert weight.table.tolist() == [float(i - 5) for i in range(16)]


@pytest.mark.parametrize("group_size", [64, 128, -1])
def test_awq(group_size):
    size = IN if group_size == -1 else group_size
    codes = integers(0, 16, OUT, IN)
    zeros = integers(0, 16, OUT, IN // size, seed=1)
    scales = numbers(OUT, IN // size).half()
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "GEMM", "zero_point": True}
    linear = read(config, awq(codes, zeros, scales))
    assert torch.equal(weights_of(linear), integer_weights(codes, zeros, scales, torch.arange(IN) // size))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("shape", [(256, 384), (200, 160)])
def test_fp8_blocks(scale_dtype, shape):
    from transformers.integrations import finegrained_fp8

    weight = (numbers(*shape) * 100).to(torch.float8_e4m3fn)
    scales = (numbers(-(-shape[0] // 128), -(-shape[1] // 128)).abs() + 0.01).to(scale_dtype)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    linear = read(config, {"weight": weight, "weight_scale_inv": scales}, *shape)
    scales = scales.to(torch.bfloat16) if scale_dtype == torch.float8_e8m0fnu else scales
    exact = weight.double()
    for block in itertools.product(range(2), range(scales.shape[1])):
        rows, columns = (slice(128 * i, 128 * (i + 1)) for i in block)
        exact[rows, columns] *= scales[block].double()
    assert torch.equal(weights_of(linear), exact)
    if hasattr(finegrained_fp8, "_dequantize_fp8_weight"):  # of transformers since 5.23
        assert torch.equal(exact, finegrained_fp8._dequantize_fp8_weight(weight, scales, [128, 128], torch.float64))
    assert linear.weight.group_size == 128


def test_fp8_of_one_scale():
    weight = numbers(OUT, IN).to(torch.float8_e4m3fn)
    config = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    tensors = {"weight": weight, "weight_scale_inv": torch.tensor(0.3), "activation_scale": torch.tensor(2.0)}
    assert torch.equal(weights_of(read(config, tensors)), weight.double() * torch.tensor(0.3).double())


def test_mxfp4_experts():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = integers(0, 256, 3, OUT, 4, 16).to(torch.uint8)
    scales = integers(0, 255, 3, OUT, 4, seed=1).to(torch.uint8)
    scales[0, 0, :3] = torch.tensor([0, 1, 254])
    tensors = LinearTensors("experts", {"down_proj_blocks": blocks, "down_proj_scales": scales})
    weights = read_experts(tensors, "down_proj", 3, OUT, 128)
    tensors.close()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float64).transpose(1, 2)
    assert torch.equal(torch.stack([dequantized(weight) for weight in weights]), expected)


def changed(tensors, **changes):
    """Return tensors with others in place of some; None removes one."""
    return {name: each for name, each in {**tensors, **changes}.items() if each is not None}


def test_damaged_tensors_are_refused():
    config, tensors, _ = gptq_linear()
    scales = tensors["scales"].clone()
    scales[1, 3] = float("nan")
    far = tensors["g_idx"].clone()
    far[7] = 4
    uneven = tensors["g_idx"].clone()
    uneven[0] = 1
    negative = tensors["g_idx"].clone()
    negative[9] = -1
    for changes, message in (
        ({"scales": scales}, r"layer.scales has numbers that are NaN or infinite, the first at \[1, 3\]"),
        ({"scales": scales[:2]}, r"layer.scales has shape \[2, 48\]; expected \[4, 48\]"),
        ({"scales": scales.double()}, "layer.scales is float64; expected float32 or float16 or bfloat16"),
        ({"g_idx": far}, "layer.g_idx has group 4 at 7; expected 0 to 3"),
        ({"g_idx": negative}, "layer.g_idx has group -1 at 9; expected 0 to 3"),
        ({"g_idx": uneven}, "layer.g_idx has 63 inputs in group 0; expected 64"),
        ({"g_idx": uneven[1:]}, r"layer.g_idx has shape \[255\]; expected \[256\]"),
        ({"qzeros": None}, "layer.qzeros is missing; the linear has g_idx, scales"),
        ({"weight": scales}, "layer.weight is a tensor that its format does not have"),
        ({"qweight": tensors["qweight"][1:]}, r"layer.qweight has shape \[31, 48\]; expected \[32, 48\]"),
        ({"bias": scales[0, :5]}, r"layer.bias has shape \[5\]; expected \[48\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(config, changed(tensors, **changes))


def test_damaged_floats_are_refused():
    weight = numbers(OUT, IN).to(torch.float8_e4m3fn)
    scale = torch.ones(1, 2)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    damaged = weight.clone()
    damaged.view(torch.uint8)[2, 3] = 0x7F
    for tensors, message in (
        ({"weight": damaged, "weight_scale_inv": scale}, r"layer.weight has numbers .* NaN .* first at \[2, 3\]"),
        ({"weight": weight, "weight_scale_inv": scale / 0}, "layer.weight_scale_inv has numbers that are NaN or inf"),
        ({"weight": weight}, "layer.weight_scale_inv is missing"),
        ({"weight": weight.float(), "weight_scale_inv": scale}, "layer.weight is float32; expected float8_e4m3fn"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(config, tensors)
    tensors = {"x_blocks": torch.zeros(1, 4, 1, 16, dtype=torch.uint8), "x_scales": torch.full((1, 4, 1), 255).byte()}
    with pytest.raises(ConfigError, match=r"experts.x_scales has numbers that are NaN"):
        read_experts(LinearTensors("experts", tensors), "x", 1, 4, 32)
    with pytest.raises(ConfigError, match="belongs to 40 inputs, which groups of 32 do not divide"):
        read_experts(LinearTensors("experts", tensors), "x", 1, 4, 40)


def test_sizes_that_groups_do_not_divide_are_refused():
    config, tensors, _ = compressed(*SCHEMES["int4-group"], torch.bfloat16)
    with pytest.raises(ConfigError, match=r"layer.weight_scale has groups of 128, which do not divide 200 inputs"):
        read(config, tensors, OUT, 200)
    with pytest.raises(ConfigError, match=r"layer.weight_shape is \[48, 256\]; expected \[48, 512\]"):
        read(config, {**tensors, "weight_scale": torch.ones(OUT, 4)}, OUT, 512)
    with pytest.raises(ConfigError, match="belongs to 200 inputs and 48 outputs, which groups of 128 inputs"):
        read({"quant_method": "awq", "group_size": 128}, tensors, OUT, 200)


def test_float8_and_words_survive_safetensors(tmp_path):
    """What is read back from a file has the bits that were saved."""
    config, tensors, exact = compressed(*SCHEMES["fp8-channel"], torch.bfloat16)
    save_file({name: each.contiguous() for name, each in tensors.items()}, tmp_path / "x.safetensors")
    assert torch.equal(weights_of(read(config, load_file(tmp_path / "x.safetensors"))), exact)
