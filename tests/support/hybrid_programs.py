"""Tiny models with recurrent layers: every recurrent op, each with the layers that models combine with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from support.models import VOCAB_SIZE

_SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2}
_WIDE = {**_SIZES, "intermediate_size": 32}
_LAYERS = ["linear_attention", "full_attention"]
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
_LINEAR_HEADS = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_MAMBA2 = {"mamba_n_groups": 2, "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 8}


def _config(name: str, **given: Any) -> Callable[[], PretrainedConfig]:
    return lambda: getattr(transformers, name)(**given)


HYBRIDS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3_5": _config("Qwen3_5TextConfig", **_WIDE, **_HEADS, **_LINEAR_HEADS, layer_types=_LAYERS, head_dim=16),
    "qwen3_next": _config(
        "Qwen3NextConfig", **_WIDE, **_HEADS, **_LINEAR_HEADS, **_EXPERTS, layer_types=_LAYERS, head_dim=16,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
    ),
    "mamba": _config("MambaConfig", **_SIZES, state_size=8),
    "mamba2": _config("Mamba2Config", **_SIZES, num_heads=8, head_dim=8, state_size=16, n_groups=2, expand=2),
    "kimi_linear": _config(
        "KimiLinearConfig", **_WIDE, num_attention_heads=2, num_key_value_heads=2, pad_token_id=None,
        layer_types=_LAYERS, linear_num_heads=2, linear_head_dim=8, mlp_layer_types=["dense"] * 2,
    ),
    "nemotron_h": _config(
        "NemotronHConfig", **{**_WIDE, "num_hidden_layers": 3}, **_HEADS, mamba_num_heads=8, mamba_head_dim=8,
        layers_block_type=["linear_attention", "mlp", "full_attention"], ssm_state_size=16, n_groups=2,
    ),
    "falcon_h1": _config("FalconH1Config", **_WIDE, **_HEADS, **_MAMBA2, mamba_d_ssm=64),
    "lfm2": _config("Lfm2Config", **_WIDE, **_HEADS, layer_types=["conv", "full_attention"]),
    "jamba": _config(
        "JambaConfig", **_WIDE, **_HEADS, num_experts=4, expert_layer_period=2, attn_layer_period=2,
        attn_layer_offset=1, mamba_d_state=8,
    ),
    "minimax": _config(
        "MiniMaxConfig", **_WIDE, **_HEADS, layer_types=_LAYERS, num_local_experts=2, num_experts_per_tok=1,
        head_dim=16,
    ),
}  # fmt: skip


def tiny_hybrid(name: str, scale: float = 3.0) -> torch.nn.Module:
    """Build a model of random weights, so large that its logits differ from token to token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HYBRIDS[name](), dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 and not key.endswith("A_log"):  # of which the model takes the exponential
                parameter.mul_(scale)
    return model
