"""Writing a trained drafter's checkpoint: ``config.json``, and weights in bf16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from specdec_fast.drafters.shared.checkpoint.settings import LAYER_SIZES
from specdec_fast.drafters.shared.checkpoint.weights import WEIGHTS_FILE
from specdec_fast.whole_files import replaced

_CONFIG = "config.json"
_STORED = torch.bfloat16


def write_checkpoint(
    module: nn.Module,
    layer: LlamaConfig,
    config: dict[str, Any],
    folder: Path,
    target: PreTrainedModel,
    draft_ids: Tensor | None,
) -> None:
    """Write ``config.json`` and ``model.safetensors``, weights in bf16.

    Args:
        module: the trained drafter, whose parameters have the names of checkpoints.
        layer: sizes of its layers.
        config: further entries of ``config.json``.
        folder: exists.
        target: the model that it was trained for.
        draft_ids: from ``frequent_ids``.
    """
    maps = {}
    if draft_ids is not None:
        ids = draft_ids.cpu()
        maps["d2t"] = ids - torch.arange(len(ids), device="cpu")
        maps["t2d"] = torch.zeros(layer.vocab_size, dtype=torch.bool, device="cpu").index_fill_(0, ids, True)
    config = {
        **config,
        "model_type": "llama",
        **layer_settings(layer),
        "draft_vocab_size": layer.vocab_size if draft_ids is None else len(draft_ids),
        "target_hidden_size": target.config.get_text_config(decoder=True).hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    write_files(folder, WEIGHTS_FILE, trained_weights(module), config, maps)


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a drafter's parameters by name, without an embedding that is the target's."""
    return {
        name: weight.detach()
        for name, weight in module.named_parameters()
        if weight.requires_grad or not name.endswith("embed_tokens.weight")
    }


def layer_settings(layer: LlamaConfig) -> dict[str, Any]:
    """Return the entries of ``config.json`` that describe transformer layers."""
    return {
        **{name: getattr(layer, name) for name in LAYER_SIZES},
        "rope_parameters": layer.rope_parameters,
        "rope_theta": layer.rope_parameters["rope_theta"],  # the name that transformers 4 looks for
    }


def write_files(
    folder: Path,
    file_name: str,
    weights: Mapping[str, Tensor],
    config: dict[str, Any],
    maps: Mapping[str, Tensor] | None = None,
) -> None:
    """Write ``config.json``, without which no drafter loads, and a file of weights.

    Both files are written before either takes its place. There is no ``config.json`` while the weights are replaced, so
    a process that is killed there leaves no drafter instead of new weights with an old configuration.

    Args:
        folder: exists.
        file_name: of the weights, in safetensors.
        weights: by name; they are stored in bf16.
        config: the entries of ``config.json``.
        maps: further tensors, stored as they are.

    Raises:
        OutputError: a file cannot be written.
    """
    stored = {name: weight.detach().to("cpu", _STORED).contiguous() for name, weight in weights.items()}
    with replaced(folder / _CONFIG) as config_path, replaced(folder / file_name) as weights_path:  # the last is first
        config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file({**stored, **(maps or {})}, weights_path, metadata={"format": "pt"})
        weights_path.chmod(0o644)  # safetensors writes 0600
        (folder / _CONFIG).unlink(missing_ok=True)
