"""The weights of an EAGLE-3 checkpoint, under one set of names, and their check against its configuration."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from specdec_fast.drafters.eagle3.config import Eagle3Config, LayerConfig
from specdec_fast.drafters.shared.checkpoints import read_tensors
from specdec_fast.errors import ConfigError

_FILES = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")
_OF_OTHERS = ("verifier_", "rotary_emb.")  # copies of the target's weights, and buffers that are computed
Shapes = dict[str, tuple[int, ...]]
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all weights of a folder: safetensors or ``pytorch_model.bin``, in one file or several.

    Returns:
        Tensors by name, the first layer's under ``layers.0``; copies of the target's weights are left out.

    Raises:
        ConfigError: there are none, or a file is damaged or missing.

    """
    path = next((folder / name for name in _FILES if (folder / name).exists()), None)
    if path is None:
        raise ConfigError(f"{str(folder)!r} has no weights; expected one of {', '.join(_FILES)}.")
    found: dict[str, Tensor] = {}
    for file in _parts(path) if path.suffix == ".json" else [path]:
        for key, value in read_tensors(file).items():
            name = _name_of(key)
            if not any(part in name for part in _OF_OTHERS):
                found[name] = value
    return found


def _parts(index: Path) -> list[Path]:
    """Return the files that an index of weights names."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [index.parent / name for name in sorted(set(names))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"cannot read the index of weights {str(index)!r}: {error}") from error


def _name_of(key: str) -> str:
    key = key.removeprefix("model.")
    return f"layers.0.{key.removeprefix('midlayer.')}" if key.startswith("midlayer.") else key


def check_weights(config: Eagle3Config, num_taps: int, weights: dict[str, Tensor]) -> None:
    """Check names and shapes.

    Args:
        config: the checkpoint's configuration.
        num_taps: number of taps that ``fc`` takes side by side.
        weights: from ``read_weights``.

    Raises:
        ConfigError: a weight is missing, has another shape, or belongs to something that is not served.

    """
    hint = {"fc.weight": f" ({num_taps} taps of {config.target_hidden_size})"}
    expect_shapes(config.folder, "EAGLE-3", weights, _shapes(config, num_taps), hint)


def expect_shapes(
    folder: Path, kind: str, weights: dict[str, Tensor], shapes: tuple[Shapes, Shapes], hints: dict[str, str]
) -> None:
    """Check the names and shapes of a drafter's weights.

    Args:
        folder: where they were read, for messages.
        kind: of drafter, for messages.
        weights: from ``read_weights``.
        shapes: of the weights that must exist, and of those that may.
        hints: by name, what a message about a weight's shape adds.

    Raises:
        ConfigError: a weight is missing, unknown, or has another shape.

    """
    needed, optional = shapes
    where = repr(str(folder))
    if missing := sorted(set(needed) - set(weights)):
        raise ConfigError(f"{where} lacks the weights {', '.join(missing[:4])} ({len(missing)} in all).")
    if unknown := sorted(set(weights) - set(needed) - set(optional)):
        raise ConfigError(
            f"{where} has weights that {kind} does not: {', '.join(unknown[:4])} ({len(unknown)} in all)."
        )
    expected = needed | optional
    for name, weight in weights.items():
        if tuple(weight.shape) != expected[name]:
            raise ConfigError(
                f"{where}: {name} has the shape {list(weight.shape)}; expected {list(expected[name])}"
                f"{hints.get(name, '')}."
            )


def target_ids(config: LayerConfig, weights: dict[str, Tensor]) -> Tensor | None:
    """Return the target's id of each draft id, ``[draft_vocab_size]`` int64; None if they are the same.

    ``d2t`` holds offsets: the target's id is the draft id plus its offset.

    Raises:
        ConfigError: an id is outside the vocabulary or comes twice, or ``t2d`` says something else.

    """
    size, vocab_size = config.draft_vocab_size, config.layer.vocab_size
    if "d2t" not in weights:
        return None
    ids = torch.arange(size, device="cpu") + weights["d2t"].long()
    where = repr(str(config.folder))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < size:
        raise ConfigError(
            f"{where}: d2t maps {size} draft ids to {len(ids.unique())} ids from {int(ids.min())} to {int(ids.max())}; "
            f"expected as many different ids below {vocab_size} (draft id plus offset)."
        )
    if "t2d" in weights and not torch.equal(weights["t2d"].bool().nonzero().flatten(), ids.sort().values):
        raise ConfigError(f"{where}: t2d and d2t name different ids; take an undamaged checkpoint.")
    return None if size == vocab_size and torch.equal(ids, torch.arange(size, device="cpu")) else ids


def _shapes(config: Eagle3Config, num_taps: int) -> tuple[Shapes, Shapes]:
    """Return the shapes of the weights that must exist, and of those that may."""
    layer, hidden, taps = config.layer, config.layer.hidden_size, num_taps * config.target_hidden_size
    needed: Shapes = {
        "fc.weight": (hidden, taps),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "layers.0.hidden_norm.weight": (hidden,),
    }
    optional: Shapes = {
        "embed_tokens.weight": (layer.vocab_size, hidden),
        "t2d": (layer.vocab_size,),
    }
    if config.norm_before_fc:
        needed["input_norm.weight"] = (taps,)
    if config.fc_norm:
        needed |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(num_taps)}
    is_full = config.draft_vocab_size == layer.vocab_size
    (optional if is_full else needed)["d2t"] = (config.draft_vocab_size,)
    for i in range(layer.num_hidden_layers):
        own, allowed = layer_shapes(layer, i, hidden if i else 2 * hidden)
        needed |= own
        optional |= allowed
    return needed, optional


def layer_shapes(layer: LlamaConfig, index: int, inputs: int) -> tuple[Shapes, Shapes]:
    """Return the shapes of a layer's weights that must exist, and of those that may.

    Args:
        layer: the sizes.
        index: of the layer.
        inputs: width of what queries, keys and values are made of.

    """
    hidden, prefix = layer.hidden_size, f"layers.{index}."
    needed: Shapes = {}
    optional: Shapes = {}
    heads, kv_heads = layer.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
    for name, size in zip(_PROJECTIONS, (heads, kv_heads, kv_heads, hidden), strict=True):
        needed[f"{prefix}self_attn.{name}.weight"] = (size, heads if name == "o_proj" else inputs)
        optional[f"{prefix}self_attn.{name}.bias"] = (size,)
    for name in ("q_norm", "k_norm"):
        optional[f"{prefix}self_attn.{name}.weight"] = (layer.head_dim,)
    for name in ("gate_proj", "up_proj", "down_proj"):
        sizes = (layer.intermediate_size, hidden)
        needed[f"{prefix}mlp.{name}.weight"] = sizes[::-1] if name == "down_proj" else sizes
        optional[f"{prefix}mlp.{name}.bias"] = (hidden if name == "down_proj" else layer.intermediate_size,)
    for name in ("input_layernorm", "post_attention_layernorm"):
        needed[f"{prefix}{name}.weight"] = (hidden,)
    return needed, optional
