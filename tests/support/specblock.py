"""SpecBlock checkpoints with random weights, and what they draft, computed from the formulas."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, EPSILON, THETA, K = 24, 4, 2, 6, 40, 1e-5, 10_000.0, 4
TAPS = (0, 1, 2)


def random_weights(vocab_size: int, target_hidden: int, options: dict) -> dict[str, Tensor]:
    """Return random weights; the options are those of ``write_checkpoint``."""
    generator = torch.Generator().manual_seed(options.get("seed", 0))
    num_layers, slots = options.get("num_layers", 2), options.get("num_slots", K)
    draft_size = options.get("draft_vocab_size") or vocab_size
    shapes = {
        "input_layer.condition_proj.weight": (HIDDEN, len(TAPS) * target_hidden),
        "input_layer.condition_norm.weight": (HIDDEN,),
        "input_layer.token_norm.weight": (HIDDEN,),
        "input_layer.position_queries.weight": (slots, HIDDEN),
        "input_layer.query_norm.weight": (HIDDEN,),
        "input_layer.fuse.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (draft_size, HIDDEN),
        "rank_head.0.weight": (256, HIDDEN + 15),
        "rank_head.2.weight": (4, 256),
    }
    if not options.get("shares_embedding"):
        shapes["input_layer.embed_tokens.weight"] = (vocab_size, HIDDEN)
    for i in range(num_layers):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (HIDDEN,),
            f"layers.{i}.post_attention_layernorm.weight": (HIDDEN,),
            f"layers.{i}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"layers.{i}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"layers.{i}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"layers.{i}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"layers.{i}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"layers.{i}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"layers.{i}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
        if i:
            shapes[f"shift_proj.{i - 1}.weight"] = (HIDDEN, 2 * HIDDEN)
    weights = {}
    for name, shape in shapes.items():
        scale = 0.3 if len(shape) == 1 else 2.0 / shape[1] ** 0.5
        weights[name] = torch.randn(shape, generator=generator) * scale + (1.0 if name.endswith("norm.weight") else 0.0)
    if draft_size < vocab_size:
        ids = torch.randperm(vocab_size, generator=generator)[:draft_size].sort().values
        weights["d2t"] = ids - torch.arange(draft_size)
        weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return weights


def write_checkpoint(folder: Path, target: torch.nn.Module, **options) -> dict[str, Tensor]:
    """Write a random drafter for ``target`` and return its weights.

    Options: draft_vocab_size, num_layers, num_slots, shares_embedding, seed, ``config`` (entries that replace those
    written).
    """
    weights = random_weights(target.config.vocab_size, target.config.hidden_size, options)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(target, options) | options.get("config", {})))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return weights


def config_of(target: torch.nn.Module, options: dict) -> dict:
    """Return ``config.json``."""
    text = target.config
    return {
        "architectures": ["LlamaForCausalLMSpecBlock"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": options.get("num_layers", 2),
        "vocab_size": text.vocab_size,
        "max_position_embeddings": 64,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "target_hidden_size": text.hidden_size,
        "draft_vocab_size": options.get("draft_vocab_size"),
        "diffspec_draft_token_num": options.get("num_slots", K),
        "rank_classes": 4,
        "tap_layers": list(TAPS),
    }


def visible(row: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], last: int, chosen: int) -> Tensor:
    """Whether slot ``row = (block, slot)`` sees another; blocks to ``last`` are true, the one behind follows a token.

    Block b is that of position b. The block behind the last true one follows the token of its slot ``chosen``.
    """
    (block, slot), (other_block, other_slot) = row, other
    is_above = (block == last + 1) & (other_block == last)
    return torch.where(
        other_block == block, other_slot <= slot, (other_block < block) & (~is_above | (other_slot <= chosen))
    )


def dense_blocks(
    weights: dict[str, Tensor],
    features: Tensor,
    token_ids: list[int],
    branch: tuple[int, int] | None = None,
    sees=visible,
) -> Tensor:
    """Compute every block of one sequence with an explicit mask.

    Args:
        weights: of ``random_weights``.
        features: ``[n - 1, taps, target's hidden size]`` of positions 0 to n - 2.
        token_ids: the n committed tokens.
        branch: (slot, token): computes one more block, which follows this token of this slot of the last block.
        sees: the mask.

    Returns:
        ``[blocks, K, H]``, the hidden states of all slots before the last norm.

    """
    conditions = features.flatten(1) @ weights["input_layer.condition_proj.weight"].T
    fed, last, bases = list(token_ids[1:]), len(features) - 1, list(range(len(features)))
    if branch is not None:
        true = dense_blocks(weights, features, token_ids, None, sees)
        conditions = torch.cat([conditions, true[-1, branch[0]][None]])
        fed.append(branch[1])
        bases.append(last)
    slots = len(weights["input_layer.position_queries.weight"])
    count = len(bases) * slots
    block, slot = torch.arange(count) // slots, torch.arange(count) % slots
    parts = [
        _norm(conditions[block], weights["input_layer.condition_norm.weight"]),
        _norm(weights["input_layer.embed_tokens.weight"][fed][block], weights["input_layer.token_norm.weight"]),
        _norm(weights["input_layer.position_queries.weight"][slot], weights["input_layer.query_norm.weight"]),
    ]
    hidden = torch.cat(parts, dim=1) @ weights["input_layer.fuse.weight"].T
    chosen = -1 if branch is None else branch[0]
    mask = sees((block[:, None], slot[:, None]), (block[None], slot[None]), last, chosen)
    positions = torch.tensor(bases)[block] + 1 + slot
    index = 0
    while f"layers.{index}.input_layernorm.weight" in weights:
        own = {name.removeprefix(f"layers.{index}."): w for name, w in weights.items() if f"layers.{index}." in name}
        if index:
            before = hidden[torch.arange(count) - (slot > 0).long()]
            hidden = torch.cat([hidden, before], dim=1) @ weights[f"shift_proj.{index - 1}.weight"].T
        hidden = hidden + _attention(own, _norm(hidden, own["input_layernorm.weight"]), mask, positions)
        inner = _norm(hidden, own["post_attention_layernorm.weight"])
        gated = silu(inner @ own["mlp.gate_proj.weight"].T) * (inner @ own["mlp.up_proj.weight"].T)
        hidden = hidden + gated @ own["mlp.down_proj.weight"].T
        index += 1
    return hidden.view(len(bases), slots, -1)


def logits_and_class(weights: dict[str, Tensor], hidden: Tensor) -> tuple[Tensor, int]:
    """Return the logits over the target's ids ``[V]``, and the class that the rank head predicts, of a slot ``[H]``."""
    normed = _norm(hidden, weights["norm.weight"])
    logits = weights["lm_head.weight"] @ normed
    top = logits.sort(descending=True).values[:20]
    probabilities = top.exp() / top.exp().sum()
    features = [*probabilities[:10].log(), top[0] - top[1], top[0] - top[2], top[0] - top[4], probabilities[0]]
    entropy = -(probabilities * probabilities.log()).sum()
    inputs = torch.cat([normed, torch.stack([*features, entropy])])
    predicted = weights["rank_head.2.weight"] @ silu(weights["rank_head.0.weight"] @ inputs)
    if "d2t" in weights:
        wide = torch.full(weights["t2d"].shape, -torch.inf)
        logits = wide.index_put((torch.arange(len(logits)) + weights["d2t"],), logits)
    return logits, int(predicted.argmax())


def _attention(own: dict[str, Tensor], rows: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    query, key, value = (
        (rows @ own[f"self_attn.{name}_proj.weight"].T).view(len(rows), -1, HEAD_DIM).transpose(0, 1) for name in "qkv"
    )
    query, key = _rotate(query, positions), _rotate(key, positions)
    key, value = (states.repeat_interleave(HEADS // KV_HEADS, dim=0) for states in (key, value))
    scores = (query @ key.mT / HEAD_DIM**0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1).flatten(1) @ own["self_attn.o_proj.weight"].T


def _rotate(states: Tensor, positions: Tensor) -> Tensor:
    """Rotate entries j and j + half of a row at position p by the angle p / theta ** (2 j / head_dim)."""
    half = HEAD_DIM // 2
    angles = positions[:, None] * THETA ** (-torch.arange(half) * 2 / HEAD_DIM)
    first, second = states[..., :half], states[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def _norm(rows: Tensor, weight: Tensor) -> Tensor:
    return rows / (rows.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight
