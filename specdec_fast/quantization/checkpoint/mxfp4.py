"""Mxfp4 as gpt-oss stores its experts: 4-bit floats (e2m1) in groups of 32 with a power of two as scale.

``{name}_blocks`` is uint8 ``[experts, out_features, in_features / 32, 16]``: the low half of byte j is the code of
input ``2 j`` of the group, the high half that of ``2 j + 1``. ``{name}_scales`` is uint8 ``[experts, out_features,
in_features / 32]``: the exponent, plus 127.
"""

from __future__ import annotations

import torch

from specdec_fast.quantization.checkpoint.fields import Fields
from specdec_fast.quantization.checkpoint.linear import LinearTensors
from specdec_fast.quantization.packed_weight import TABLE, PackedWeight, pack

METHOD = "mxfp4"
MARKERS = frozenset(f"{name}_{part}" for name in ("gate_up_proj", "down_proj") for part in ("blocks", "scales"))
GROUP = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_POSITIVE, *(-value for value in _POSITIVE))


def read_experts(
    tensors: LinearTensors, name: str, num_experts: int, out_features: int, in_features: int
) -> list[PackedWeight]:
    """Return the weight of each expert, with scales of bf16, which represents all their powers of two.

    ``tensors`` are those of the module of experts, ``name`` is ``gate_up_proj`` or ``down_proj``. Raises ConfigError,
    which names file and tensor, if a tensor is missing, of another dtype or shape, or has a scale that is NaN.
    """
    groups = in_features // GROUP
    if in_features % GROUP != 0:
        raise tensors.fault(
            f"{name}_blocks", f"belongs to {in_features} inputs, which groups of {GROUP} do not divide."
        )
    shape = (num_experts, out_features, groups)
    blocks = tensors.take(f"{name}_blocks", (torch.uint8,), (*shape, GROUP // 2))
    exponents = tensors.take(f"{name}_scales", (torch.uint8, torch.float8_e8m0fnu), shape).view(torch.float8_e8m0fnu)
    scales = tensors.finite(f"{name}_scales", exponents.to(torch.bfloat16))
    table = torch.tensor(E2M1, device=blocks.device)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).view(num_experts, out_features, in_features)
    return [pack(codes[i], scales[i], None, table, GROUP, TABLE) for i in range(num_experts)]


def read_fields(fields: Fields) -> None:
    """Read the fields, none of which changes the codes. Raises ConfigError, which names one that is unknown."""
    fields.skip("quant_method", "modules_to_not_convert", "dequantize")
    fields.close()
