"""EAGLE-3 checkpoints with random weights in every format, and what they draft, computed from the formulas."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, EPSILON, THETA = 24, 4, 2, 8, 40, 1e-5, 10_000.0
FORMATS = ("raw", "sglang", "speculators")


def random_weights(
    vocab_size: int, target_hidden: int, num_taps: int, options: dict, seed: int = 0
) -> dict[str, Tensor]:
    """Return random weights under the names of raw checkpoints; the options are those of ``write_checkpoint``."""
    generator = torch.Generator().manual_seed(seed)
    taps = num_taps * target_hidden
    shapes = {
        "fc.weight": (HIDDEN, taps),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (options.get("draft_vocab_size") or vocab_size, HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
    }
    if not options.get("shares_embedding"):
        shapes["embed_tokens.weight"] = (vocab_size, HIDDEN)
    if options.get("norm_before_fc"):
        shapes["input_norm.weight"] = (taps,)
    if options.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target_hidden,) for i in range(num_taps)}
    for i in range(options.get("num_layers", 1)):
        prefix, inputs = ("midlayer." if i == 0 else f"layers.{i}."), (HIDDEN if i else 2 * HIDDEN)
        shapes |= {
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_DIM, inputs),
            f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
            f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, INNER),
        }
        if options.get("qk_norm"):
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
        if options.get("bias"):
            shapes |= {f"{prefix}self_attn.q_proj.bias": (HEADS * HEAD_DIM,), f"{prefix}mlp.up_proj.bias": (INNER,)}
    weights = {}
    for name, shape in shapes.items():
        scale = 0.3 if len(shape) == 1 else 2.0 / shape[1] ** 0.5
        weights[name] = torch.randn(shape, generator=generator) * scale + (1.0 if name.endswith("norm.weight") else 0.0)
    if draft_size := options.get("draft_vocab_size"):
        ids = torch.randperm(vocab_size, generator=generator)[:draft_size].sort().values
        weights["d2t"] = ids - torch.arange(draft_size)
        weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return weights


def write_checkpoint(
    folder: Path, target: torch.nn.Module, kind: str = "raw", taps: tuple[int, ...] | None = (0, 1, 2), **options
) -> dict[str, Tensor]:
    """Write a random drafter for ``target`` and return its weights under raw names.

    Options: draft_vocab_size, norm_before_residual, norm_before_fc, fc_norm, norm_output, qk_norm, bias, num_layers,
    shares_embedding, seed, shards (number of files), ``config`` (entries that replace those written).
    """
    text = target.config
    weights = random_weights(text.vocab_size, text.hidden_size, len(taps or (0, 1, 2)), options, options.get("seed", 0))
    layer = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": options.get("num_layers", 1),
        "vocab_size": text.vocab_size,
        "max_position_embeddings": 64,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "hidden_act": "silu",
    }
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    flags = {name: options[name] for name in names if name in options}
    shared = {"target_hidden_size": text.hidden_size, "draft_vocab_size": options.get("draft_vocab_size"), **flags}
    if kind == "speculators":
        config = {
            "speculators_model_type": "eagle3",
            "norm_before_residual": False,
            "transformer_layer_config": layer,
            "speculators_config": {"verifier": {"architectures": [type(target).__name__]}},
            **shared,
            **({} if taps is None else {"eagle_aux_hidden_state_layer_ids": list(taps)}),
        }
        stored = {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}
        stored["verifier_norm.weight"] = torch.ones(3)
    else:
        ids = None if taps is None else {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]}
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **shared}
        config |= {} if ids is None else {"eagle_config": ids}
        stored = weights if kind == "raw" else {f"model.{name}": weight for name, weight in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | options.get("config", {})))
    _store(folder, stored, kind, options.get("shards", 1))
    return weights


def _store(folder: Path, stored: dict[str, Tensor], kind: str, shards: int) -> None:
    suffix = "bin" if kind == "raw" else "safetensors"
    stem = "pytorch_model" if kind == "raw" else "model"
    names = sorted(stored)
    files = {f"{stem}-{i}.{suffix}" if shards > 1 else f"{stem}.{suffix}": names[i::shards] for i in range(shards)}
    for file, own in files.items():
        tensors = {name: stored[name].contiguous() for name in own}
        torch.save(tensors, folder / file) if suffix == "bin" else save_file(tensors, folder / file)
    if shards > 1:
        where = {name: file for file, own in files.items() for name in own}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": where}))


def dense_chain(
    weights: dict[str, Tensor], options: dict, features: Tensor, token_ids: list[int], choose, num_draft_tokens: int
) -> list[int]:
    """Draft a chain after one sequence, all rows computed anew for every token.

    Args:
        weights: raw names.
        options: those of ``write_checkpoint``.
        features: ``[n - 1, taps, target's hidden size]`` of positions 0 to n - 2.
        token_ids: the n committed tokens.
        choose: takes logits over the target's vocabulary and the number of tokens drafted so far; returns an id.
        num_draft_tokens: at least 1.

    """
    taps = list(features.unbind(1))
    if options.get("fc_norm"):
        taps = [_norm(tap, weights[f"fc_norm.{i}.weight"]) for i, tap in enumerate(taps)]
    joined = torch.cat(taps, dim=-1)
    if options.get("norm_before_fc"):
        joined = _norm(joined, weights["input_norm.weight"])
    hidden, fed, drafted = joined @ weights["fc.weight"].T, list(token_ids[1:]), []
    while len(drafted) < num_draft_tokens:
        output = _layers(weights, options, hidden, weights["embed_tokens.weight"][fed])
        normed = _norm(output[-1], weights["norm.weight"])
        logits = weights["lm_head.weight"] @ normed
        if "d2t" in weights:
            ids = torch.arange(len(logits)) + weights["d2t"]
            logits = torch.full(weights["t2d"].shape, -torch.inf).index_put((ids,), logits)
        drafted.append(choose(logits, len(drafted)))
        fed.append(drafted[-1])
        hidden = torch.cat([hidden, (normed if options.get("norm_output") else output[-1])[None]])
    return drafted


def _layers(weights: dict[str, Tensor], options: dict, hidden: Tensor, embedded: Tensor) -> Tensor:
    for i in range(options.get("num_layers", 1)):
        prefix = "midlayer." if i == 0 else f"layers.{i}."
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        rows = _norm(embedded if i == 0 else hidden, own["input_layernorm.weight"])
        if i == 0:
            normed = _norm(hidden, own["hidden_norm.weight"])
            rows = torch.cat([rows, normed], dim=-1)
            hidden = normed if options.get("norm_before_residual") else hidden
        hidden = hidden + _attention(own, rows)
        rows = _norm(hidden, own["post_attention_layernorm.weight"])
        gate, up = rows @ own["mlp.gate_proj.weight"].T, rows @ own["mlp.up_proj.weight"].T
        up = up + own.get("mlp.up_proj.bias", torch.zeros(()))
        hidden = hidden + (silu(gate) * up) @ own["mlp.down_proj.weight"].T
    return hidden


def _attention(own: dict[str, Tensor], rows: Tensor) -> Tensor:
    length = len(rows)
    query, key, value = (
        (rows @ own[f"self_attn.{name}_proj.weight"].T + own.get(f"self_attn.{name}_proj.bias", torch.zeros(())))
        .view(length, -1, HEAD_DIM)
        .transpose(0, 1)
        for name in "qkv"
    )
    if "self_attn.q_norm.weight" in own:
        query, key = _norm(query, own["self_attn.q_norm.weight"]), _norm(key, own["self_attn.k_norm.weight"])
    query, key = _rotate(query), _rotate(key)
    key, value = (states.repeat_interleave(HEADS // KV_HEADS, dim=0) for states in (key, value))
    scores = query @ key.mT / HEAD_DIM**0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    attended = scores.masked_fill(future, -torch.inf).softmax(-1) @ value
    return attended.transpose(0, 1).flatten(1) @ own["self_attn.o_proj.weight"].T


def _rotate(states: Tensor) -> Tensor:
    """Rotate entries j and j + half of every row i by the angle i / theta ** (2 j / head_dim)."""
    half = HEAD_DIM // 2
    angles = torch.arange(states.shape[1])[:, None] * THETA ** (-torch.arange(half) * 2 / HEAD_DIM)
    first, second = states[..., :half], states[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def _norm(rows: Tensor, weight: Tensor) -> Tensor:
    return rows / (rows.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight
