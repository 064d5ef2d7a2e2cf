"""What the readers of learned drafters' checkpoints share."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec_fast.errors import ConfigError
from specdec_fast.models.ragged_model import RaggedModel
from specdec_fast.ops.checks import stored


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read one file of weights, safetensors or PyTorch's own format, without running code in it.

    Raises:
        ConfigError: it is missing or damaged, or holds something else than tensors by name.

    """
    try:
        weights = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except (OSError, ValueError, EOFError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise ConfigError(f"cannot read the weights in {str(path)!r}: {error}") from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ConfigError(f"{str(path)!r} holds a {type(weights).__name__}; expected tensors by name.")
    return {name: stored(value) for name, value in weights.items()}  # PyTorch's format keeps lazy signs


def check_whole(target: RaggedModel) -> None:
    """Raise ``ConfigError`` if a target is sharded: its hidden states are not given to drafters then."""
    if target.is_sharded:
        raise ConfigError(f"{target.name} is sharded over processes, which no drafter fed by hidden states serves yet.")
