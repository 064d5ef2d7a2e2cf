"""From a name, a folder or a loaded model to one that can be served, and what its checkpoint says of a text's end."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec_fast.errors import ConfigError


def load_model(
    source: str | os.PathLike[str] | PreTrainedModel,
    dtype: torch.dtype | None,
    device: torch.device | None,
    role: str = "target",
) -> PreTrainedModel:
    """Load a Hugging Face model by name or folder, or take a loaded one as it is.

    Args:
        source: what ``AutoModelForCausalLM.from_pretrained`` takes, or a loaded model.
        dtype: of the weights; None takes the checkpoint's.
        device: None takes CUDA where there is one, else the CPU.
        role: what the source is called in errors.

    Raises:
        ConfigError: the source is none of these; there is no such model or device; files are damaged, weights are
            missing, or the model needs code of its own; or a loaded model has another dtype or device than asked for,
            or is in training mode.

    """
    if isinstance(source, nn.Module):  # one that is no Hugging Face model is told so by RaggedModel
        _check_loaded(source, dtype, device)
        return source
    if not isinstance(source, (str, os.PathLike)) or not isinstance(name := os.fspath(source), str) or not name:
        what = "empty" if isinstance(source, str) else f"a {type(source).__name__}"
        raise ConfigError(f"{role} is {what}; expected the name or folder of a Hugging Face model, or a loaded one.")
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype or "auto", trust_remote_code=False, output_loading_info=True
        )
        model = model.to(device).eval()
    except Exception as error:  # no such model or device, damaged files: every reader raises errors of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        missing = "" if Path(name).exists() else " (there is no such folder)"
        raise ConfigError(f"cannot load {name!r}{missing} onto {device}: {reason}") from error
    if absent := sorted(info["missing_keys"]):  # transformers leaves them random
        raise ConfigError(
            f"{name!r} lacks weights of {type(model).__name__}: {', '.join(absent[:3])} ({len(absent)} in all); take a "
            "complete checkpoint, or correct its config."
        )
    return model


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
