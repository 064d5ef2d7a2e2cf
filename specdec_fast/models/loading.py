"""Loads models by name or folder, checks loaded ones, and reads the ids at which a text ends."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from specdec_fast.errors import ConfigError, NotYetSupportedError
from specdec_fast.models.parameter_shapes import other_shapes
from specdec_fast.models.placement import devices_of, expect_device_of_each, expect_in_memory, place
from specdec_fast.models.quantized_checkpoint import config_with_codes
from specdec_fast.models.quantized_linears import how_quantised_by, quantized_linears, refuse_saving
from specdec_fast.models.rounded_loading import RoundingConfig
from specdec_fast.models.rounded_models import quantised_already, round_rows, round_weights, rounded_copy
from specdec_fast.quantization.rounding import A8
from specdec_fast.ranks.operations import mesh_of
from specdec_fast.request.detokenizer import is_gguf
from specdec_fast.sampling_params import eos_ids


def load_model(
    source: str | os.PathLike[str] | PreTrainedModel,
    dtype: torch.dtype | None,
    device: torch.device | None,
    role: str = "target",
    quantization: str | None = None,
    tp_size: int = 1,
    device_map: str | Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Load a Hugging Face model by name or folder, or the one in a GGUF file, or return a loaded one unchanged.

    With ``quantization``, the linears of a model that is loaded here are rounded, and of a loaded one a copy is made
    with rounded linears, which shares all other tensors with it. With ``"a8"`` rows are rounded, and no weight.

    Args:
        source: an argument of ``AutoModelForCausalLM.from_pretrained``, the path of a GGUF file, or a loaded model.
        dtype: of the weights; None: the checkpoint's.
        device: None: CUDA if there is a device, else the CPU.
        role: name of the source in errors; for a ``"draft"``, ``device`` is that of the target.
        quantization: one of ``QUANTIZATIONS``; None: weights stay as they are.
        tp_size: number of processes over which it is sharded, all of which make this call in one process group.
        device_map: over which devices its modules are spread, as ``from_pretrained`` takes it; None: all on ``device``.

    Raises ConfigError if there is no such model or device; if files are damaged, weights are missing or have other
    shapes, or the model needs code of its own; if a loaded model has another dtype or device than asked for, has no
    weights, is in training mode, or is spread over devices without hooks that move rows between them; if a draft is
    sharded over processes; or if ``device_map`` is given with a loaded model or quantised weights.
    NotYetSupportedError if ``tp_size`` cannot divide the codes of a checkpoint.
    """
    setting = "draft_quantization" if role == "draft" else "quantization"
    if isinstance(source, nn.Module):  # RaggedModel refuses a module that is no Hugging Face model
        if device_map is not None:
            raise ConfigError(f"device_map={device_map!r}, but {role} is loaded already; leave device_map out.")
        _check_loaded(source, dtype, device, role)
        return source if quantization is None else _rounded_copy(source, quantization, role, setting)
    if not isinstance(source, (str, os.PathLike)) or not isinstance(name := os.fspath(source), str) or not name:
        what = "empty" if isinstance(source, str) else f"a {type(source).__name__}"
        raise ConfigError(f"{role} is {what}; expected the name or folder of a Hugging Face model, or a loaded one.")
    if device_map is not None:
        return _loaded_on_devices(name, dtype, device_map, quantization)
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _expect_usable(device)
    rounding = None if quantization == A8 else quantization
    if is_gguf(name):
        model = _from_gguf(name, dtype, device, setting, rounding)
        if quantization == A8:
            round_rows(model, setting)
        return refuse_saving(model)
    try:
        options = _options_of(name, setting, rounding, device)
        if tp_size > 1:
            options["distributed_config"] = DistributedConfig(tp_size=tp_size)
        model, info = _from_pretrained(name, dtype, options)
        model = (model if tp_size > 1 else model.to(device)).eval()
    except NotYetSupportedError:
        raise
    except Exception as error:  # no such model, damaged files, no memory; every reader raises errors of its own
        raise _unloadable(name, str(device), error) from cause_shown(error)
    _expect_complete(name, model, info)
    if quantization == A8:
        round_rows(model, setting)
    return refuse_saving(model)


def _rounded_copy(model: PreTrainedModel, quantization: str, role: str, setting: str) -> PreTrainedModel:
    if is_sharded(model):
        raise ConfigError(f"{role} is sharded over processes, and {setting}={quantization!r} rounds whole weights.")
    if len(devices := devices_of(model)) > 1:
        raise ConfigError(
            f"{role} is spread over {', '.join(map(str, devices))}, and weights in few bits are kept on one device; "
            f"leave {setting} out, or load it onto one."
        )
    return rounded_copy(model, quantization, setting)


def _loaded_on_devices(
    name: str, dtype: torch.dtype | None, device_map: str | Mapping[str, Any], quantization: str | None
) -> PreTrainedModel:
    where = f"device_map={device_map!r}"
    if not isinstance(device_map, str):
        expect_in_memory(device_map)
    try:
        config = None if is_gguf(name) else AutoConfig.from_pretrained(name, trust_remote_code=False)
        if quantization is not None or config is None or how_quantised_by(config) is not None:
            raise ConfigError(
                f"{where}, but the weights of {name!r} are in few bits, which are kept on one device; leave it out, or "
                "load a checkpoint of floating-point numbers, without quantization."
            )
        model, info = _from_pretrained(name, dtype, {"device_map": device_map})
        placed_by = getattr(model, "hf_device_map", {})
        if len(set(map(str, placed_by.values()))) > 1:
            place(model, placed_by)
        elif not isinstance(device_map, str):
            expect_device_of_each(model, device_map)
        model = model.eval()
    except ConfigError:
        raise
    except Exception as error:  # as in `load_model`; also without accelerate, or for a map without some module
        raise _unloadable(name, where, error) from cause_shown(error)
    _expect_complete(name, model, info)
    return refuse_saving(model)


def _from_pretrained(name: str, dtype: torch.dtype | None, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return AutoModelForCausalLM.from_pretrained(
        name,
        **options,
        dtype=dtype or "auto",
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they become an error that names them
    )


def _unloadable(name: str, where: str, error: Exception) -> ConfigError:
    folder = Path(name)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        return ConfigError(
            f"{name!r} holds an adapter of PEFT, and no model; load both, with "
            "AutoPeftModelForCausalLM.from_pretrained(...).eval() of the package peft, and pass the model."
        )
    missing = "" if folder.exists() else " (there is no such folder)"
    return ConfigError(f"cannot load {name!r}{missing} onto {where}: {why_unreadable(error)}")


def _expect_complete(name: str, model: PreTrainedModel, info: dict[str, Any]) -> None:
    if mismatched := list(info["mismatched_keys"]):
        raise ConfigError(f"{name!r} has {other_shapes(mismatched)}")
    if absent := sorted(info["missing_keys"]):  # transformers would leave them random
        raise ConfigError(
            f"{name!r} lacks weights of {type(model).__name__}: {', '.join(absent[:3])} ({len(absent)} in all); take a "
            "complete checkpoint, or correct its config."
        )


def _from_gguf(
    name: str, dtype: torch.dtype | None, device: torch.device, setting: str, quantization: str | None
) -> PreTrainedModel:
    from specdec_fast.models.gguf.loading import load_gguf
    from specdec_fast.quantization.gguf.container import read_gguf

    file = read_gguf(Path(name))
    if quantization is not None and file.code_types:
        raise quantised_already(repr(name), " and ".join(file.code_types), setting, quantization)
    try:
        model = load_gguf(file, dtype, device)
    except ConfigError:
        raise
    except Exception as error:  # no memory
        raise ConfigError(f"cannot load {name!r} onto {device}: {why_unreadable(error)}") from error
    if quantization is not None:
        round_weights(model, quantization)
    return model


def _options_of(name: str, setting: str, quantization: str | None, device: torch.device) -> dict[str, Any]:
    """Return the arguments with which transformers loads codes, or rounds weights while it loads them."""
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if quantization is not None and (how := how_quantised_by(config)) is not None:
        raise quantised_already(repr(name), how, setting, quantization)
    with_codes = config_with_codes(config)
    if with_codes is not None:
        return {"config": with_codes}
    if quantization is None:
        return {}
    return {"quantization_config": RoundingConfig(quantization, str(device))}


def cause_shown(error: Exception) -> Exception | None:
    """Return the error of a file that could not be loaded, as the cause of another one; None if it may not be shown.

    PyTorch's messages on files that hold more than tensors recommend ``weights_only=False``, which runs code in them.
    """
    return None if "weights_only" in str(error) else error


def why_unreadable(error: Exception) -> str:
    """Return in one line why a file could not be loaded, without PyTorch's recommendation (``cause_shown``)."""
    text = " ".join(str(error).split())
    if cause_shown(error) is not None:
        return text or type(error).__name__
    match = re.search(r"GLOBAL (\S+)", text)
    holds = f"it holds {match[1]}" if match else "it is damaged, or holds other things than tensors"
    return f"{holds}, and only tensors are read, because other objects can run code"


def _expect_usable(device: torch.device) -> None:
    try:
        torch.empty(1, device=device)
    except Exception as error:  # PyTorch raises another error for every kind of device
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"device={device} cannot be used here: {reason}; expected one that this PyTorch can compute on, such as "
            f"{'cuda' if torch.cuda.is_available() else 'cpu'}, or None."
        ) from error


def _check_loaded(model: nn.Module, dtype: torch.dtype | None, device: torch.device | None, role: str) -> None:
    name = f"{role} {type(model).__name__}"
    if model.training:
        raise ConfigError(f"{name} is in training mode, so dropout would change its output; call model.eval() first.")
    weights = dict(model.named_parameters())
    if not weights:
        raise ConfigError(f"{name} has no weights; expected a Hugging Face causal model, or its name or folder.")
    absent = [weight for weight, parameter in weights.items() if parameter.is_meta]
    if absent:
        raise ConfigError(
            f"{name} has weights on the meta device, which keeps no numbers: {', '.join(absent[:3])} ({len(absent)} "
            "in all); load it with from_pretrained, onto one device that has memory for all of it."
        )
    places = devices_of(model)
    if len(places) > 1 and (not hasattr(model, "_hf_hook") or quantized_linears(model)):
        why = "its weights are in few bits" if hasattr(model, "_hf_hook") else "nothing moves rows between these"
        raise ConfigError(
            f"{name} is spread over {', '.join(map(str, places))}, but {why}; load it by device_map in floating point, "
            "or onto one device, or shard a target over processes by its tensor-parallel plan (docs/scaling.md)."
        )
    if role == "draft" and is_sharded(model):
        raise ConfigError(f"{name} is sharded over processes; load the draft whole, in every process.")
    has = next(iter(weights.values()))
    if dtype is not None and has.dtype != dtype:
        raise ConfigError(
            f"dtype={dtype}, but the loaded {name} is {has.dtype}; load it in that dtype, or leave dtype out."
        )
    if device is None or places[0].type == device.type:
        return
    if role == "draft":
        raise ConfigError(f"the loaded {name} is on {places[0]}, its target on {device}; move one to the other's.")
    raise ConfigError(f"device={device}, but the loaded {name} is on {places[0]}; move it, or leave device out.")


def is_sharded(model: nn.Module) -> bool:
    """Return whether weights are sharded over processes: DTensors, as a tensor-parallel plan makes them."""
    return mesh_of(model) is not None


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids at which ``model.generate()`` stops: those of its generation config alone."""
    return frozenset(eos_ids(getattr(getattr(model, "generation_config", None), "eos_token_id", None)))
