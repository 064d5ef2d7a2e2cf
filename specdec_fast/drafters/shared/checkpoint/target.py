"""Whether a drafter's checkpoint fits a target, and what it takes from the target."""

from __future__ import annotations

from torch import Tensor

from specdec_fast.drafters.shared.checkpoint.settings import LayerConfig
from specdec_fast.errors import ConfigError, SpecDecError, VocabularyMismatchError
from specdec_fast.models.hidden_states import checked_taps, default_taps
from specdec_fast.runner.ragged_model import RaggedModel


def check_whole(target: RaggedModel) -> None:
    """Raise ``ConfigError`` if a target is sharded: its hidden states are not given to drafters then."""
    if target.is_sharded:
        raise ConfigError(f"{target.name} is sharded over processes, which no drafter fed by hidden states serves yet.")


def check_target(config: LayerConfig, target: RaggedModel) -> None:
    """Check that a checkpoint was made for a target.

    Raises:
        ConfigError, VocabularyMismatchError: it was made for another one, or the target is sharded.

    """
    where = repr(str(config.folder))
    name = type(target.model).__name__
    check_whole(target)
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


def taps_of(config: LayerConfig, target: RaggedModel, tap_layers: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the taps that are passed, or those that the checkpoint names, or the default ones.

    Raises:
        ConfigError: the target has no such taps.

    """
    try:
        taps = tap_layers or config.tap_layers or default_taps(target.layout.num_layers)
        return checked_taps(taps, target.layout.num_layers)  # type: ignore[return-value]
    except SpecDecError as error:
        where = repr(str(config.folder))
        raise ConfigError(f"the taps of {where} do not fit {target.name}: {error} Pass tap_layers.") from error


def target_embedding(config: LayerConfig, target: RaggedModel) -> Tensor:
    """Return the target's embedding ``[vocab_size, H]``, which a checkpoint without its own shares."""
    weight: Tensor = target.model.get_input_embeddings().weight.detach()
    if weight.shape[1] != config.layer.hidden_size:
        raise ConfigError(
            f"{str(config.folder)!r} has no embed_tokens, and the target's embedding is {weight.shape[1]} wide instead "
            f"of {config.layer.hidden_size}; take a complete checkpoint."
        )
    return weight
