"""The weights of a drafter's checkpoint: read by name, and checked against a table of names and shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from specdec_fast.drafters.shared.checkpoint.settings import LayerConfig
from specdec_fast.errors import ConfigError
from specdec_fast.models.loading import cause_shown, why_unreadable
from specdec_fast.ops.checks import stored

Shape = tuple[int, ...]
WEIGHTS_FILE = "model.safetensors"
_FILES = ("model.safetensors.index.json", WEIGHTS_FILE, "pytorch_model.bin.index.json", "pytorch_model.bin")
_OF_OTHERS = ("verifier_", "rotary_emb.")  # copies of the target's weights, and buffers that are computed
_MODEL = {"model.": ""}  # the prefix that most formats have
_ID_MAPS = ("d2t", "t2d")  # between the ids of drafter and target


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read one file of weights, safetensors or PyTorch's format, without running code in it.

    Raises:
        ConfigError: it is missing or damaged, or holds something else than tensors by name.
    """
    try:
        weights = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # bytes that are damaged can raise nearly any
        raise ConfigError(
            f"cannot read the weights in {str(path)!r}: {why_unreadable(error)}; expected tensors by name, in "
            "safetensors or PyTorch's format."
        ) from cause_shown(error)
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise ConfigError(f"{str(path)!r} holds a {type(weights).__name__}; expected tensors by name.")
    if wrong := [name for name, value in weights.items() if not _is_dense(value)]:
        raise ConfigError(f"{str(path)!r}: {wrong[0]} is no dense tensor with memory; expected dense tensors by name.")
    return {name: stored(value) for name, value in weights.items()}  # PyTorch's format keeps lazy signs


def _is_dense(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta and not value.is_nested


def tensor_names(path: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file; else raise ``ConfigError``."""
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read the weights in {str(path)!r}: {error}") from error


def read_some(path: Path, keys: list[str]) -> dict[str, Tensor]:
    """Read some tensors of a safetensors file, and no other; else raise ``ConfigError``.

    The file is opened once, because its list of names is long where experts are stored one by one.
    """
    tensors = {}
    key = keys[0]
    try:
        with safe_open(path, "pt") as file:
            for key in keys:
                tensors[key] = file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {key} in {str(path)!r}: {error}") from error
    return tensors


def read_weights(folder: Path, prefixes: Mapping[str, str] = _MODEL) -> dict[str, Tensor]:
    """Read all weights of a folder: safetensors or ``pytorch_model.bin``, in one file or several.

    Copies of the target's weights are left out. Each prefix of names, one after the other, is replaced by its value.

    Raises:
        ConfigError: there are none, or a file is damaged or missing.
    """
    path = next((folder / name for name in _FILES if (folder / name).exists()), None)
    if path is None:
        raise ConfigError(f"{str(folder)!r} has no weights; expected one of {', '.join(_FILES)}.")
    weights: dict[str, Tensor] = {}
    for file in sorted(set(files_by_name(path).values())) if path.suffix == ".json" else [path]:
        weights |= read_tensors(file)
    for old, new in prefixes.items():
        weights = {new + key.removeprefix(old) if key.startswith(old) else key: w for key, w in weights.items()}
    return {name: value for name, value in weights.items() if not any(part in name for part in _OF_OTHERS)}


def files_by_name(index: Path) -> dict[str, Path]:
    """Return the file of every weight that an index of weights names; else raise ``ConfigError``."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {key: index.parent / name for key, name in names.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"cannot read the index of weights {str(index)!r}: {error}") from error


@dataclass
class WeightTable:
    """Names and shapes of a kind's weights, under this library's names."""

    kind: str  # of drafter, for messages
    needed: dict[str, Shape] = field(default_factory=dict)  # weights that must exist
    optional: dict[str, Shape] = field(default_factory=dict)  # weights that may
    hints: dict[str, str] = field(default_factory=dict)  # by name, what a message about a weight's shape adds

    def add_taps(self, name: str, num_taps: int, config: LayerConfig) -> None:
        """Add the linear that takes all taps, concatenated."""
        self.needed[name] = (config.layer.hidden_size, num_taps * config.target_hidden_size)
        self.hints[name] = f"{num_taps} taps of {config.target_hidden_size}"

    def add_layer(self, layer: LlamaConfig, index: int, num_inputs: int, *, is_plain: bool = False) -> None:
        """Add a transformer layer whose queries, keys and values are made of ``num_inputs`` numbers.

        A plain one has neither biases nor norms of queries and keys.
        """
        hidden = layer.hidden_size
        ffn_size = layer.intermediate_size
        prefix = f"layers.{index}."
        heads = layer.num_attention_heads * layer.head_dim
        kv_heads = layer.num_key_value_heads * layer.head_dim
        linears = {
            "self_attn.q_proj": (heads, num_inputs),
            "self_attn.k_proj": (kv_heads, num_inputs),
            "self_attn.v_proj": (kv_heads, num_inputs),
            "self_attn.o_proj": (hidden, heads),
            "mlp.gate_proj": (ffn_size, hidden),
            "mlp.up_proj": (ffn_size, hidden),
            "mlp.down_proj": (hidden, ffn_size),
        }
        self.needed |= {f"{prefix}{name}.weight": shape for name, shape in linears.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.needed[f"{prefix}{name}.weight"] = (hidden,)
        if not is_plain:
            self.optional |= {f"{prefix}{name}.bias": shape[:1] for name, shape in linears.items()}
            for name in ("q_norm", "k_norm"):
                self.optional[f"{prefix}self_attn.{name}.weight"] = (layer.head_dim,)

    def add_id_maps(self, config: LayerConfig) -> None:
        """Add ``d2t``, which a drafter that proposes some ids only must have, and ``t2d``."""
        is_full = config.draft_vocab_size == config.layer.vocab_size
        (self.optional if is_full else self.needed)["d2t"] = (config.draft_vocab_size,)
        self.optional["t2d"] = (config.layer.vocab_size,)

    def read(self, folder: Path, prefixes: Mapping[str, str] = _MODEL) -> dict[str, Tensor]:
        """Read the weights of a folder, and check them; the errors are those of ``read_weights`` and ``check``."""
        weights = read_weights(folder, prefixes)
        self.check(folder, weights)
        return weights

    def check(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Check weights that were read from a folder.

        Raises:
            ConfigError: a weight is missing, unknown, or has another shape.
        """
        where = repr(str(folder))
        expected = self.optional | self.needed
        if missing := sorted(set(self.needed) - set(weights)):
            raise ConfigError(f"{where} lacks the weights {', '.join(missing[:4])} ({len(missing)} in all).")
        if unknown := sorted(set(weights) - set(expected)):
            raise ConfigError(
                f"{where} has weights that {self.kind} does not: {', '.join(unknown[:4])} ({len(unknown)} in all)."
            )
        for name, weight in weights.items():
            if tuple(weight.shape) != expected[name]:
                hint = f" ({self.hints[name]})" if name in self.hints else ""
                raise ConfigError(
                    f"{where}: {name} has the shape {list(weight.shape)}; expected {list(expected[name])}{hint}."
                )


def target_ids(config: LayerConfig, weights: dict[str, Tensor]) -> Tensor | None:
    """Return the target's id of each draft id, ``[draft_vocab_size]`` int64; None if they are the same.

    ``d2t`` holds offsets: the target's id is the draft id plus its offset.

    Raises:
        ConfigError: an id is outside the vocabulary or comes twice, or ``t2d`` says something else.
    """
    size = config.draft_vocab_size
    vocab_size = config.layer.vocab_size
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


def placed(weights: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return the weights, without the maps of ids, in a dtype on a device."""
    return {name: weight.to(device, dtype).contiguous() for name, weight in weights.items() if name not in _ID_MAPS}
