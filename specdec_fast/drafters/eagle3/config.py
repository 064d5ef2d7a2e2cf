"""The configuration of an EAGLE-3 checkpoint, in the formats of three projects (arXiv 2503.01840).

The formats are raw checkpoints of SafeAILab/EAGLE, those that SpecForge writes for SGLang (they name their weights
alike), and those of vLLM's ``speculators``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig
from transformers.activations import ACT2FN

from specdec_fast.drafters.shared.config_values import (
    MOST_PARTS,
    flag,
    mapping,
    names,
    positive_integer,
    positive_number,
    read_json,
    wrong_value,
)
from specdec_fast.errors import ConfigError

KIND = "speculators_model_type"
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose frequencies depend on no length
_EAGLE3 = "an EAGLE-3 drafter"
_TAP_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
# The settings of a layer that are read, beside its rotary embedding; LlamaConfig has defaults for most.
LAYER_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
)
_INTEGERS = {*LAYER_SIZES} - {"rms_norm_eps", "hidden_act"}
_LAYER_KEYS = (*LAYER_SIZES, "rope_theta", "rope_scaling", "rope_parameters")
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Of a rotary embedding; which of them it reads depends on its type.
_ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
)
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class LayerConfig:
    """What ``config.json`` says of every drafter made of transformer layers.

    Attributes:
        folder: where it was read.
        layer: sizes of its layers, their number (``num_hidden_layers``) and rotary embedding; ``vocab_size`` is the
            target's.
        sliding_windows: per layer, the number of positions that a row sees; None: all.
        draft_vocab_size: number of ids that it can propose.
        target_hidden_size: width of one tap.
        tap_layers: its taps, as ``Drafter.taps`` counts; None: the checkpoint names none.
        verifiers: classes of the targets that it was made for; empty if the checkpoint does not say.

    """

    folder: Path
    layer: LlamaConfig
    sliding_windows: tuple[int | None, ...]
    draft_vocab_size: int
    target_hidden_size: int
    tap_layers: tuple[int, ...] | None
    verifiers: tuple[str, ...]


@dataclass(frozen=True)
class Eagle3Config(LayerConfig):
    """What ``config.json`` says of an EAGLE-3 drafter; without ``tap_layers`` it has the default ones.

    Attributes:
        norm_before_residual: whether the residual of the first layer is the feature after ``hidden_norm``.
        norm_before_fc: whether one norm (``input_norm``) comes before ``fc``.
        fc_norm: whether each tap has a norm of its own before ``fc``.
        norm_output: whether the next row gets the hidden state after ``norm``.

    """

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool


def is_eagle3(folder: Path) -> bool:
    """Return whether a folder has the ``config.json`` of an EAGLE-3 drafter, and not of a model of its own.

    Raises:
        ConfigError: ``architectures`` is no list of names.

    """
    try:
        found = read_json(folder, _EAGLE3)
    except ConfigError:
        return False
    if KIND in found:
        return found[KIND] == "eagle3"
    architectures = names(folder, found, "architectures")
    return "draft_vocab_size" in found or any("eagle3" in name.lower() for name in architectures)


def read_config(folder: Path) -> Eagle3Config:
    """Read a checkpoint's ``config.json``.

    Raises:
        ConfigError: there is none, it is of another kind of drafter, or it has settings that are not served.

    """
    found = read_json(folder, _EAGLE3)
    kind = found.get(KIND, "eagle3")
    if kind != "eagle3":
        raise ConfigError(f"{str(folder)!r} is a drafter of kind {kind!r}; expected 'eagle3'.")
    is_speculators = KIND in found
    sizes = found.get("transformer_layer_config") if is_speculators else found
    if not isinstance(sizes, dict):
        raise ConfigError(f"{str(folder)!r}: config.json has no transformer_layer_config; take a complete checkpoint.")
    layer = layer_config(folder, sizes)
    nested = mapping(folder, found, "eagle_config")

    flags = {name: flag(folder, found if name in found else nested, name, False) for name in _FLAGS}
    if is_speculators and "norm_before_residual" not in found:
        warnings.warn(
            f"{str(folder)!r} does not say norm_before_residual. It is read as false, the default of speculators; vLLM "
            "reads true. If few draft tokens are accepted, add it to config.json.",
            stacklevel=2,
        )
    return Eagle3Config(
        folder=folder,
        layer=layer,
        sliding_windows=sliding_windows(folder, sizes, layer.num_hidden_layers),
        draft_vocab_size=positive_integer(folder, found, "draft_vocab_size", layer.vocab_size),
        target_hidden_size=positive_integer(folder, found, "target_hidden_size", layer.hidden_size),
        tap_layers=_tap_layers(folder, found, nested, is_speculators),
        verifiers=verifiers(folder, found),
        **flags,
    )


def layer_config(folder: Path, sizes: dict[str, Any]) -> LlamaConfig:
    """Return the layers that ``config.json`` describes.

    Raises:
        ConfigError: a size is missing or wrong, or the rotary embedding is not served.

    """
    if missing := [name for name in _NEEDED if sizes.get(name) is None]:
        raise ConfigError(f"{str(folder)!r}: config.json lacks {', '.join(missing)}; take a complete checkpoint.")
    settings = {name: sizes[name] for name in _LAYER_KEYS if sizes.get(name) is not None}
    settings.setdefault("num_hidden_layers", 1)
    for name in set(settings) & _INTEGERS:
        positive_integer(folder, settings, name, 1)
    positive_integer(folder, settings, "num_hidden_layers", 1, MOST_PARTS)
    positive_number(folder, settings, "rms_norm_eps", 1.0)
    for place in (settings, settings.get("rope_scaling"), settings.get("rope_parameters")):
        if isinstance(place, dict):
            for name in _ROPE_NUMBERS:
                positive_number(folder, place, name, 1.0)
    act = settings.get("hidden_act", "silu")
    if not isinstance(act, str) or act not in ACT2FN:
        raise wrong_value(
            folder, "hidden_act", act, "the name of an activation function of transformers, such as 'silu'"
        )
    try:
        layer = LlamaConfig.from_dict(settings)
        rope = layer.rope_parameters
    except Exception as error:  # transformers validates settings with errors of several types
        raise ConfigError(f"{str(folder)!r}: config.json is not valid: {error}") from error
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"{str(folder)!r} has the rotary embedding {rope}; expected one of type {', '.join(_ROPE_TYPES)}, "
            "over whole heads."
        )
    if layer.num_attention_heads % layer.num_key_value_heads:
        raise ConfigError(
            f"{str(folder)!r} has {layer.num_attention_heads} heads and {layer.num_key_value_heads} KV heads "
            "(num_key_value_heads); expected whole groups of heads."
        )
    return layer


def sliding_windows(folder: Path, sizes: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, None if it sees all positions.

    Raises:
        ConfigError: a layer is of another type, or its window is missing.

    """
    kinds = names(folder, sizes, "layer_types") or ("full_attention",) * num_layers
    if len(kinds) != num_layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"{str(folder)!r} has layer_types {list(kinds)}; expected full_attention or sliding_attention, each layer."
        )
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    window = positive_integer(folder, sizes, "sliding_window", None)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def expect_no_windows(folder: Path, sizes: dict[str, Any], num_layers: int) -> None:
    """Raise ``ConfigError`` if a layer has a sliding window; without ``layer_types`` a ``sliding_window`` is of all."""
    window = sizes.get("sliding_window") if sizes.get("use_sliding_window", True) else None
    is_named = sizes.get("layer_types") is not None
    if any(sliding_windows(folder, sizes, num_layers)) or (window is not None and not is_named):
        raise ConfigError(
            f"{str(folder)!r} has layers with a sliding window (sliding_window is {window!r}), which this library does "
            "not serve for this kind of drafter; expected full_attention in each layer."
        )


def verifiers(folder: Path, found: dict[str, Any]) -> tuple[str, ...]:
    """Return ``LayerConfig.verifiers``, which the format of ``speculators`` names; else raise ``ConfigError``."""
    verifier = mapping(folder, mapping(folder, found, "speculators_config"), "verifier")
    return names(folder, verifier, "architectures")


def _tap_layers(
    folder: Path, found: dict[str, Any], nested: dict[str, Any], is_speculators: bool
) -> tuple[int, ...] | None:
    """Return the taps that a checkpoint names. SGLang's id is that of the layer behind which a tap is read: tap - 1."""
    named = next((place[key] for place in (found, nested) for key in _TAP_KEYS if place.get(key)), None)
    if named is None:
        return None
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise ConfigError(f"{str(folder)!r} names the tap layers {named!r}; expected a list of integers.")
    return tuple(named) if is_speculators else tuple(layer + 1 for layer in named)
