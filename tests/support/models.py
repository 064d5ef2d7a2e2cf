"""Tiny random models of many architectures, and drafts cut out of them."""

from __future__ import annotations

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteSWAConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

VOCAB_SIZE = 97
MAX_POSITIONS = 160
_NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# Wide weights, so that texts vary and the best logit leads by far more than rounding.
TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    **_NO_SPECIAL,
}
TINY_GROUPED = {**TINY, "num_key_value_heads": 2}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": MAX_POSITIONS,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    **_NO_SPECIAL,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**TINY_GROUPED),
    "qwen3": Qwen3Config(**TINY_GROUPED, head_dim=16),
    "glm4": Glm4Config(**TINY_GROUPED, head_dim=16),
    "mistral-window": MistralConfig(**TINY_GROUPED, sliding_window=7, head_dim=8),
    "gemma2": Gemma2Config(**TINY_GROUPED, sliding_window=5, head_dim=16, attn_logit_softcapping=5.0),
    "phi3": Phi3Config(**TINY_GROUPED),
    "granite-swa": GraniteSWAConfig(
        **TINY_GROUPED, sliding_window=7, layer_rope_theta=[1e4] * 3, attention_multiplier=0.3
    ),
    "gpt2": GPT2Config(**_GPT2),
    "gpt-neox": GPTNeoXConfig(**TINY),
}


# Chunks of eight positions. The last layer sees all positions and has no RoPE; it scales queries in steps of four
# positions. The layers are not alike, and the class names no decoder whose hidden states a drafter could read.
LLAMA4 = Llama4TextConfig(
    **TINY_GROUPED,
    intermediate_size_mlp=64,
    head_dim=8,
    moe_layers=[],
    no_rope_layers=[1, 1, 0],
    attention_chunk_size=8,
    floor_scale=4,
    attn_scale=0.5,
)
WITH_CHUNKS = {**CONFIGS, "llama4": LLAMA4}


def tiny_model(architecture: str, seed: int = 0) -> torch.nn.Module:
    """Build a random fp32 model of three layers."""
    torch.manual_seed(seed)
    config, options = WITH_CHUNKS[architecture], {}
    if getattr(config, "attn_logit_softcapping", None):
        options["attn_implementation"] = "eager"  # SDPA has no soft cap, but transformers before 5.18 runs it
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".sinks"):
            parameter.data.normal_(std=3.0)  # those of a new model may all be 0
    return model


def truncated_copy(model: torch.nn.Module, num_layers: int) -> torch.nn.Module:
    """Build a draft from a target's first layers: it agrees often, not always, so acceptance is ragged."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    short = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing = short.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert not missing, missing
    return short
