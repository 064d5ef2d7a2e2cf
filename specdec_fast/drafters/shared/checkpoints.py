"""What the readers of learned drafters' checkpoints share."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec_fast.errors import ConfigError
from specdec_fast.models.loading import cause_shown, why_unreadable
from specdec_fast.ops.checks import stored
from specdec_fast.runner.ragged_model import RaggedModel


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read one file of weights, safetensors or PyTorch's own format, without running code in it.

    Raises:
        ConfigError: it is missing or damaged, or holds something else than tensors by name.

    """
    try:
        weights = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # bytes that are damaged can raise nearly any
        raise ConfigError(
            f"cannot read the weights in {str(path)!r}: {why_unreadable(error)}; expected tensors by name, in "
            "safetensors or PyTorch's format."
        ) from cause_shown(error)
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise ConfigError(f"{str(path)!r} holds a {type(weights).__name__}; expected tensors by name.")
    if wrong := [name for name, value in weights.items() if not _is_dense(value)]:
        raise ConfigError(f"{str(path)!r}: {wrong[0]} is no dense tensor with memory; expected dense tensors by name.")
    return {name: stored(value) for name, value in weights.items()}  # PyTorch's format keeps lazy signs


def _is_dense(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta and not value.is_nested


def check_whole(target: RaggedModel) -> None:
    """Raise ``ConfigError`` if a target is sharded: its hidden states are not given to drafters then."""
    if target.is_sharded:
        raise ConfigError(f"{target.name} is sharded over processes, which no drafter fed by hidden states serves yet.")
