"""The weights of a SpecBlock checkpoint: their names and shapes."""

from __future__ import annotations

from torch import Tensor

from specdec_fast.drafters.eagle3.weights import expect_shapes
from specdec_fast.drafters.specblock.config import NUM_CLASSES, SpecBlockConfig

RANK_FEATURES = 15  # beside the hidden state: ten log-probabilities, three gaps, the top probability, the entropy
_RANK_HIDDEN = 256
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def check_weights(config: SpecBlockConfig, num_taps: int, weights: dict[str, Tensor]) -> None:
    """Check names and shapes.

    Raises:
        ConfigError: a weight is missing, has another shape, or belongs to something that is not served.

    """
    needed, optional = shapes_of(config, num_taps)
    hint = {"input_layer.condition_proj.weight": f" ({num_taps} taps of {config.target_hidden_size})"}
    expect_shapes(config.folder, "SpecBlock", weights, (needed, optional), hint)


def shapes_of(config: SpecBlockConfig, num_taps: int) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the shapes of the weights that must exist, and of those that may."""
    layer, hidden = config.layer, config.layer.hidden_size
    first = {
        "condition_proj.weight": (hidden, num_taps * config.target_hidden_size),
        "condition_norm.weight": (hidden,),
        "token_norm.weight": (hidden,),
        "position_queries.weight": (config.num_slots, hidden),
        "query_norm.weight": (hidden,),
        "fuse.weight": (hidden, 3 * hidden),
    }
    needed: dict[str, tuple[int, ...]] = {f"input_layer.{name}": shape for name, shape in first.items()}
    needed |= {
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "rank_head.0.weight": (_RANK_HIDDEN, hidden + RANK_FEATURES),
        "rank_head.2.weight": (NUM_CLASSES, _RANK_HIDDEN),
    }
    optional: dict[str, tuple[int, ...]] = {
        "input_layer.embed_tokens.weight": (layer.vocab_size, hidden),
        "t2d": (layer.vocab_size,),
    }
    is_full = config.draft_vocab_size == layer.vocab_size
    (optional if is_full else needed)["d2t"] = (config.draft_vocab_size,)
    heads, kv_heads = layer.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
    for i in range(layer.num_hidden_layers):
        prefix = f"layers.{i}."
        for name, size in zip(_PROJECTIONS, (heads, kv_heads, kv_heads, hidden), strict=True):
            needed[f"{prefix}self_attn.{name}.weight"] = (size, heads if name == "o_proj" else hidden)
        for name in ("gate_proj", "up_proj"):
            needed[f"{prefix}mlp.{name}.weight"] = (layer.intermediate_size, hidden)
        needed[f"{prefix}mlp.down_proj.weight"] = (hidden, layer.intermediate_size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            needed[f"{prefix}{name}.weight"] = (hidden,)
        if i > 0:
            needed[f"shift_proj.{i - 1}.weight"] = (hidden, 2 * hidden)
    return needed, optional
