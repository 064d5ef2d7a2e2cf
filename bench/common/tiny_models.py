"""A tiny random model of any architecture that ``AutoModelForCausalLM`` knows, from the defaults of its config."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
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

_WIDTHS = dict.fromkeys(
    ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim",
     "hidden_size_global", "adapter_in_dim", "adapter_out_dim", "adapter_input_size", "router_hidden_size"),
    32,
)  # fmt: skip
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
     "attention_heads", "swa_num_attention_heads", "mamba_n_heads"),
    4,
)  # fmt: skip
_KV_HEADS = dict.fromkeys(
    ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups", "kv_n_heads"), 2
)
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
    **dict.fromkeys(("num_kv_shared_layers", "zero_expert_num", "n_groups"), 2),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "index_topk"), 12),
    # many, because positions for which all heads have a score of 0 are equal, and torch.topk takes any of them
    "index_n_heads": 16,
    "floor_scale": 8,  # positions in a step of Llama-4's factor on queries
    "initializer_range": 0.3,  # wide weights, so that texts vary
}
_VOCABULARIES = dict.fromkeys(
    ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "encoder_hash_byte_group_vocab"), VOCAB_SIZE
)
_SIZES = {**_VOCABULARIES, **_WIDTHS, **_INNER, **_LAYERS, **_HEADS, **_KV_HEADS, **_HEAD_DIMS, **_EXPERTS, **_OTHERS}
# Fields that have no default, or that a class cannot do without although its default is None.
_NEEDED = {"head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_shared_experts"}
# Fields that are no larger than by default, because some architectures can have only one expert per token, or no layer
# that reads another one's keys.
_AT_MOST = {*_EXPERTS, "num_kv_shared_layers"}
# What an architecture needs besides. Most are hybrids, whose first layers by default are all of one kind.
_HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
_SHORT_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
_INDEXED = {  # all or none, and none fails
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}  # fmt: skip
_LATENT_SLIDING = {  # they go into a config per layer
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
    "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    "pad_token_id": None,  # its embedding is zeros, so an indexer would score all positions alike
}  # fmt: skip
_FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {  # sections for three axes of positions: half a head in all
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    },
    "dbrx": {  # as in its checkpoint: by default there is no bound, no rope_theta, and an expert and a key head alone
        "attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0, "kv_n_heads": 2},
        "ffn_config": {"moe_top_k": 2},
    },
    "dots3_note": {"text_config": _LATENT_SLIDING},
    "dots3_note_text": _LATENT_SLIDING,
    "granitemoehybrid": _HYBRID,
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},  # by default a mixture of one expert
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": _SHORT_CONVOLUTIONS,
    "lfm2_moe": _SHORT_CONVOLUTIONS,
    "mamba2": {"head_dim": 16},  # twice its width over its heads
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {"axial_pos_embds": False},  # else two more sizes, whose sum is the width
    "xlstm": {"hidden_size": 128},  # its states have multiples of 64
    "xmod": {"default_language": "en_XX"},
}


class NotTinyError(Exception):
    """This file cannot make a tiny model of the architecture; the message says why."""


def tiny_model(architecture: str) -> PreTrainedModel:
    """Build a random fp32 model, in eval mode.

    Raises:
        NotTinyError: the architecture cannot be built from a config of small sizes.

    """
    try:
        config = tiny_config(CONFIG_MAPPING[architecture], _FIELDS.get(architecture, {}))
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


def varied(model: PreTrainedModel) -> PreTrainedModel:
    """Change parameters whose numbers are all alike, in place: a bias of zeros could be forgotten unnoticed."""
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("bias")]
    with torch.no_grad():
        for _, tensor in [*model.named_parameters(), *biases]:
            if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
                tensor.add_(torch.randn_like(tensor), alpha=0.2)
    return model


def tiny_config(kind: type[PreTrainedConfig], fields: Mapping[str, Any] = MappingProxyType({})) -> PreTrainedConfig:
    """Return a config with small sizes in known fields, in lists with one entry per layer, and in nested configs.

    Args:
        kind: the class of the config.
        fields: values for fields that no rule finds; a mapping for a nested config has values for its fields.

    """
    default = vars(kind())
    layers = {default[name] for name in _LAYERS if isinstance(default.get(name), int)}
    # No text ends early. All other special tokens are one id that no prompt has, because some embeddings search for it.
    changed: dict[str, Any] = {f"{token}_token_id": SPECIAL for token in _TOKENS if default.get(f"{token}_token_id")}
    if "eos_token_id" in default:
        changed["eos_token_id"] = None
    for name, value in default.items():
        if isinstance(value, PreTrainedConfig):
            changed[name] = tiny_config(type(value), fields.get(name) or {})
        elif isinstance(value, list) and len(value) in layers:
            changed[name] = [_SIZES[name]] * NUM_LAYERS if name in _SIZES else _one_of_each(value)
        elif name in _SIZES and not isinstance(value, bool):
            changed |= _size(name, value)
    changed |= _related(default, changed)
    changed |= {name: value for name, value in fields.items() if not isinstance(changed.get(name), PreTrainedConfig)}
    try:
        return kind(**changed)
    except Exception:  # some architectures need a number for every special token
        return kind(**changed | {"eos_token_id": SPECIAL})


def _size(name: str, default: Any) -> dict[str, Any]:
    if default is None:
        return {name: _SIZES[name] if name in _NEEDED else None}
    if not isinstance(default, (int, float)):
        return {}
    return {name: min(default, _SIZES[name]) if name in _AT_MOST else _SIZES[name]}


def _related(default: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields that follow from the sizes of others."""
    related: dict[str, Any] = {}
    if "qk_rope_head_dim" in default:  # latent attention: no heads share keys
        if "head_dim" in default:  # the part that rotates, or what other sizes determine
            rotates = default["head_dim"] == default["qk_rope_head_dim"]
            related["head_dim"] = changed["qk_rope_head_dim"] if rotates else default["head_dim"]
        related |= {name: _HEADS["num_attention_heads"] for name in _KV_HEADS if name in changed}
    if "mamba_d_head" in default:
        related["mamba_d_head"] = "auto"  # it follows from the number of heads
    if default.get("is_decoder") is False:
        related["is_decoder"] = True  # without it the architecture is an encoder, which sees later tokens
    return related


def _one_of_each(per_layer: list[Any]) -> list[Any]:
    """Return entries for few layers, one of every kind, in the order of their first occurrence."""
    kinds = [value for i, value in enumerate(per_layer) if value not in per_layer[:i]]
    return [kinds[i % len(kinds)] for i in range(NUM_LAYERS)]
