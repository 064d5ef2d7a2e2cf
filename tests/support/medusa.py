"""Medusa checkpoints with random weights in every format, and their logits, computed from the formula."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

FORMATS = ("pt", "safetensors", "prefixed", "vllm", "vllm-prefixed")


def random_heads(
    vocab_size: int, hidden: int, num_heads: int = 3, num_blocks: int = 1, bias: bool = True
) -> list[tuple[list[tuple[Tensor, Tensor | None]], Tensor]]:
    """Return blocks (weight, bias) and output layer of each head."""
    generator = torch.Generator().manual_seed(num_heads)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    heads = []
    for _ in range(num_heads):
        blocks = [(random(hidden, hidden), random(hidden) if bias else None) for _ in range(num_blocks)]
        heads.append((blocks, random(vocab_size, hidden)))
    return heads


def named(heads, kind: str) -> dict[str, Tensor]:
    """Return the weights under the names of a format."""
    weights = {}
    for i, (blocks, output) in enumerate(heads):
        is_vllm = kind.startswith("vllm")
        for j, (weight, bias) in enumerate(blocks):
            block = f"blocks.{i}.layers.{j}" if is_vllm else f"{i}.{j}.linear"
            weights[f"{block}.weight"] = weight
            if bias is not None:
                weights[f"{block}.bias"] = bias
        weights[f"lm_heads.{i}.weight" if is_vllm else f"{i}.{len(blocks)}.weight"] = output
    prefix = {"prefixed": "medusa_head.", "vllm-prefixed": "medusa_heads."}.get(kind, "")
    return {prefix + name: weight for name, weight in weights.items()}


def write_heads(folder: Path, weights: dict[str, Tensor], kind: str = "safetensors", **config) -> Path:
    """Write a checkpoint as one of ``FORMATS``; ``config`` goes into its ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "pt":
        torch.save(weights, folder / "medusa_lm_head.pt")
    else:
        save_file(weights, folder / ("model.safetensors" if "vllm" in kind else "medusa_lm_head.safetensors"))
    # Published files name other numbers of heads than they hold.
    (folder / "config.json").write_text(json.dumps({"model_type": "medusa", "medusa_num_heads": 9, **config}))
    return folder


def logits_by_formula(head, hidden: Tensor) -> Tensor:
    """Apply one head of ``random_heads`` to hidden states ``[N, H]``: ``[N, vocab_size]``."""
    blocks, output = head
    for weight, bias in blocks:
        inner = hidden @ weight.T + (0 if bias is None else bias)
        hidden = hidden + inner * torch.sigmoid(inner)
    return hidden @ output.T
