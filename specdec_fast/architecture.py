"""What a model says of itself: whether it can be paged, how far it reaches, and which layers slide."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from specdec_fast.errors import UnsupportedModelError

_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def check_decoder(model: PreTrainedModel) -> None:
    """Refuse what is no decoder of a kind that can be paged.

    Raises:
        UnsupportedModelError: the message says what it is.

    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UnsupportedModelError(f"{type(model).__name__} is not a Hugging Face model; pass one, or its name.")
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{type(model).__name__} is an encoder-decoder; only decoders are supported.")
    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None) or []
    exotic = sorted(set(layer_types) - _SERVED_LAYER_TYPES)
    if exotic:
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers of type {', '.join(exotic)}; "
            f"only {', '.join(sorted(_SERVED_LAYER_TYPES))} can be paged."
        )


def max_positions(config: Any) -> int | None:
    """Positions the model serves. Two kinds of RoPE change their frequencies, for the whole batch, with its longest
    sequence; outputs would then depend on the neighbours (I6), so such models are held to their original length.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    each = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # some have one per layer type
    batch_dependent = [parameters for parameters in each if parameters.get("rope_type") in _BATCH_DEPENDENT_ROPE]
    name = "original_max_position_embeddings"
    lengths = [parameters.get(name) or getattr(config, name, None) for parameters in batch_dependent]
    original = [int(length) for length in lengths if length]
    if original:
        return min(original)
    return getattr(config, "max_position_embeddings", None)


def sliding_layers(config: Any, num_layers: int) -> frozenset[int]:
    """Layers that must hand their window to the attention hook: one that slides by its mask alone would see too much.

    The probe is too short to notice a window, so this is decided from the config.
    """
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return frozenset(i for i, kind in enumerate(layer_types) if kind == "sliding_attention")
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return frozenset(range(num_layers) if slides else ())
