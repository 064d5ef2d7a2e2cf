"""From a name, a folder or a loaded model to one that can be served, and what its checkpoint says of a text's end."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec_fast.errors import ConfigError


def load_model(
    source: str | PreTrainedModel, dtype: torch.dtype | None, device: torch.device | None
) -> PreTrainedModel:
    """Load a Hugging Face model by name or folder, or take a loaded one as it is.

    Args:
        source: what ``AutoModelForCausalLM.from_pretrained`` takes, or a loaded model.
        dtype: of the weights; None takes the checkpoint's.
        device: None takes CUDA where there is one, else the CPU.

    Raises:
        ConfigError: there is no such model or device; or a loaded model has another dtype or device than asked for,
            or is in training mode.

    """
    if isinstance(source, nn.Module):  # one that is no Hugging Face model is told so by RaggedModel
        _check_loaded(source, dtype, device)
        return source
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto").to(device).eval()
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # no such model or device, not a causal model
        reason = " ".join(str(error).split())
        missing = "" if Path(source).exists() else " (there is no such folder)"
        raise ConfigError(f"cannot load {source!r}{missing} onto {device}: {reason}") from error


def _check_loaded(model: PreTrainedModel, dtype: torch.dtype | None, device: torch.device | None) -> None:
    name = type(model).__name__
    if model.training:
        raise ConfigError(f"{name} is in training mode, so dropout would change its output; call model.eval() first.")
    has = next(model.parameters())
    if dtype is not None and has.dtype != dtype:
        raise ConfigError(f"dtype={dtype}, but the loaded {name} is {has.dtype}; load it so, or leave dtype out.")
    if device is not None and has.device.type != torch.device(device).type:
        raise ConfigError(f"device={device}, but the loaded {name} is on {has.device}; move it, or leave device out.")


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids at which ``model.generate()`` stops: those of its generation config, and no others."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)
