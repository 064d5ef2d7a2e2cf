"""The safetensors files of a checkpoint: which tensors there are, and those of one linear at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec_fast.errors import ConfigError
from specdec_fast.quantization.checkpoint import mxfp4
from specdec_fast.quantization.checkpoint.config import CheckpointQuantization
from specdec_fast.quantization.checkpoint.linear import LinearTensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_CODES = frozenset({"qweight", "weight", "weight_packed"}) | mxfp4.MARKERS
_PLAIN_DTYPES = {"F64", "F32", "F16", "BF16"}


class CheckpointFiles:
    """The tensors of a checkpoint, by name; numbers stay in the files until they are read.

    Args:
        file_of: the file of each tensor.

    Its methods raise ConfigError, which names file and tensor, if a file is damaged.
    """

    def __init__(self, file_of: Mapping[str, Path]) -> None:
        self._file_of = dict(file_of)
        self._open_path: Path | None = None
        self._open_file: Any = None
        self._suffixes: dict[str, list[str]] = {}
        for name in self._file_of:
            module, _, suffix = name.rpartition(".")
            self._suffixes.setdefault(module, []).append(suffix)

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._file_of)

    def suffixes_of(self, module: str) -> list[str]:
        """Return the last parts of the names of a module's own tensors."""
        return self._suffixes.get(module, [])

    def tensors_of(self, module: str, only_sizes: bool = False) -> LinearTensors:
        """Read the tensors of one module; with ``only_sizes``, those of codes have no numbers (the meta device)."""
        tensors = {}
        for suffix in self.suffixes_of(module):
            name = f"{module}.{suffix}"
            path = self._file_of[name]
            try:
                file = self._opened(path)
                is_empty = only_sizes and suffix in _CODES
                tensors[suffix] = _without_numbers(file.get_slice(name)) if is_empty else file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path}: the tensors of {module} cannot be read: {error}") from error
        return LinearTensors(module, tensors, lambda suffix: self._shown(f"{module}.{suffix}", module))

    def dtype_of(self, name: str) -> str:
        """Return the dtype of a tensor as safetensors writes it, such as ``BF16``."""
        path = self._file_of[name]
        try:
            return str(self._opened(path).get_slice(name).get_dtype())
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: {name} cannot be read: {error}") from error

    def _opened(self, path: Path) -> Any:
        """Open a file, and keep it open until another one is wanted: modules that follow each other lie in one."""
        if self._open_path != path:
            self._open_file = safe_open(path, "pt")
            self._open_path = path
        return self._open_file

    def has_codes(self, module: str, quantization: CheckpointQuantization) -> bool:
        """Return whether a linear has codes. Raises ConfigError if its tensors contradict the config.

        A linear without any tensor has none: its weight is that of another module.
        """
        linear_format = quantization.format_of(module)
        suffixes = self.suffixes_of(module)
        if linear_format is None:
            if found := quantization.markers.intersection(suffixes):
                name = f"{module}.{min(found)}"
                raise ConfigError(
                    f"{self._file_of[name]}: {name} is a tensor of codes, but quantization_config leaves {module} out."
                )
            return False
        if linear_format.marker in suffixes or not suffixes:
            return bool(suffixes)
        name = f"{module}.weight"
        if quantization.may_be_plain and "weight" in suffixes and self.dtype_of(name) in _PLAIN_DTYPES:
            return False
        file = self._file_of[f"{module}.{suffixes[0]}"]
        raise ConfigError(
            f"{file}: {module}.{linear_format.marker} is missing, although quantization_config says that this linear "
            f"has codes; it has {', '.join(sorted(suffixes))}."
        )

    def modules_with_codes(self, quantization: CheckpointQuantization) -> set[str]:
        """Return the names of all modules that have tensors of codes."""
        return {module for module, suffixes in self._suffixes.items() if quantization.markers.intersection(suffixes)}

    def _shown(self, name: str, module: str) -> str:
        """Return the file of a tensor; of one that is missing, that of another tensor of its module."""
        name = name if name in self._file_of else f"{module}.{self.suffixes_of(module)[0]}"
        return str(self._file_of[name])


def _without_numbers(tensor: Any) -> Tensor:
    return torch.empty(tensor.get_shape(), dtype=tensor[:0].dtype, device="meta")


def files_of(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: those of its index, or ``model.safetensors``.

    Raises ConfigError if there is neither, or the index cannot be read.
    """
    if (folder / INDEX).exists():
        return [folder / name for name in sorted(set(_weight_map(folder / INDEX).values()))]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    raise ConfigError(
        f"{folder} has neither {INDEX} nor {SINGLE}; codes are read from safetensors alone, because other files can "
        "hold objects that run code."
    )


def open_folder(folder: Path) -> CheckpointFiles:
    """List the tensors of a checkpoint's folder.

    Raises ConfigError, which names the file, if one is missing or damaged, if its index names tensors that it does not
    have, or if two files have a tensor of one name.
    """
    found: dict[str, Path] = {}
    for path in files_of(folder):
        try:
            with safe_open(path, "pt") as file:
                names = list(file.keys())
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is missing, damaged or truncated: {error}") from error
        if twice := sorted(set(names) & set(found)):
            raise ConfigError(f"{path}: {twice[0]} is also in {found[twice[0]]}; expected one tensor of a name.")
        found.update(dict.fromkeys(names, path))
    if (folder / INDEX).exists():
        for name, file_name in _weight_map(folder / INDEX).items():
            if found.get(name) != folder / file_name:
                raise ConfigError(f"{folder / file_name} lacks {name}, which {INDEX} says it has.")
    return CheckpointFiles(found)


def _weight_map(path: Path) -> dict[str, str]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no index of safetensors files: {error}") from error
    entries = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise ConfigError(f"{path} has no object weight_map; expected the index of a checkpoint's files.")
    for name, file_name in entries.items():
        if not isinstance(file_name, str) or file_name != Path(file_name).name or file_name in ("", ".."):
            raise ConfigError(f"{path} says {name} is in {file_name!r}; expected the name of a file beside it.")
    return entries
