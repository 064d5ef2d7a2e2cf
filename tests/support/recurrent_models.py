"""Tiny random models with recurrent layers, one per family that transformers has, and drafts cut out of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

VOCAB_SIZE = 64
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_DENSE = {**_SIZES, "intermediate_size": 32, "max_position_embeddings": 256}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
_HYBRID = {**_DENSE, **_HEADS, "layer_types": [*3 * ["linear_attention"], "full_attention"]}
_DELTA = {
    **_HYBRID,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 16}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
_CONV = {**_DENSE, **_HEADS, "layer_types": ["conv", "conv", "full_attention", "conv"]}
_TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
_MADE: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3-next": ("Qwen3NextConfig", {**_DELTA, **_SHARED}),
    "qwen3.5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**_DELTA, **_SHARED}),
    "olmo-hybrid": ("OlmoHybridConfig", _HYBRID),
    "kimi-linear": (
        "KimiLinearConfig",
        {**_HYBRID, **_TWO_HEADS, "linear_num_heads": 2, "linear_head_dim": 8, "mlp_layer_types": 4 * ["dense"]},
    ),
    "bailing": (
        "BailingHybridConfig",
        {
            **_DENSE,
            **_TWO_HEADS,
            "layer_group_size": 4,
            "linear_num_heads": 2,
            "linear_head_dim": 8,
            "mlp_layer_types": 4 * ["dense"],
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "qk_head_dim": 16,
            "v_head_dim": 8,
        },
    ),
    "nemotron-h": (
        "NemotronHConfig",
        {
            **_DENSE,
            **_HEADS,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
    ),
    "bamba": ("BambaConfig", {**_DENSE, **_HEADS, **_MAMBA2, "attn_layer_indices": [2]}),
    "granite-4-h": (
        "GraniteMoeHybridConfig",
        {**_HYBRID, **_MAMBA2, "num_local_experts": 0, "shared_intermediate_size": 32},
    ),
    "falcon-h1": ("FalconH1Config", {**_DENSE, **_HEADS, **_MAMBA2, "mamba_d_ssm": 64}),
    "zamba2": (
        "Zamba2Config",
        {
            **_DENSE,
            **_TWO_HEADS,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "n_mamba_heads": 8,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "num_mem_blocks": 1,
        },
    ),
    "zamba": (
        "ZambaConfig",
        {
            **_DENSE,
            **_TWO_HEADS,
            "num_hidden_layers": 6,
            "n_mamba_heads": 2,
            "mamba_d_state": 8,
            "attn_layer_period": 3,
            "attn_layer_offset": 2,
        },
    ),
    "mamba2": ("Mamba2Config", {**_SIZES, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2}),
    "jamba": (
        "JambaConfig",
        {
            **_DENSE,
            **_HEADS,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "num_experts": 4,
            "expert_layer_period": 2,
            "mamba_d_state": 8,
        },
    ),
    "mamba": ("MambaConfig", {**_SIZES, "state_size": 8}),
    "falcon-mamba": ("FalconMambaConfig", {**_SIZES, "state_size": 8}),
    "lfm2": ("Lfm2Config", _CONV),
    "lfm2-moe": ("Lfm2MoeConfig", {**_CONV, **_EXPERTS}),
    "lfm3": ("Lfm3Config", _CONV),
    "minimax": (
        "MiniMaxConfig",
        {
            **_HYBRID,
            "head_dim": 16,
            "layer_types": 2 * ["linear_attention", "full_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
}
# Those that the installed transformers has.
FAMILIES = [name for name, (kind, _) in _MADE.items() if hasattr(transformers, kind)]
# One for each kind of recurrence: gated delta rule, decay per channel, Mamba-2 in one layer with attention, Mamba,
# convolutions alone, lightning attention.
KINDS = ["qwen3.5", "kimi-linear", "falcon-h1", "mamba", "lfm2", "minimax"]
# Weights are random and wide, so that texts vary. In 16 bits, experts of wider ones change too often with rounding, and
# Mamba overflows.
_SCALE = 6
_SCALE_OF_SOME = 3


def recurrent_config(family: str, **changed: Any) -> PreTrainedConfig:
    """Return the config of a tiny model, with some sizes changed."""
    kind, sizes = _MADE[family]
    make: Callable[..., PreTrainedConfig] = getattr(transformers, kind)
    return make(**(copy.deepcopy(sizes) | changed))


def recurrent_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changed: Any) -> torch.nn.Module:
    """Build a random model."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(recurrent_config(family, **changed), dtype=torch.float32).eval()
    is_narrow = "num_experts" in _MADE[family][1] or family in ("mamba", "falcon-mamba")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(_SCALE_OF_SOME if is_narrow else _SCALE)
    return model.to(dtype)


def noisy_copy(model: torch.nn.Module, noise: float = 0.02) -> torch.nn.Module:
    """Return a draft of the same architecture that agrees often, not always, so that acceptance is ragged."""
    torch.manual_seed(1)
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    return draft


def prompts_of(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Draw prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]
