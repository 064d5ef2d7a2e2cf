"""Tiny models of architectures whose defaults are missing, inconsistent or large."""

from __future__ import annotations

import pytest
import torch

from bench.common.tiny_models import LARGEST, NotTinyError, tiny_model, varied
from support.grids import grid

# Each has a rule or a field of its own in bench/common/tiny_models.py.
MADE = {
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "ministral": {"head_dim": 8, "sliding_window": 12},
    "nemotron": {"num_key_value_heads": 2},
    "deepseek_v2": {"num_experts_per_tok": 2, "head_dim": 8, "qk_rope_head_dim": 8, "num_key_value_heads": 4},
    "longcat_flash": {"head_dim": 8, "qk_rope_head_dim": 8},
    "gemma3n_text": {"num_kv_shared_layers": 2, "intermediate_size": [64] * 4},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "zaya": {"num_experts_per_tok": 1},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "bert": {"is_decoder": True},
}  # fmt: skip


@pytest.mark.parametrize(
    "architecture", grid(list(MADE), keep=["dots1", "deepseek_v2", "gemma3n_text", "zaya", "lfm2_moe"])
)
def test_tiny_model_has_small_sizes_that_fit_each_other(architecture):
    model = tiny_model(architecture)
    assert {name: getattr(model.config, name) for name in MADE[architecture]} == MADE[architecture]
    assert sum(parameter.numel() for parameter in model.parameters()) < LARGEST
    with torch.inference_mode():
        assert torch.isfinite(model(torch.arange(9)[None]).logits).all()


def test_no_parameter_is_all_zeros_or_all_ones():
    model = varied(tiny_model("gpt2"))
    named = dict(model.named_parameters())
    assert {name.rsplit(".", 1)[1] for name in named} == {"weight", "bias"}
    assert [name for name, parameter in named.items() if parameter.unique().numel() < 2] == []


def test_what_cannot_be_built_has_a_reason():
    with pytest.raises(NotTinyError, match="hidden_size_per_layer_input must be 0"):
        tiny_model("gemma4_assistant")
