"""The weights of a multi-token prediction (MTP) layer, read from the target's checkpoint, under one set of names.

A layer consists of a norm of the embedding (``enorm``), a norm of the hidden state (``hnorm``), the linear that joins
both (``eh_proj``), a decoder layer of the target's class, and a norm before the target's output layer. Three sets of
names are known (``FORMATS``):

* DeepSeek-V3, GLM-4.5: the layer is the one behind the target's last, ``model.layers.N.``.
* MiMo: ``model.mtp_layers.0.``; hidden state and embedding are joined in the other order.
* Qwen3-Next, Qwen3.5, Mellum: ``mtp.layers.0.``, and the other parts one level up. The names are the same where the
  target's begin with ``model.language_model.``, because the checkpoint's model reads images as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import cached_file

from specdec_fast.drafters.shared.checkpoint.weights import files_by_name, read_some, tensor_names
from specdec_fast.errors import ConfigError, NotYetSupportedError

_FILES = ("model.safetensors.index.json", "model.safetensors")
_COPIES = ("shared_head.head.weight", "embed_tokens.weight")  # of the target's
PARTS = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "norm.weight")
ENDS = ("embed_tokens.weight", "lm_head.weight")  # of which a layer may have its own
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Format:
    """How checkpoints of one kind name an MTP layer."""

    name: str
    prefix: str  # regular expression of all its names; {N} is the number of the target's layers
    parts: tuple[str, str, str, str]  # names behind the prefix for PARTS, in that order
    block: str = ""  # what stands behind the prefix, before the names of the decoder layer
    is_hidden_first: bool = False  # whether eh_proj takes the hidden state before the embedding
    has_ends: bool = False  # whether embedding and output layer in a checkpoint are its own, and no copies


FORMATS = (
    Format(
        "deepseek",
        r"model\.(?:language_model\.)?layers\.{N}\.",
        ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"),
    ),
    Format(
        "mimo",
        r"model\.mtp_layers\.0\.",
        ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight"),
        is_hidden_first=True,
    ),
    Format(
        "qwen",
        r"mtp\.",
        ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight"),
        block="layers.0.",
        has_ends=True,
    ),
)


@dataclass(frozen=True)
class MtpWeights:
    """One MTP layer."""

    where: str  # it was read, for messages
    format: Format  # how its checkpoint names it
    parts: dict[str, Tensor]  # the weights of PARTS
    ends: dict[str, Tensor]  # those of ENDS that are the layer's own; the target gives the others
    block: dict[str, Tensor]  # the decoder layer's, under the names of the checkpoint behind "layers.N."
    num_layers: int  # number of MTP layers that the checkpoint has; the first one is read

    def part(self, name: str) -> tuple[Tensor, str]:
        """Return one of ``PARTS``, and what messages call it."""
        return self.parts[name], self.named(self.format.parts[PARTS.index(name)])

    def named(self, name: str) -> str:
        """Return what messages call the weight with a name in the layer."""
        return f"{name} in the MTP layer of {self.where!r}"


def read_mtp(source: str, num_layers: int) -> MtpWeights:
    """Read the first MTP layer of a checkpoint, and no other weight.

    ``source`` is a folder, or the name of a model that has been downloaded; the target has ``num_layers`` layers.

    Raises:
        ConfigError: there are no such files or they are damaged, or they have no MTP layer, or it lacks a part.
        NotYetSupportedError: the layer is quantised.
    """
    files = _files_of(source)
    for kind in FORMATS:
        pattern = re.compile(kind.prefix.replace("{N}", str(num_layers)))
        names = {key: key[match.end() :] for key in files if (match := pattern.match(key))}
        if names:
            return _layer(source, kind, names, files, num_layers)
    raise ConfigError(
        f"{source!r} has no MTP layer: none of its {len(files)} weights is named model.layers.{num_layers}. (behind "
        "the target's last layer), model.mtp_layers.0. or mtp.; take a checkpoint that carries one, as "
        "'mtp:FOLDER', or another drafter."
    )


def _layer(source: str, kind: Format, names: dict[str, str], files: dict[str, Path], num_layers: int) -> MtpWeights:
    """Read the weights of some names in the files; each comes with its name behind the format's prefix."""
    known = dict(zip(kind.parts, PARTS, strict=True))
    # Of several layers, the formats that number them behind the prefix keep the others here.
    numbered = re.compile(r"layers\.([1-9]\d*)\." if kind.block else r"(?!)")
    further = {match.group(1) for name in names.values() if (match := numbered.match(name))}
    copies = () if kind.has_ends else _COPIES
    names = {key: name for key, name in names.items() if name not in copies and not numbered.match(name)}
    tensors: dict[str, Tensor] = {}
    for path in dict.fromkeys(files[key] for key in names):
        read = read_some(path, [key for key in names if files[key] == path])
        tensors |= {names[key]: tensor for key, tensor in read.items()}
    for key, name in names.items():
        if tensors[name].dtype not in _DTYPES:
            raise NotYetSupportedError(
                f"{source!r}: {key} is stored in {tensors[name].dtype}, so its MTP layer is quantised; expected one of "
                f"{', '.join(map(str, _DTYPES))}. Take a checkpoint whose MTP layer is not quantised, as "
                "'mtp:FOLDER', or another drafter."
            )
    ends = ENDS if kind.has_ends else ()
    if others := sorted(
        key for key, name in names.items() if name not in (*known, *ends) and not name.startswith(kind.block)
    ):
        raise ConfigError(
            f"{source!r}: its MTP layer has weights that are not known: {', '.join(others[:4])} ({len(others)} in all)."
        )
    missing = [name for name in kind.parts if name not in names.values()]
    if missing:
        raise ConfigError(
            f"{source!r} lacks weights of its MTP layer ({next(iter(names))}, ...): {', '.join(missing)}; take a "
            "complete checkpoint."
        )
    return MtpWeights(
        source,
        kind,
        {known[name]: tensors.pop(name) for name in kind.parts},
        {name: tensors.pop(name) for name in ends if name in tensors},
        {name.removeprefix(kind.block): tensor for name, tensor in tensors.items()},
        1 + len(further) + _num_further(kind, files, num_layers),
    )


def _num_further(kind: Format, files: dict[str, Path], num_layers: int) -> int:
    """Return the number of MTP layers behind the first, where each has its prefix."""
    following = {"deepseek": r"model\.(?:language_model\.)?layers\.(\d+)\.enorm", "mimo": r"model\.mtp_layers\.(\d+)\."}
    first = {"deepseek": num_layers, "mimo": 0}.get(kind.name)
    if first is None:
        return 0
    indices = {int(match.group(1)) for key in files if (match := re.match(following[kind.name], key))}
    return len([index for index in indices if index > first])


def _files_of(source: str) -> dict[str, Path]:
    path = next((path for name in _FILES if (path := _path(source, name)) is not None), None)
    if path is None:
        raise ConfigError(
            f"{source!r} is no folder or downloaded model with weights in safetensors; expected one of "
            f"{', '.join(_FILES)}."
        )
    return files_by_name(path) if path.suffix == ".json" else dict.fromkeys(tensor_names(path), path)


def _path(source: str, name: str) -> Path | None:
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.exists() else None
    try:
        cached = cached_file(source, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None
    return None if cached is None else Path(cached)
