"""The checkpoint of a DFlash or DSpark drafter (arXiv 2602.06036), in the formats of three projects.

The formats are those of z-lab and SGLang, of deepseek-ai/DeepSpec (they name their weights alike), and of vLLM's
``speculators``. DSpark is DFlash with a Markov head and, in most checkpoints, a confidence head.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specdec_fast.drafters.shared.checkpoint.settings import MOST_PARTS, LayerConfig, Settings
from specdec_fast.drafters.shared.checkpoint.weights import Shape, WeightTable
from specdec_fast.errors import ConfigError

MARKOV_HEADS = ("vanilla", "gated", "rnn")
_DFLASH = "a DFlash or DSpark drafter"
_KINDS = ("dflash", "dspark")
_SOFTCAP = "final_logit_softcapping"
_TAPS = "target_layer_ids"
_TAPS_OF_SPECULATORS = "aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class DFlashConfig(LayerConfig):
    """What ``config.json`` says of a drafter."""

    block_size: int  # rows of a block as it was trained: the newest token and block_size - 1 masks
    mask_token_id: int  # stands for a token to be drafted
    causal: tuple[bool, ...]  # per layer, whether a row of a block sees only the rows before it
    # whether the row of the newest token drafts, so that row j chooses the token behind its position (DSpark);
    # otherwise row j > 0 chooses the token at its position
    sample_from_anchor: bool
    markov_rank: int  # width of the Markov head; 0: none
    markov_head_type: str  # one of MARKOV_HEADS
    confidence_with_markov: bool | None  # whether the confidence head reads the Markov head's embedding; None: no head
    embedding_scale: float  # factor on the embeddings
    output_scale: float  # factor on the logits
    softcap: float | None  # logits become softcap * tanh(logits / softcap); None: they stay

    @property
    def most_draft_tokens(self) -> int:
        """The number of tokens that a whole block drafts."""
        return self.block_size - (not self.sample_from_anchor)


def is_dflash(folder: Path) -> bool:
    """Return whether a folder has the ``config.json`` of a DFlash or DSpark drafter.

    Raises:
        ConfigError: ``architectures`` is no list of names.
    """
    settings = Settings.read_if_any(folder)
    if settings.is_speculators:
        return settings.speculators_kind in _KINDS
    return any(settings.is_named(kind) for kind in _KINDS) or "dflash_config" in settings


def read_config(folder: Path) -> DFlashConfig:
    """Read a checkpoint's ``config.json``.

    Raises:
        ConfigError: there is none, it is of another kind of drafter, or it has settings that are not served.
    """
    top = Settings.read(folder, _DFLASH)
    top.expect_speculators_kind(*_KINDS)
    is_dspark = top.speculators_kind == "dspark" if top.is_speculators else top.is_named("dspark")
    of_layers = top.layer_settings()
    settings = top | top.mapping("dflash_config")
    _refuse_others(settings | of_layers)
    layer = of_layers.layer()
    windows = _windows(of_layers, settings, layer.num_hidden_layers)
    rank = 0 if settings.get("markov_rank") in (None, 0) else settings.positive_integer("markov_rank", 1)
    return DFlashConfig(
        folder=folder,
        layer=layer,
        sliding_windows=windows,
        draft_vocab_size=top.positive_integer("draft_vocab_size", layer.vocab_size),
        target_hidden_size=settings.positive_integer("target_hidden_size", layer.hidden_size),
        tap_layers=settings.tap_layers(_TAPS_OF_SPECULATORS if top.is_speculators else _TAPS),
        verifiers=top.verifiers(),
        block_size=_block_size(settings),
        mask_token_id=_mask_token_id(settings, layer.vocab_size),
        causal=_causal(of_layers, settings, windows),
        sample_from_anchor=settings.flag("sample_from_anchor", is_dspark or rank > 0),
        markov_rank=rank,
        markov_head_type=_markov_head_type(settings),
        confidence_with_markov=_confidence(settings, rank),
        embedding_scale=settings.positive_number("input_embedding_scale", 1.0),
        output_scale=settings.positive_number("output_multiplier", 1.0),
        softcap=None if settings.get(_SOFTCAP) in (None, 0) else settings.positive_number(_SOFTCAP, 1.0),
    )


def _refuse_others(settings: Settings) -> None:
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
        raise ConfigError(f"{settings.where} has {', '.join(refused)}, which this library does not serve.")


def _windows(of_layers: Settings, settings: Settings, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer; ``use_swa`` gives all layers one, unless ``layer_types`` names some."""
    windows = of_layers.sliding_windows(num_layers)
    if settings.flag("use_swa", False) and not any(windows):
        place, name = (settings, "swa_window_size") if "swa_window_size" in settings else (of_layers, "sliding_window")
        windows = (place.positive_integer(name, None),) * num_layers
    return windows


def _causal(of_layers: Settings, settings: Settings, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Return which layers are causal; without a setting those that ``layer_types`` gives a window."""
    name = "is_causal" if "is_causal" in settings else "causal"
    by_type = "sliding_attention" in of_layers.names("layer_types")
    if settings.get(name) is None and by_type and not settings.flag("sliding_window_non_causal", False):
        causal = tuple(window is not None for window in windows)
    else:
        causal = (settings.flag(name, False),) * len(windows)
    if any(window is not None and not is_causal for window, is_causal in zip(windows, causal, strict=True)):
        raise ConfigError(f"{settings.where} has layers with a sliding window that are not causal; none is served.")
    return causal


def _block_size(settings: Settings) -> int:
    size = settings.positive_integer("block_size", 16, MOST_PARTS)
    if size < 2:
        raise ConfigError(f"{settings.where}: block_size is {size}; expected at least 2.")
    return size


def _mask_token_id(settings: Settings, vocab_size: int) -> int:
    token = settings.get("mask_token_id")
    if type(token) is not int or not 0 <= token < vocab_size:
        raise ConfigError(f"{settings.where}: mask_token_id is {token!r}; expected an id below {vocab_size}.")
    return token


def _markov_head_type(settings: Settings) -> str:
    name = str(settings.get("markov_head_type") or MARKOV_HEADS[0]).lower()
    if name not in MARKOV_HEADS:
        raise ConfigError(f"{settings.where}: markov_head_type is {name!r}; expected {', '.join(MARKOV_HEADS)}.")
    return name


def _confidence(settings: Settings, markov_rank: int) -> bool | None:
    with_markov = settings.flag("confidence_head_with_markov", False)
    if not settings.flag("enable_confidence_head", False):
        return None
    if with_markov and not markov_rank:
        raise ConfigError(
            f"{settings.where}: confidence_head_with_markov is set and markov_rank is not; take a complete checkpoint."
        )
    return with_markov


def weight_table(config: DFlashConfig, num_taps: int) -> WeightTable:
    """Return names and shapes of the weights of a drafter with ``num_taps`` taps, which ``fc`` takes concatenated."""
    layer = config.layer
    hidden = layer.hidden_size
    table = WeightTable("DSpark" if config.markov_rank else "DFlash")
    table.needed = {
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        **_heads(config),
    }
    table.optional = {"embed_tokens.weight": (layer.vocab_size, hidden)}
    table.add_taps("fc.weight", num_taps, config)
    table.add_id_maps(config)
    # The target's output layer has other rows than a drafter of some ids needs.
    is_full = config.draft_vocab_size == layer.vocab_size
    (table.optional if is_full else table.needed)["lm_head.weight"] = (config.draft_vocab_size, hidden)
    for i in range(layer.num_hidden_layers):
        table.add_layer(layer, i, hidden)
        table.needed |= {f"layers.{i}.self_attn.{name}.weight": (layer.head_dim,) for name in ("q_norm", "k_norm")}
    if config.confidence_with_markov is not None:
        table.optional["confidence_head.proj.bias"] = (1,)
    return table


def _heads(config: DFlashConfig) -> dict[str, Shape]:
    hidden = config.layer.hidden_size
    rank = config.markov_rank
    shapes: dict[str, Shape] = {}
    if rank:
        shapes["markov_head.markov_w1.weight"] = (config.layer.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
        inputs = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, hidden + 2 * rank)}
        if config.markov_head_type in inputs:
            name, size, width = inputs[config.markov_head_type]
            shapes |= {f"markov_head.{name}.weight": (size, width), f"markov_head.{name}.bias": (size,)}
    if config.confidence_with_markov is not None:
        shapes["confidence_head.proj.weight"] = (1, hidden + (rank if config.confidence_with_markov else 0))
    return shapes
