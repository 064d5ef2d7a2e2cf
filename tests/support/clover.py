"""Clover checkpoints with random weights, and what their heads say, computed from the formulas."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, EPSILON, THETA = 32, 4, 2, 8, 40, 1e-5, 10_000.0
LAYER = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 160,
    "rms_norm_eps": EPSILON,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}


def random_clover(num_heads: int = 3, num_blocks: int = 1, qk_norm: bool = False) -> dict[str, Tensor]:
    """Return random weights by name."""
    generator = torch.Generator().manual_seed(num_heads)
    block = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    if qk_norm:
        block |= {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)}
    shapes: dict[str, tuple[int, ...]] = {f"augmenting_block.{name}.weight": shape for name, shape in block.items()}
    for i in range(num_heads):
        shapes[f"heads.{i}.norm.weight"] = (HIDDEN,)
        shapes |= {f"heads.{i}.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkv"}
        for j in range(num_blocks):
            shapes[f"heads.{i}.blocks.{j}.linear.weight"] = (HIDDEN, HIDDEN)
            shapes[f"heads.{i}.blocks.{j}.linear.bias"] = (HIDDEN,)
    weights = {}
    for name, shape in shapes.items():
        is_norm = "norm" in name
        scale = 0.3 if len(shape) == 1 else 2.0 / shape[1] ** 0.5
        weights[name] = torch.randn(shape, generator=generator) * scale + (1.0 if is_norm else 0.0)
    return weights


def write_clover(folder: Path, weights: dict[str, Tensor], vocab_size: int, /, **config) -> Path:
    """Write a checkpoint; ``config`` goes into its ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    heads = {name.split(".")[1] for name in weights if name.startswith("heads.")}
    blocks = {name.split(".")[3] for name in weights if ".blocks." in name}
    counts = {"clover_num_heads": len(heads), "clover_num_layers": len(blocks)}
    settings = {"model_type": "clover", "vocab_size": vocab_size, **counts, **LAYER, **config}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    return folder


def augmented(weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """Return h_0 of every row of one sequence, ``[n, H]``, for inputs ``[n, H]`` of the target's output layer."""
    prefix = "augmenting_block."
    own = {
        name.removeprefix(prefix).removesuffix(".weight"): w for name, w in weights.items() if name.startswith(prefix)
    }
    rows = _norm(hidden) * own["input_layernorm"]
    query, key, value = (
        (rows @ own[f"self_attn.{name}_proj"].T).view(len(rows), -1, HEAD_DIM).transpose(0, 1) for name in "qkv"
    )
    if "self_attn.q_norm" in own:
        query, key = _norm(query) * own["self_attn.q_norm"], _norm(key) * own["self_attn.k_norm"]
    query, key = _rotate(query), _rotate(key)
    key, value = (states.repeat_interleave(HEADS // KV_HEADS, dim=0) for states in (key, value))
    scores = query @ key.mT / HEAD_DIM**0.5
    future = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
    attended = (scores.masked_fill(future, -torch.inf).softmax(-1) @ value).transpose(0, 1).flatten(1)
    hidden = hidden + attended @ own["self_attn.o_proj"].T
    rows = _norm(hidden) * own["post_attention_layernorm"]
    gate, up = rows @ own["mlp.gate_proj"].T, rows @ own["mlp.up_proj"].T
    return hidden + (gate * torch.sigmoid(gate) * up) @ own["mlp.down_proj"].T


def behind(weights: dict[str, Tensor], index: int, hidden: Tensor, embedded: Tensor) -> Tensor:
    """Return a head's h ``[H]`` from the h before it and the output layer's row ``[H]`` of the token before."""
    head = f"heads.{index}"
    query = weights[f"{head}.q_proj.weight"] @ (_norm(hidden) * weights[f"{head}.norm.weight"])
    row = embedded / embedded.square().mean().sqrt()
    key, value = weights[f"{head}.k_proj.weight"] @ row, weights[f"{head}.v_proj.weight"] @ row
    parts = []
    for q, k, v in zip(query.chunk(HEADS), key.chunk(HEADS), value.chunk(HEADS), strict=True):
        parts.append((q @ k) / (q.norm() * k.norm()) * v)
    return hidden + torch.cat(parts)


def logits_of(weights: dict[str, Tensor], index: int, hidden: Tensor, output: Tensor) -> Tensor:
    """Return a head's logits ``[V]`` for its h and the target's output layer ``[V, H]``."""
    for j in range(sum(name.startswith(f"heads.{index}.blocks.") for name in weights) // 2):
        block = f"heads.{index}.blocks.{j}.linear"
        inner = weights[f"{block}.weight"] @ hidden + weights[f"{block}.bias"]
        hidden = hidden + inner * torch.sigmoid(inner)
    return output @ hidden


@torch.no_grad()
def dense_chain(
    weights: dict[str, Tensor], output: Tensor, features: Tensor, token_ids: list[int], choose, limit: int
) -> list[int]:
    """Draft a chain of the first tokens of all heads behind ``features [n - 1, 1, H]`` of a text of n tokens."""
    hidden, drafted = augmented(weights, features[:, 0])[-1], []
    for index in range(limit):
        hidden = behind(weights, index, hidden, output[[token_ids[-1], *drafted][-1]])
        drafted.append(choose(logits_of(weights, index, hidden, output), index))
    return drafted


def _norm(rows: Tensor) -> Tensor:
    return rows / (rows.square().mean(-1, keepdim=True) + EPSILON).sqrt()


def _rotate(states: Tensor) -> Tensor:
    """Rotate entries j and j + half of every row i by the angle i / theta ** (2 j / head_dim)."""
    half = HEAD_DIM // 2
    angles = torch.arange(states.shape[1])[:, None] * THETA ** (-torch.arange(half) * 2 / HEAD_DIM)
    first, second = states[..., :half], states[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )
