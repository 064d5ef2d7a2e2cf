"""The configuration of a DFlash or DSpark checkpoint (arXiv 2602.06036), in the formats of three projects.

The formats are those of z-lab and SGLang, of deepseek-ai/DeepSpec (they name their weights alike), and of vLLM's
``speculators``. DSpark is DFlash with a Markov head and, in most checkpoints, a confidence head.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_fast.drafters.eagle3.config import KIND, LayerConfig, layer_config, sliding_windows, verifiers
from specdec_fast.drafters.shared.config_values import (
    MOST_PARTS,
    flag,
    mapping,
    names,
    positive_integer,
    positive_number,
    read_json,
)
from specdec_fast.errors import ConfigError

MARKOV_HEADS = ("vanilla", "gated", "rnn")
_DFLASH, _KINDS = "a DFlash or DSpark drafter", ("dflash", "dspark")
_SOFTCAP = "final_logit_softcapping"
_TAPS, _TAPS_OF_SPECULATORS = "target_layer_ids", "aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class DFlashConfig(LayerConfig):
    """What ``config.json`` says of a drafter.

    Attributes:
        block_size: rows of a block as it was trained: the newest token and ``block_size - 1`` masks.
        mask_token_id: the id that stands for a token to be drafted.
        causal: per layer, whether a row of a block sees only the rows before it.
        sample_from_anchor: whether the row of the newest token drafts, so that row j chooses the token behind its own
            position (DSpark); otherwise row j > 0 chooses the token at its own position.
        markov_rank: width of the Markov head; 0: none.
        markov_head_type: one of ``MARKOV_HEADS``.
        confidence_with_markov: whether the confidence head reads the Markov head's embedding too; None: there is none.
        embedding_scale: factor on the embeddings.
        output_scale: factor on the logits.
        softcap: logits become ``softcap * tanh(logits / softcap)``; None: they stay.

    """

    block_size: int
    mask_token_id: int
    causal: tuple[bool, ...]
    sample_from_anchor: bool
    markov_rank: int
    markov_head_type: str
    confidence_with_markov: bool | None
    embedding_scale: float
    output_scale: float
    softcap: float | None

    @property
    def most_draft_tokens(self) -> int:
        """The number of tokens that a whole block drafts."""
        return self.block_size - (not self.sample_from_anchor)


def is_dflash(folder: Path) -> bool:
    """Return whether a folder has the ``config.json`` of a DFlash or DSpark drafter.

    Raises:
        ConfigError: ``architectures`` is no list of names.

    """
    try:
        found = read_json(folder, _DFLASH)
    except ConfigError:
        return False
    if KIND in found:
        return found[KIND] in _KINDS
    return "dflash_config" in found or any(kind in _architectures(folder, found) for kind in _KINDS)


def read_config(folder: Path) -> DFlashConfig:
    """Read a checkpoint's ``config.json``.

    Raises:
        ConfigError: there is none, it is of another kind of drafter, or it has settings that are not served.

    """
    found = read_json(folder, _DFLASH)
    kind = found.get(KIND, "dspark" if "dspark" in _architectures(folder, found) else "dflash")
    if kind not in _KINDS:
        raise ConfigError(f"{str(folder)!r} is a drafter of kind {kind!r}; expected one of {', '.join(_KINDS)}.")
    is_speculators = KIND in found
    sizes = found.get("transformer_layer_config") if is_speculators else found
    if not isinstance(sizes, dict):
        raise ConfigError(f"{str(folder)!r}: config.json has no transformer_layer_config; take a complete checkpoint.")
    settings = {**found, **mapping(folder, found, "dflash_config")}
    _refuse_others(folder, settings | sizes)
    layer = layer_config(folder, sizes)
    windows = _windows(folder, sizes, settings, layer.num_hidden_layers)
    rank = 0 if settings.get("markov_rank") in (None, 0) else positive_integer(folder, settings, "markov_rank", 1)
    return DFlashConfig(
        folder=folder,
        layer=layer,
        sliding_windows=windows,
        draft_vocab_size=positive_integer(folder, found, "draft_vocab_size", layer.vocab_size),
        target_hidden_size=positive_integer(folder, settings, "target_hidden_size", layer.hidden_size),
        tap_layers=_tap_layers(folder, settings, is_speculators),
        verifiers=verifiers(folder, found),
        block_size=_block_size(folder, settings),
        mask_token_id=_mask_token_id(folder, settings, layer.vocab_size),
        causal=_causal(folder, sizes, settings, windows),
        sample_from_anchor=flag(folder, settings, "sample_from_anchor", kind == "dspark" or rank > 0),
        markov_rank=rank,
        markov_head_type=_markov_head_type(folder, settings),
        confidence_with_markov=_confidence(folder, settings, rank),
        embedding_scale=positive_number(folder, settings, "input_embedding_scale", 1.0),
        output_scale=positive_number(folder, settings, "output_multiplier", 1.0),
        softcap=None if settings.get(_SOFTCAP) in (None, 0) else positive_number(folder, settings, _SOFTCAP, 1.0),
    )


def _architectures(folder: Path, found: dict[str, Any]) -> str:
    return " ".join(names(folder, found, "architectures")).lower()


def _refuse_others(folder: Path, settings: dict[str, Any]) -> None:
    """Refuse relatives of DFlash whose forwards differ."""
    projector = settings.get("projector_type") or "dflash"
    wrong = {
        f"projector_type {projector!r}": projector != "dflash",
        "interleaved rotary embeddings": not settings.get("is_neox_style", settings.get("rope_is_neox_style", True)),
        "fc_layernorm": bool(settings.get("fc_layernorm")),
        "attention sinks": bool(settings.get("attention_sink_bias") or settings.get("add_swa_attention_sink_bias")),
        "shifted labels": bool(settings.get("shift_label")),
    }
    if refused := [name for name, is_wrong in wrong.items() if is_wrong]:
        raise ConfigError(f"{str(folder)!r} has {', '.join(refused)}, which this library does not serve.")


def _windows(folder: Path, sizes: dict[str, Any], settings: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer; ``use_swa`` gives all layers one, unless ``layer_types`` names some."""
    windows = sliding_windows(folder, sizes, num_layers)
    if flag(folder, settings, "use_swa", False) and not any(windows):
        place, name = (settings, "swa_window_size") if "swa_window_size" in settings else (sizes, "sliding_window")
        windows = (positive_integer(folder, place, name, None),) * num_layers
    return windows


def _causal(
    folder: Path, sizes: dict[str, Any], settings: dict[str, Any], windows: tuple[int | None, ...]
) -> tuple[bool, ...]:
    """Return which layers are causal; without a setting those that ``layer_types`` gives a window."""
    name = "is_causal" if "is_causal" in settings else "causal"
    by_type = "sliding_attention" in (sizes.get("layer_types") or ())
    if settings.get(name) is None and by_type and not flag(folder, settings, "sliding_window_non_causal", False):
        causal = tuple(window is not None for window in windows)
    else:
        causal = (flag(folder, settings, name, False),) * len(windows)
    if any(window is not None and not is_causal for window, is_causal in zip(windows, causal, strict=True)):
        raise ConfigError(f"{str(folder)!r} has layers with a sliding window that are not causal; none is served.")
    return causal


def _block_size(folder: Path, settings: dict[str, Any]) -> int:
    size = positive_integer(folder, settings, "block_size", 16, MOST_PARTS)
    if size < 2:
        raise ConfigError(f"{str(folder)!r}: block_size is {size}; expected at least 2.")
    return size


def _mask_token_id(folder: Path, settings: dict[str, Any], vocab_size: int) -> int:
    token = settings.get("mask_token_id")
    if type(token) is not int or not 0 <= token < vocab_size:
        raise ConfigError(f"{str(folder)!r}: mask_token_id is {token!r}; expected an id below {vocab_size}.")
    return token


def _markov_head_type(folder: Path, settings: dict[str, Any]) -> str:
    name = str(settings.get("markov_head_type") or MARKOV_HEADS[0]).lower()
    if name not in MARKOV_HEADS:
        raise ConfigError(f"{str(folder)!r}: markov_head_type is {name!r}; expected {', '.join(MARKOV_HEADS)}.")
    return name


def _confidence(folder: Path, settings: dict[str, Any], markov_rank: int) -> bool | None:
    with_markov = flag(folder, settings, "confidence_head_with_markov", False)
    if not flag(folder, settings, "enable_confidence_head", False):
        return None
    if with_markov and not markov_rank:
        raise ConfigError(
            f"{str(folder)!r}: confidence_head_with_markov is set and markov_rank is not; take a complete checkpoint."
        )
    return with_markov


def _tap_layers(folder: Path, settings: dict[str, Any], is_speculators: bool) -> tuple[int, ...] | None:
    """Return the taps. ``target_layer_ids`` are those of the layers behind which a tap is read: tap - 1."""
    named = settings.get(_TAPS_OF_SPECULATORS if is_speculators else _TAPS)
    if named is None:
        return None
    if not isinstance(named, list) or not named or not all(type(layer) is int for layer in named):
        raise ConfigError(f"{str(folder)!r} names the tap layers {named!r}; expected a list of integers.")
    return tuple(named) if is_speculators else tuple(layer + 1 for layer in named)
