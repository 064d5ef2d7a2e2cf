"""An MTP layer for a target that has none: the target's own first layer, behind the embedding of the next token.

It drafts about what the target would choose with one layer. Of the bundled target's greedy texts a step accepts half a
token, which suffices to check a drafter; its speed means nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

_HIDDEN_SHARE = 0.3  # of the hidden state beside the embedding, so that drafts depend on it as well


def write_cut_mtp(target: PreTrainedModel, folder: Path) -> None:
    """Write a checkpoint that holds only the MTP layer, under the names of DeepSeek-V3, in the target's dtype.

    Args:
        target: a dense model with ``model.layers`` and ``model.norm``, as Llama and Qwen3 are.
        folder: exists.

    """
    decoder = target.get_decoder()
    embedding: Tensor = target.get_input_embeddings().weight
    size = embedding.shape[1]
    scale = embedding.detach().float().square().mean().sqrt()  # of the rows that the first layer is used to
    one = torch.ones(size, device=embedding.device)
    identity = torch.eye(size, device=embedding.device)
    prefix = f"model.layers.{len(decoder.layers)}."
    weights = {
        **decoder.layers[0].state_dict(),
        "enorm.weight": scale * one,
        "hnorm.weight": scale * one,
        "eh_proj.weight": torch.cat([identity, _HIDDEN_SHARE * identity], dim=1),
        "shared_head.norm.weight": decoder.norm.weight.detach(),
    }
    own = {f"{prefix}{name}": weight.to(target.dtype, copy=True).contiguous() for name, weight in weights.items()}
    save_file(own, folder / "model.safetensors", {"format": "pt"})
