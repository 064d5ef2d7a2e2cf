"""The checkpoint of an EAGLE-3 drafter, in the formats of three projects (arXiv 2503.01840).

The formats are raw checkpoints of SafeAILab/EAGLE, those that SpecForge writes for SGLang (they name their weights
alike), and those of vLLM's ``speculators``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from specdec_fast.drafters.shared.checkpoint.settings import LayerConfig, Settings
from specdec_fast.drafters.shared.checkpoint.weights import WeightTable

_EAGLE3 = "an EAGLE-3 drafter"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
PREFIXES = {"model.": "", "midlayer.": "layers.0."}  # of names in files, and what they are here


@dataclass(frozen=True)
class Eagle3Config(LayerConfig):
    """What ``config.json`` says of an EAGLE-3 drafter; without ``tap_layers`` it has the default ones."""

    norm_before_residual: bool  # the residual of the first layer is the feature after hidden_norm
    norm_before_fc: bool  # one norm (input_norm) comes before fc
    fc_norm: bool  # each tap has a norm before fc
    norm_output: bool  # the next row gets the hidden state after norm


def is_eagle3(folder: Path) -> bool:
    """Return whether a folder has the ``config.json`` of an EAGLE-3 drafter, and not of a model.

    Raises:
        ConfigError: ``architectures`` is no list of names.
    """
    settings = Settings.read_if_any(folder)
    if settings.is_speculators:
        return bool(settings.speculators_kind == "eagle3")
    return settings.is_named("eagle3") or "draft_vocab_size" in settings


def read_config(folder: Path) -> Eagle3Config:
    """Read a checkpoint's ``config.json``.

    Raises:
        ConfigError: there is none, it is of another kind of drafter, or it has settings that are not served.
    """
    top = Settings.read(folder, _EAGLE3)
    top.expect_speculators_kind("eagle3")
    of_layers = top.layer_settings()
    layer = of_layers.layer()
    settings = top.mapping("eagle_config") | top
    flags = {name: settings.flag(name, False) for name in _FLAGS}
    if settings.is_speculators and "norm_before_residual" not in settings:
        warnings.warn(
            f"{settings.where} does not say norm_before_residual. It is read as false, the default of speculators; "
            "vLLM reads true. If few draft tokens are accepted, add it to config.json.",
            stacklevel=2,
        )
    return Eagle3Config(
        folder=folder,
        layer=layer,
        sliding_windows=of_layers.sliding_windows(layer.num_hidden_layers),
        draft_vocab_size=settings.positive_integer("draft_vocab_size", layer.vocab_size),
        target_hidden_size=settings.positive_integer("target_hidden_size", layer.hidden_size),
        tap_layers=settings.tap_layers("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"),
        verifiers=settings.verifiers(),
        **flags,
    )


def weight_table(config: Eagle3Config, num_taps: int) -> WeightTable:
    """Return names and shapes of the weights of a drafter with ``num_taps`` taps, which ``fc`` takes concatenated."""
    layer = config.layer
    hidden = layer.hidden_size
    table = WeightTable("EAGLE-3")
    table.needed = {
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "layers.0.hidden_norm.weight": (hidden,),
    }
    table.optional = {"embed_tokens.weight": (layer.vocab_size, hidden)}
    table.add_taps("fc.weight", num_taps, config)
    if config.norm_before_fc:
        table.needed["input_norm.weight"] = (num_taps * config.target_hidden_size,)
    if config.fc_norm:
        table.needed |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(num_taps)}
    table.add_id_maps(config)
    for i in range(layer.num_hidden_layers):
        table.add_layer(layer, i, hidden if i else 2 * hidden)
    return table
