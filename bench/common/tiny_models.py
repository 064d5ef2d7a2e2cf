"""A tiny random model of any architecture that ``AutoModelForCausalLM`` knows, from the defaults of its config."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ARCHITECTURES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB_SIZE = 97
NUM_LAYERS = 4
LARGEST = 20_000_000  # largest number of parameters of a tiny model
SPECIAL = VOCAB_SIZE - 1
_TOKENS = ("bos", "pad", "sep", "cls")

_WIDTHS = dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32)
_INNER = dict.fromkeys(
    ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "dff", "dim_ff",
     "n_inner", "intermediate_size_mlp", "dense_intermediate_size", "feed_forward_size", "d_inner",
     "shared_intermediate_size"),
    64,
)  # fmt: skip
_LAYERS = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), NUM_LAYERS
)
_HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
     "attention_heads", "swa_num_attention_heads"),
    4,
)  # fmt: skip
_KV_HEADS = dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups"), 2)
_HEAD_DIMS = dict.fromkeys(
    ("head_dim", "kv_channels", "dim_head", "d_kv", "attention_head_dim", "swa_head_dim", "qk_nope_head_dim",
     "v_head_dim", "index_head_dim", "d_head", "attention_head_size"),
    8,
)  # fmt: skip
_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
         "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"),
        32,
    ),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts"), 1),
}  # fmt: skip
_OTHERS = {
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "mamba_d_state", "state_size", "ssm_state_size", "rotary_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 256),
    "sliding_window": 12,
    "initializer_range": 0.3,  # wide weights, so that texts vary
}
_SIZES = {"vocab_size": VOCAB_SIZE, "decoder_vocab_size": VOCAB_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE}
_SIZES |= {**_WIDTHS, **_INNER, **_LAYERS, **_HEADS, **_KV_HEADS, **_HEAD_DIMS, **_EXPERTS, **_OTHERS}


class NotTinyError(Exception):
    """This file cannot make a tiny model of the architecture; the message says why."""


def tiny_model(architecture: str) -> PreTrainedModel:
    """Build a random fp32 model, in eval mode.

    Raises:
        NotTinyError: the architecture cannot be built from a config of small sizes.

    """
    try:
        config = tiny_config(CONFIG_MAPPING[architecture])
        with torch.device("meta"):
            num_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    except Exception as error:  # the code of an architecture may raise anything
        raise NotTinyError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    if num_parameters > LARGEST:
        raise NotTinyError(f"{num_parameters:,} parameters remain")
    torch.manual_seed(0)
    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except Exception as error:
        raise NotTinyError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def tiny_config(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return a config with small sizes in known fields, in lists with one entry per layer, and in nested configs."""
    default = vars(kind())
    layers = {default[name] for name in _LAYERS if isinstance(default.get(name), int)}
    # No text ends early. All other special tokens are one id that no prompt has, because some embeddings search for it.
    changed: dict[str, Any] = {f"{token}_token_id": SPECIAL for token in _TOKENS if default.get(f"{token}_token_id")}
    if "eos_token_id" in default:
        changed["eos_token_id"] = None
    for name, value in default.items():
        if name in _SIZES and (value is None or isinstance(value, (int, float))) and not isinstance(value, bool):
            changed[name] = _SIZES[name] if value is not None else None
        elif isinstance(value, PreTrainedConfig):
            changed[name] = tiny_config(type(value))
        elif isinstance(value, list) and len(value) in layers:
            changed[name] = _one_of_each(value)
    if "qk_rope_head_dim" in default:  # latent attention: other sizes determine head_dim, and no heads share keys
        changed.pop("head_dim", None)
        changed |= {name: _HEADS["num_attention_heads"] for name in _KV_HEADS if name in changed}
    try:
        return kind(**changed)
    except Exception:  # some architectures need a number for every special token
        return kind(**changed | {"eos_token_id": SPECIAL})


def _one_of_each(per_layer: list[Any]) -> list[Any]:
    """Return entries for few layers, one of every kind, in the order of their first occurrence."""
    kinds = [value for i, value in enumerate(per_layer) if value not in per_layer[:i]]
    return [kinds[i % len(kinds)] for i in range(NUM_LAYERS)]
