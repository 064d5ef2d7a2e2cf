"""Tiny random mixtures of experts, one per kind of router."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForCausalLM

from support.models import TINY_GROUPED

_SMALL = {**TINY_GROUPED, "num_hidden_layers": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEEPSEEK = {**_SMALL, "head_dim": 16, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
_LATENT = {
    **_DEEPSEEK,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(**_SMALL, num_local_experts=4),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(**_SMALL, num_experts=6, shared_expert_intermediate_size=40),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**_SMALL, head_dim=16, num_experts=6),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(**_DEEPSEEK, first_k_dense_replace=1, use_qk_norm=True),
    "dots1": lambda: transformers.Dots1Config(**_DEEPSEEK, first_k_dense_replace=0),
    "olmoe": lambda: transformers.OlmoeConfig(**_SMALL, num_experts=6),
    "ernie4.5-moe": lambda: transformers.Ernie4_5_MoeConfig(
        **_SMALL, moe_num_experts=6, moe_k=2, moe_num_shared_experts=1, moe_layer_start_index=0
    ),
    "hunyuan-moe": lambda: transformers.HunYuanMoEV1Config(**_SMALL, head_dim=16, num_experts=4, moe_topk=2),
    "granite-moe": lambda: transformers.GraniteMoeConfig(**_SMALL, num_local_experts=4),
    "granite-moe-shared": lambda: transformers.GraniteMoeSharedConfig(
        **_SMALL, num_local_experts=4, shared_intermediate_size=24
    ),
    "minimax-m2": lambda: transformers.MiniMaxM2Config(**_SMALL, head_dim=16, num_local_experts=4),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(**_LATENT),
    "deepseek-v2": lambda: transformers.DeepseekV2Config(**_LATENT, topk_method="group_limited_greedy"),
    "deepseek-v2-lite": lambda: transformers.DeepseekV2Config(**{**_LATENT, "q_lora_rank": None}, topk_method="greedy"),
    "gemma4-moe": lambda: transformers.Gemma4TextConfig(
        **{**_SMALL, "num_experts_per_tok": None},
        num_experts=4,
        top_k_experts=2,
        enable_moe_block=True,
        hidden_size_per_layer_input=0,
        head_dim=16,
        global_head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=64,
    ),
    "phimoe": lambda: transformers.PhimoeConfig(**_SMALL, num_local_experts=4),
    "gpt-oss": lambda: transformers.GptOssConfig(**_SMALL, head_dim=16, num_local_experts=4),  # transposed, biases
    "flex-olmo": lambda: transformers.FlexOlmoConfig(**_SMALL, num_experts=6),
}


def tiny_mixture(name, dtype=torch.float32):
    return mixture_of(CONFIGS[name]()).to(dtype)


def mixture_of(config):
    """Build a model whose routers do not leave the choice of experts to ties."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for which, parameter in model.named_parameters():
        if which.endswith(("gate.weight", "router.weight")):  # some are zeros at first, and all experts would tie
            torch.nn.init.normal_(parameter, std=0.3)
    return model
