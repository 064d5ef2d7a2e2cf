"""Writes linears, and checkpoints of tiny models, as GPTQ, AWQ and others store them, from the formats' definitions."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the parts of a word, the lowest first


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def words(rows: Tensor, bits: int, outputs: tuple[int, ...] | None = None) -> Tensor:
    """Pack non-negative integers ``[rows, n]`` along n into int32 words, the lowest bits first."""
    per_word = 32 // bits
    places = outputs or tuple(range(per_word))
    packed = torch.zeros(rows.shape[0], rows.shape[1] // per_word, dtype=torch.int64)
    for word in range(packed.shape[1]):
        for place, output in enumerate(places):
            packed[:, word] |= rows[:, word * per_word + output].long() << (bits * place)
    return packed.to(torch.int32)  # wraps


def gptq(
    codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, group_of: Tensor, *, lower: bool
) -> dict[str, Tensor]:
    """Return the tensors of ``scale * (code - zero)``.

    ``codes`` is ``[out_features, in_features]``, ``zeros`` and ``scales`` are ``[out_features, groups]``; ``lower``:
    zeros are stored one lower, as the format ``"gptq"`` has them.
    """
    packed_zeros = words(zeros.t(), bits)
    if lower:
        packed_zeros = packed_zeros - {4: 0x11111111, 8: 0x01010101}[bits]
    return {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": packed_zeros.contiguous(),
        "scales": scales.t().contiguous(),
        "g_idx": group_of.to(torch.int32),
    }


def awq(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Return the tensors of ``scale * (code - zero)``; shapes as of ``gptq``."""
    return {
        "qweight": words(codes.t(), 4, AWQ_OUTPUTS),
        "qzeros": words(zeros.t(), 4, AWQ_OUTPUTS),
        "scales": scales.t().contiguous(),
    }


def integer_weights(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> Tensor:
    """Return in fp64 what codes, zeros and scales stand for."""
    return scales.double()[:, group_of] * (codes - zeros[:, group_of]).double()


def group_of_inputs(in_features: int, group_size: int, *, shuffled: bool) -> Tensor:
    """Return the group of each input; ``shuffled``: as act-order leaves them."""
    group_of = torch.arange(in_features) // group_size
    return group_of[torch.randperm(in_features, generator=torch.Generator().manual_seed(5))] if shuffled else group_of


def _integer_linear(name: str, out_features: int, in_features: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    size = 32
    shape = (out_features, in_features // size)
    codes = integers(0, 256 if name == "gptq-8" else 16, out_features, in_features, seed=seed)
    zeros = integers(0, 16, *shape, seed=seed) if name != "gptq-8" else torch.full(shape, 128)
    scales = ((numbers(*shape, seed=seed).abs() + 0.5) * (0.004 if name == "gptq-8" else 0.06)).half()
    group_of = group_of_inputs(in_features, size, shuffled=name == "gptq-act-order")
    exact = integer_weights(codes, zeros, scales, group_of)
    if name == "awq":
        return awq(codes, zeros, scales), exact
    return gptq(codes, zeros, scales, 8 if name == "gptq-8" else 4, group_of, lower=name != "gptq-8"), exact


def _compressed_linear(name: str, out_features: int, in_features: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    if name == "int4":
        codes = integers(0, 16, out_features, in_features, seed=seed)
        scales = ((numbers(out_features, in_features // 32, seed=seed).abs() + 0.5) * 0.06).bfloat16()
        shape = torch.tensor([out_features, in_features])
        tensors = {"weight_packed": words(codes, 4), "weight_scale": scales, "weight_shape": shape}
        return tensors, scales.double().repeat_interleave(32, dim=1) * (codes - 8)
    scales = (numbers(out_features, 1, seed=seed).abs() + 0.5).bfloat16()
    if name == "int8":
        codes = integers(-128, 128, out_features, in_features, seed=seed)
        scales = scales * 0.004
        return {"weight": codes.to(torch.int8), "weight_scale": scales}, scales.double() * codes
    floats = (numbers(out_features, in_features, seed=seed) * 0.3).to(torch.float8_e4m3fn)
    if name == "fp8":
        return {"weight": floats, "weight_scale": scales}, scales.double() * floats.double()
    blocks = numbers(-(-out_features // 32), in_features // 32, seed=seed).abs() + 0.5
    exact = blocks.double().repeat_interleave(32, dim=0)[:out_features].repeat_interleave(32, dim=1) * floats.double()
    return {"weight": floats, "weight_scale_inv": blocks}, exact


def _group(layout: str, **weights: Any) -> dict[str, Any]:
    entry = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": entry},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    }  # fmt: skip


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
# ``quantization_config`` of the formats in which ``write_with_codes`` writes.
CONFIGS: dict[str, dict[str, Any]] = {
    "int4": _group("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
    "int8": _group("int-quantized", num_bits=8, type="int", strategy="channel"),
    "fp8": _group("float-quantized", num_bits=8, type="float", strategy="channel"),
    "fp8-blocks": {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]},
    "gptq": {**_GPTQ, "desc_act": False},
    "gptq-act-order": {**_GPTQ, "desc_act": True},
    "gptq-8": {**_GPTQ, "bits": 8, "sym": True, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
}


def write_with_codes(folder: Path, model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Write a checkpoint with random codes for all linears but the output layer, whose outputs must be multiples of 8.

    Returns the model, with the weights that the codes stand for, in fp64.
    """
    model.save_pretrained(folder)
    exact = copy.deepcopy(model).double()
    tensors = load_file(folder / "model.safetensors")
    linears = {key: each for key, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    for seed, (key, linear) in enumerate(linears.items()):
        if key == "lm_head":
            continue
        write = _compressed_linear if name in ("int4", "int8", "fp8", "fp8-blocks") else _integer_linear
        parts, weights = write(name, linear.out_features, linear.in_features, seed)
        del tensors[f"{key}.weight"]
        tensors.update({f"{key}.{suffix}": part.contiguous() for suffix, part in parts.items()})
        exact.get_submodule(key).weight.data = weights
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = CONFIGS[name]
    (folder / "config.json").write_text(json.dumps(config))
    return exact


def write_mixture_with_codes(folder: Path, plain: Path, model: PreTrainedModel, name: str) -> None:
    """Write a checkpoint with random codes for all experts, one linear each, and in ``plain`` one of exact weights."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    exact = {key: each.double() for key, each in tensors.items()}
    linears = [key.removesuffix(".weight") for key in tensors if ".experts." in key and key.endswith(".weight")]
    for seed, key in enumerate(linears):
        write = _compressed_linear if name in ("int4", "int8", "fp8", "fp8-blocks") else _integer_linear
        parts, exact[f"{key}.weight"] = write(name, *tensors.pop(f"{key}.weight").shape, seed)
        tensors.update({f"{key}.{suffix}": part.contiguous() for suffix, part in parts.items()})
    others = [r"re:^(?!.*\.experts\.\d).*"]
    config = {**CONFIGS[name], **({"ignore": others} if "config_groups" in CONFIGS[name] else {})}
    _save_pair(folder, plain, tensors, exact, config)


def write_with_mxfp4(folder: Path, plain: Path, model: PreTrainedModel) -> None:
    """Write a checkpoint of gpt-oss with random codes for all experts, and in ``plain`` one of exact weights."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    exact = {key: each.double() for key, each in tensors.items()}
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    for seed, key in enumerate([key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]):
        num_experts, in_features, out_features = tensors.pop(key).shape
        shape = (num_experts, out_features, in_features // 32)
        blocks = integers(0, 256, *shape, 16, seed=seed)
        exponents = integers(121, 125, *shape, seed=seed)
        tensors[f"{key}_blocks"] = blocks.to(torch.uint8)
        tensors[f"{key}_scales"] = exponents.to(torch.uint8)
        codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
        weights = values[codes] * torch.exp2(exponents.double() - 127)[..., None]
        exact[key] = weights.flatten(-2).mT.contiguous()
    _save_pair(folder, plain, tensors, exact, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def _save_pair(
    folder: Path, plain: Path, tensors: dict[str, Tensor], exact: dict[str, Tensor], quantization: dict[str, Any]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    save_file(exact, plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
