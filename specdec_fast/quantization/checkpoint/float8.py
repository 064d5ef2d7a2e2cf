"""Weights of fp8 (e4m3) with scales per block, as Qwen3 and DeepSeek store them, or per tensor.

``weight`` is float8_e4m3fn ``[out_features, in_features]``; ``weight_scale_inv`` has the scale of each block of
``weight_block_size`` outputs and inputs, which is multiplied, whatever its name says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_fast.quantization.checkpoint.fields import Fields
from specdec_fast.quantization.checkpoint.linear import FLOATS, LinearFormat, LinearTensors, whole_rows
from specdec_fast.quantization.packed_weight import FLOAT8, PackedWeight, pack

_EXPONENTS = torch.float8_e8m0fnu


@dataclass(frozen=True)
class Float8Format(LinearFormat):
    """Fp8 with a scale per ``block`` of outputs and inputs; None: one per tensor."""

    block: tuple[int, int] | None

    @property
    def marker(self) -> str:
        return "weight_scale_inv"

    def read_weight(
        self, tensors: LinearTensors, out_features: int, in_features: int
    ) -> tuple[PackedWeight, Tensor | None]:
        codes = take_codes(tensors, out_features, in_features)
        shapes: list[tuple[int, ...]] = [(), (1,), (1, 1)]
        if self.block is not None:
            shapes = [blocks_of(self.block, out_features, in_features)]
        scales = tensors.take("weight_scale_inv", (*FLOATS, _EXPONENTS), *shapes)
        if scales.dtype == _EXPONENTS:
            scales = scales.to(torch.bfloat16)  # powers of two, which bf16 represents
        tensors.finite("weight_scale_inv", scales)
        tensors.skip("activation_scale", "input_scale")
        if self.block is None:
            size = whole_rows(in_features)
            return pack(codes, scales.reshape(1, 1).expand(out_features, 1), None, None, size, FLOAT8), None
        return pack(codes, per_output(scales, self.block, out_features), None, None, self.block[1], FLOAT8), None


def take_codes(tensors: LinearTensors, out_features: int, in_features: int) -> Tensor:
    """Take ``weight`` of fp8: its bits, ``[out_features, in_features]`` uint8. Raises ConfigError if one is NaN."""
    weight = tensors.take("weight", (torch.float8_e4m3fn,), (out_features, in_features))
    return tensors.finite("weight", weight).view(torch.uint8)


def blocks_of(block: tuple[int, int], out_features: int, in_features: int) -> tuple[int, int]:
    """Return the numbers of blocks along outputs and along inputs."""
    return -(-out_features // block[0]), -(-in_features // block[1])


def per_output(scales: Tensor, block: tuple[int, int], out_features: int) -> Tensor:
    """Repeat the scales of blocks for each of their outputs: ``[out_features, blocks along inputs]``."""
    return scales.repeat_interleave(block[0], dim=0)[:out_features]


def read_block(fields: Fields, name: str, value: object) -> tuple[int, int]:
    """Return a block's outputs and inputs. Raises ConfigError, which names the field."""
    if isinstance(value, str):  # "128x128", in older versions of compressed-tensors
        value = [int(each) for each in value.split("x") if each.isdecimal()]
    is_pair = isinstance(value, (list, tuple)) and len(value) == 2 and all(type(each) is int for each in value)
    if not is_pair or value[0] <= 0 or value[1] <= 0 or value[1] % 16 != 0:  # type: ignore[index]
        raise fields.fault(name, "two positive integers, the second a multiple of 16")
    return value[0], value[1]  # type: ignore[index]


def read_fields(fields: Fields) -> tuple[Float8Format, tuple[str, ...]]:
    """Return the format, and the names of modules without codes. Raises ConfigError, which names the field."""
    fields.skip("quant_method", "activation_scheme", "dequantize")  # rows keep the model's dtype
    fields.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    fields.choice("scale_fmt", ("float", "ue8m0"), "float")
    fields.choice("expert_dtype", ("fp8",), "fp8")
    value = fields.raw("weight_block_size", None)
    block = None if value is None else read_block(fields, "weight_block_size", value)
    skipped = fields.strings("modules_to_not_convert") + fields.strings("ignored_layers")
    fields.close()
    return Float8Format(block), skipped
