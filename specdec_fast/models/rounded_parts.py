"""Rounds the part of a sharded model's weights that a rank has: every rank rounds its own.

Which weights are rounded, and how, is decided for the whole model: a part of a linear may have so few outputs that it
would stay as it is. Groups of inputs begin at a part's first input. Where the parts have a multiple of a group's
inputs, their codes are those of the whole weight, and so are the numbers to which rows are rounded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from specdec_fast.freed_memory import return_freed_memory
from specdec_fast.models.quantized_linears import refuse_saving
from specdec_fast.models.rounded_models import WeightToRound, replace_weights, weights_to_round


def round_parts(model: PreTrainedModel, source: str, quantization: str) -> None:
    """Replace linears and experts of a copy of ``sharded_copy`` by rounded ones, one after the other.

    No other rank takes part. Raises ConfigError as ``round_weights``.

    Args:
        model: the copy, which nothing else may use.
        source: the name or folder that it was loaded from; its config makes the whole model, without numbers.
        quantization: a name in ``ROUNDINGS``.

    """
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    with torch.device("meta"):
        whole = type(model)(_of_class(config, model)).to(model.dtype).eval()
    parts = [_part_of(model, each) for each in weights_to_round(whole, quantization)]
    replace_weights(model, quantization, parts, {})
    return_freed_memory()
    refuse_saving(model)


def _of_class(config: Any, model: PreTrainedModel) -> Any:
    """Return the config, or that of its text model, with which a model of this class is made."""
    return config if isinstance(config, type(model.config)) else config.get_text_config(decoder=True)


def _part_of(model: PreTrainedModel, weight: WeightToRound) -> WeightToRound:
    owner = weight.name.removesuffix(f".{weight.attribute}")
    module: Any = model.get_submodule(owner)
    if isinstance(getattr(module, "part", None), nn.Module):  # below the module that exchanges the results
        owner = f"{owner}.part"
        module = module.part
    return replace(weight, name=f"{owner}.{weight.attribute}", module=module)
