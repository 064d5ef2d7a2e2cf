"""Blocks of GGUF tensors against ``gguf``'s own dequantisation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from specdec_fast.quantization.gguf import block_types
from specdec_fast.quantization.gguf.block_types import BLOCK_TYPES, packed, weights_of
from specdec_fast.quantization.packed_weight import codes_of, dequantized, scales_of

# Where a block has fp16 numbers; all other bytes may be anything.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,),
}  # fmt: skip
_QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # the types to which the package gguf rounds


def _random_blocks(name, out_features, num_blocks, seed=0):
    """Blocks whose bytes are random, except that scales are finite."""
    generator = np.random.default_rng(seed)
    size = BLOCK_TYPES[name].block_bytes
    raw = generator.integers(0, 256, (out_features, num_blocks, size), dtype=np.uint8)
    for start in _HALVES[name]:
        halves = generator.normal(size=(out_features, num_blocks, 1)).astype(np.float16)
        raw[..., start : start + 2] = halves.view(np.uint8)
    return raw.reshape(out_features, -1)


def _reference(raw, name):
    return torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_sizes_are_those_of_the_package(name):
    kind = BLOCK_TYPES[name]
    assert (kind.block_size, kind.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[name]]


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_any_bytes_stand_for_the_same_weights(name):
    """Codes, scales and minima are exact: computed in fp32, the weights have the bits of the package's."""
    raw = _random_blocks(name, out_features=21, num_blocks=3)
    weight = packed(torch.from_numpy(raw), BLOCK_TYPES[name])
    assert (weight.out_features, weight.in_features) == (21, 3 * BLOCK_TYPES[name].block_size)
    assert torch.equal(dequantized(weight, torch.float32), _reference(raw, name))
    assert torch.equal(weights_of(torch.from_numpy(raw), BLOCK_TYPES[name], torch.float32), _reference(raw, name))


@pytest.mark.parametrize("name", _QUANTIZED)
def test_rounded_numbers_stand_for_the_same_weights(name):
    numbers = np.random.default_rng(1).normal(size=(16, 128)).astype(np.float32)
    raw = quants.quantize(numbers, GGMLQuantizationType[name])
    weight = packed(torch.from_numpy(raw), BLOCK_TYPES[name])
    assert torch.equal(dequantized(weight, torch.float32), _reference(raw, name))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_4_bit_codes_stay_in_4_bits_and_scales_in_the_types_own_precision(name):
    weight = packed(torch.from_numpy(_random_blocks(name, 16, 1)), BLOCK_TYPES[name])
    assert (weight.table is not None) == (name in ("Q4_0", "Q4_1", "Q4_K", "IQ4_NL"))
    assert weight.scales.dtype == (torch.int8 if name.endswith("_K") else torch.float16)
    assert (weight.super_scales is not None) == name.endswith("_K")
    assert weight.group_size == (16 if name == "Q6_K" else 32)
    bits = {"Q4_K": 4.625, "Q5_K": 8.625, "Q6_K": 8.5625}
    if name in bits:
        numbers = weight.nbytes - (0 if weight.table is None else weight.table.nbytes)
        assert 8 * numbers == bits[name] * 16 * 256


def test_a_matrix_decoded_in_slices_is_packed_as_a_whole(monkeypatch):
    raw = torch.from_numpy(_random_blocks("Q4_K", out_features=50, num_blocks=1))
    whole = packed(raw, BLOCK_TYPES["Q4_K"])
    monkeypatch.setattr(block_types, "_SLICE", 1)
    sliced = packed(raw, BLOCK_TYPES["Q4_K"])
    assert torch.equal(whole.codes, sliced.codes)
    assert torch.equal(whole.super_mins, sliced.super_mins)
    assert torch.equal(codes_of(whole), codes_of(sliced))
    assert all(torch.equal(a, b) for a, b in zip(scales_of(whole), scales_of(sliced), strict=True))
    weights = weights_of(raw, BLOCK_TYPES["Q4_K"], torch.bfloat16)
    assert torch.equal(weights, dequantized(whole, torch.float32).bfloat16())


@pytest.mark.parametrize(
    ("name", "start", "what"), [("Q8_0", 0, "scales"), ("Q4_1", 2, "minima"), ("Q6_K", 208, "scales")]
)
def test_scales_that_are_not_finite_are_refused(name, start, what):
    raw = _random_blocks(name, 16, 2)
    raw[3, start : start + 2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match=f"it has {what} that are not finite"):
        packed(torch.from_numpy(raw), BLOCK_TYPES[name])
