"""Whether a drafter's checkpoint fits a target, and what it takes from the target."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from specdec_fast.drafters.shared.checkpoint.settings import LayerConfig
from specdec_fast.errors import ConfigError, SpecDecError, VocabularyMismatchError
from specdec_fast.models.hidden_states import checked_taps, default_taps
from specdec_fast.models.placement import copied_to
from specdec_fast.models.sharded import whole_end
from specdec_fast.ops.checks import stored
from specdec_fast.ranks.messages import GatherEnd
from specdec_fast.runner.ragged_model import RaggedModel


def embedding_of(target: RaggedModel) -> Any:
    """Return a target's embedding.

    A whole copy if the target is sharded, and one on the device where rows enter if it lies on another one; the drafter
    counts the memory of a copy.
    """
    return _end_of(target, is_output=False)


def output_layer_of(target: RaggedModel) -> Any:
    """Return a target's output layer; as ``embedding_of``."""
    return _end_of(target, is_output=True)


def _end_of(target: RaggedModel, is_output: bool) -> Any:
    layer = target.in_all_ranks(GatherEnd(is_output), partial(whole_end, target.model, is_output))
    return copied_to(layer, target.layout.device) if target.layout.is_spread else layer


def check_target(config: LayerConfig, target: RaggedModel) -> None:
    """Check that a checkpoint was made for a target.

    Raises:
        ConfigError, VocabularyMismatchError: it was made for another one.
    """
    where = repr(str(config.folder))
    name = type(target.model).__name__
    if config.verifiers and name not in config.verifiers:
        raise ConfigError(f"{where} was made for {', '.join(config.verifiers)}; the target is a {name}.")
    if config.layer.vocab_size != target.vocab_size:
        raise VocabularyMismatchError(
            f"{where} was made for {config.layer.vocab_size} ids, target {target.name} has {target.vocab_size}; pass a "
            "drafter that was trained for this target."
        )
    hidden_size = target.hf.config.hidden_size
    if config.target_hidden_size != hidden_size:
        raise ConfigError(
            f"{where} was made for hidden states of {config.target_hidden_size}, target {target.name} has "
            f"{hidden_size}; pass a drafter that was trained for this target."
        )


def fitting_taps(config: LayerConfig, target: RaggedModel, tap_layers: tuple[int, ...] | None) -> tuple[int, ...]:
    """Check that a checkpoint was made for a target; return its taps.

    They are ``tap_layers``, those that the checkpoint names, or else the default ones of EAGLE-3.

    Raises:
        ConfigError, VocabularyMismatchError: it was made for another target, or the target has no such taps.
    """
    check_target(config, target)
    try:
        taps = tap_layers or config.tap_layers or default_taps(target.hf.num_layers)
        return checked_taps(taps, target.hf.num_layers)  # type: ignore[return-value]
    except SpecDecError as error:
        where = repr(str(config.folder))
        raise ConfigError(f"the taps of {where} do not fit {target.name}: {error} Pass tap_layers.") from error


def embedding_weight(config: LayerConfig, weights: dict[str, Tensor], target: RaggedModel) -> Tensor:
    """Return the embedding ``[vocab_size, H]`` of a checkpoint, or that of the target; see ``weight_or_targets``."""
    layer = None if "embed_tokens.weight" in weights else embedding_of(target)
    return weight_or_targets(config, weights, "embed_tokens", layer)


def weight_or_targets(config: LayerConfig, weights: dict[str, Tensor], name: str, layer: nn.Module | None) -> Tensor:
    """Return the weight ``[vocab_size, H]`` of a layer in a checkpoint, or that of the target's where it has none.

    Raises:
        ConfigError: the layer's weight has other sizes, or is not of floating-point numbers.
    """
    if (stored_weight := weights.get(f"{name}.weight")) is not None:
        return stored_weight
    weight: Any = getattr(layer, "weight", None)
    num_ids = config.layer.vocab_size
    width = config.layer.hidden_size
    is_matrix = isinstance(weight, Tensor) and weight.is_floating_point() and weight.ndim == 2
    if is_matrix and len(weight) >= num_ids and weight.shape[1] == width:
        return stored(weight.detach()).contiguous()
    kind = list(weight.shape) if isinstance(weight, Tensor) else type(layer).__name__
    raise ConfigError(
        f"{str(config.folder)!r} has no {name}, and the target's is {kind}; expected {[num_ids, width]}. Take a "
        "complete checkpoint, or one that was trained for this target."
    )
