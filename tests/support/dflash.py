"""DFlash and DSpark checkpoints with random weights in every format, and what they draft by the formulas."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

HEADS, KV_HEADS, HEAD_DIM, INNER, EPSILON, THETA, BLOCK, MASK, RANK = 4, 2, 8, 40, 1e-5, 10_000.0, 6, 3, 5
FORMATS = ("z-lab", "deepspec", "speculators")


def random_weights(vocab_size: int, hidden: int, target_hidden: int, num_taps: int, options: dict) -> dict[str, Tensor]:
    """Return random weights by name; the options are those of ``write_checkpoint``."""
    generator = torch.Generator().manual_seed(options.get("seed", 0))
    draft_size, rank = options.get("draft_vocab_size") or vocab_size, RANK
    shapes = {
        "fc.weight": (hidden, num_taps * target_hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if options.get("own_embedding"):
        shapes["embed_tokens.weight"] = (vocab_size, hidden)
    if options.get("own_embedding") or options.get("draft_vocab_size"):
        shapes["lm_head.weight"] = (draft_size, hidden)
    if kind := options.get("markov"):
        shapes |= {
            "markov_head.markov_w1.weight": (vocab_size, rank),
            "markov_head.markov_w2.weight": (draft_size, rank),
        }
        shapes |= {"confidence_head.proj.weight": (1, hidden + rank), "confidence_head.proj.bias": (1,)}
        if kind == "gated":
            shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
        if kind == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    for i in range(options.get("num_layers", 2)):
        prefix = f"layers.{i}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_DIM, hidden),
            f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, hidden),
            f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, HEADS * HEAD_DIM),
            f"{prefix}self_attn.q_norm.weight": (HEAD_DIM,),
            f"{prefix}self_attn.k_norm.weight": (HEAD_DIM,),
            f"{prefix}mlp.gate_proj.weight": (INNER, hidden),
            f"{prefix}mlp.up_proj.weight": (INNER, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, INNER),
        }
        if options.get("bias"):
            shapes |= {
                f"{prefix}self_attn.{name}_proj.bias": (HEADS * HEAD_DIM if name == "q" else 16,) for name in "qv"
            }
    weights = {}
    for name, shape in shapes.items():
        scale = 0.3 if len(shape) == 1 else 2.0 / shape[1] ** 0.5
        weights[name] = torch.randn(shape, generator=generator) * scale + (1.0 if name.endswith("norm.weight") else 0.0)
    if options.get("draft_vocab_size"):
        ids = torch.randperm(vocab_size, generator=generator)[:draft_size].sort().values
        weights["d2t"] = ids - torch.arange(draft_size)
        weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return weights


def _layer_config(target: torch.nn.Module, hidden: int, options: dict) -> dict:
    """Return the entries of ``config.json`` for the layers."""
    layer = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": options.get("num_layers", 2),
        "vocab_size": target.config.vocab_size,
        "max_position_embeddings": 64,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "hidden_act": "silu",
    }
    if windows := options.get("windows"):
        layer["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
        layer["sliding_window"] = max(window or 0 for window in windows)
    return layer


def write_checkpoint(
    folder: Path, target: torch.nn.Module, kind: str = "z-lab", taps: tuple[int, ...] | None = (1, 2), **options
) -> dict[str, Tensor]:
    """Write a random drafter for ``target`` and return its weights by name, the target's own where it has none.

    Options: markov (a head's type, which makes it DSpark), draft_vocab_size, own_embedding, bias, num_layers, windows
    (per layer, None or a number), causal, softcap, seed, ``config`` (entries that replace those written).
    """
    text = target.config
    hidden = 24 if options.get("own_embedding") else text.hidden_size
    weights = random_weights(text.vocab_size, hidden, text.hidden_size, len(taps or (1, 2)), options)
    layer = _layer_config(target, hidden, options)
    shared = {"draft_vocab_size": options.get("draft_vocab_size"), "target_hidden_size": text.hidden_size}
    if options.get("markov"):
        shared |= {"markov_rank": RANK, "markov_head_type": options["markov"]}
        shared |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    if "causal" in options:
        shared["is_causal"] = options["causal"]
    if "softcap" in options:
        shared["final_logit_softcapping"] = options["softcap"]
    ids = {} if taps is None else {"target_layer_ids": [tap - 1 for tap in taps]}
    if kind == "speculators":
        config = {
            "speculators_model_type": "dspark" if options.get("markov") else "dflash",
            "transformer_layer_config": layer,
            "speculators_config": {"verifier": {"architectures": [type(target).__name__]}},
            **({} if taps is None else {"aux_hidden_state_layer_ids": list(taps)}),
            **shared,
        }
    elif kind == "deepspec":
        name = "Qwen3DSparkModel" if options.get("markov") else "Qwen3DFlashModel"
        config = {"architectures": [name], **layer, **shared, **ids}
    else:
        config = {"architectures": ["DFlashDraftModel"], **layer, **shared, "dflash_config": ids}
    place = config.get("dflash_config", config)
    place["mask_token_id"] = MASK
    config["block_size"] = BLOCK
    stored = dict(weights)
    if kind == "speculators":
        stored["verifier_norm.weight"] = torch.ones(3)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | options.get("config", {})))
    save_file({name: weight.contiguous() for name, weight in stored.items()}, folder / "model.safetensors")
    of_target = {
        "embed_tokens.weight": target.get_input_embeddings().weight.detach().float(),
        "lm_head.weight": target.get_output_embeddings().weight.detach().float(),
    }
    return of_target | weights


def dense_block(
    weights: dict[str, Tensor],
    options: dict,
    features: Tensor,
    token_ids: list[int],
    choose,
    num_draft_tokens: int,
    confidences: list[float] | None = None,
) -> list[int]:
    """Draft a block after one sequence.

    Args:
        weights: from ``write_checkpoint``.
        options: those of ``write_checkpoint``.
        features: ``[n - 1, taps, target's hidden size]`` of positions 0 to n - 2.
        token_ids: the n committed tokens.
        choose: takes logits over the target's vocabulary and the number of tokens drafted so far; returns an id.
        num_draft_tokens: at least 1; the block drafts at most as many as it has rows for.
        confidences: receives the probability of each token of a DSpark drafter.

    """
    from_anchor = bool(options.get("markov"))
    count = min(num_draft_tokens, BLOCK if from_anchor else BLOCK - 1)
    size = count if from_anchor else count + 1
    context = _norm(features.flatten(1) @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    hidden = weights["embed_tokens.weight"][[token_ids[-1], *[MASK] * (size - 1)]]
    windows = options.get("windows") or [None] * options.get("num_layers", 2)
    for i, window in enumerate(windows):
        prefix = f"layers.{i}."
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        is_causal = options.get("causal", window is not None)
        rows = _norm(hidden, own["input_layernorm.weight"])
        hidden = hidden + _attention(own, context, rows, is_causal, window)
        rows = _norm(hidden, own["post_attention_layernorm.weight"])
        gate, up = rows @ own["mlp.gate_proj.weight"].T, rows @ own["mlp.up_proj.weight"].T
        hidden = hidden + (silu(gate) * up) @ own["mlp.down_proj.weight"].T
    hidden = _norm(hidden, weights["norm.weight"])[size - count :]
    drafted: list[int] = []
    state = torch.zeros(RANK)
    for row in hidden:
        logits = weights["lm_head.weight"] @ row
        if softcap := options.get("softcap"):
            logits = softcap * (logits / softcap).tanh()
        if options.get("markov"):
            previous = (drafted or token_ids)[-1]
            bias, state = _markov(weights, options["markov"], previous, row, state)
            logits = logits + bias
            if confidences is not None:
                seen = torch.cat([row, weights["markov_head.markov_w1.weight"][previous]])
                estimate = weights["confidence_head.proj.weight"][0] @ seen + weights["confidence_head.proj.bias"][0]
                confidences.append(torch.sigmoid(estimate).item())
        if "d2t" in weights:
            ids = torch.arange(len(logits)) + weights["d2t"]
            logits = torch.full(weights["t2d"].shape, -torch.inf).index_put((ids,), logits)
        drafted.append(choose(logits, len(drafted)))
    return drafted


def _markov(weights: dict[str, Tensor], kind: str, previous: int, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    own = {name.removeprefix("markov_head."): value for name, value in weights.items()}
    embedded = own["markov_w1.weight"][previous]
    if kind == "gated":
        gate = own["gate_proj.weight"] @ torch.cat([row, embedded]) + own["gate_proj.bias"]
        embedded = torch.sigmoid(gate) * embedded
    elif kind == "rnn":
        joint = own["joint_proj.weight"] @ torch.cat([state, embedded, row]) + own["joint_proj.bias"]
        keep, candidate, output = torch.sigmoid(joint[:RANK]), torch.tanh(joint[RANK : 2 * RANK]), joint[2 * RANK :]
        state, embedded = keep * state + (1 - keep) * candidate, torch.tanh(output)
    return own["markov_w2.weight"] @ embedded, state


def _attention(own: dict[str, Tensor], context: Tensor, rows: Tensor, is_causal: bool, window: int | None) -> Tensor:
    def heads(name: str, inputs: Tensor) -> Tensor:
        outputs = inputs @ own[f"self_attn.{name}_proj.weight"].T + own.get(f"self_attn.{name}_proj.bias", 0.0)
        return outputs.view(len(inputs), -1, HEAD_DIM).transpose(0, 1)

    both = torch.cat([context, rows])
    start, end = len(context), len(both)
    query = _rotate(_norm(heads("q", rows), own["self_attn.q_norm.weight"]), torch.arange(start, end))
    key = _rotate(_norm(heads("k", both), own["self_attn.k_norm.weight"]), torch.arange(end))
    value = heads("v", both)
    key, value = (states.repeat_interleave(HEADS // KV_HEADS, dim=0) for states in (key, value))
    scores = query @ key.mT / HEAD_DIM**0.5
    behind = torch.arange(start, end)[:, None] - torch.arange(end)
    if is_causal:
        scores = scores.masked_fill(behind < 0, -torch.inf)
    if window is not None:
        scores = scores.masked_fill(behind >= window, -torch.inf)
    attended = scores.softmax(-1) @ value
    return attended.transpose(0, 1).flatten(1) @ own["self_attn.o_proj.weight"].T


def _rotate(states: Tensor, positions: Tensor) -> Tensor:
    """Rotate entries j and j + half of the row at position p by the angle p / theta ** (2 j / head_dim)."""
    half = HEAD_DIM // 2
    angles = positions[:, None] * THETA ** (-torch.arange(half) * 2 / HEAD_DIM)
    first, second = states[..., :half], states[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def _norm(rows: Tensor, weight: Tensor) -> Tensor:
    return rows / (rows.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight
