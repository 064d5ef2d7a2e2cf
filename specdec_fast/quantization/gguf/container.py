"""Reads the container: metadata, and the tensors' names, types, shapes and bytes, through the package ``gguf``."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_fast.errors import ConfigError
from specdec_fast.quantization.gguf.block_types import BLOCK_TYPES, BlockType

MAGIC = b"GGUF"
_ARRAY = 9  # the number of the type of arrays in metadata
_LENGTH = struct.Struct("<Q")  # before each text
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of a GGUF file.

    Attributes:
        name, type_name: as the file has them, ``blk.0.attn_q.weight`` and ``Q4_K`` for example.
        shape: as PyTorch has it: outputs before inputs.
        data: the file's bytes, mapped into memory: ``[..., bytes of a row]`` uint8.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    data: np.ndarray

    @property
    def block_type(self) -> BlockType | None:
        """How its blocks are decoded; None: its numbers are floats."""
        return BLOCK_TYPES.get(self.type_name)


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """A GGUF file whose header is read.

    Attributes:
        path: of the file.
        fields: metadata by key; ``value`` returns one.
        tensors: by name, in the file's order.
    """

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def code_types(self) -> list[str]:
        """The types of its quantised tensors."""
        return sorted({each.type_name for each in self.tensors.values() if each.block_type is not None})

    def value(self, key: str, default: Any = None) -> Any:
        """Return a metadata value: a number, a text, or a list of them; ``default`` if the file has none."""
        return self.fields[key].contents() if key in self.fields else default


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file.

    Raises ConfigError if the package ``gguf`` is not installed; if there is no such file, if it is no GGUF file, if it
    is damaged or shorter than its tensors, is one of several parts, or has tensors of types that are not read.
    """
    reader_class = _reader_class(path)
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}.") from error
    if magic != MAGIC:
        raise ConfigError(f"{str(path)!r} is no GGUF file: it begins with {magic!r}; expected {MAGIC!r}.")
    try:
        reader = reader_class(path)
    except ConfigError:
        raise
    except Exception as error:  # the reader checks little, so a damaged header fails anywhere
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"the header of {str(path)!r} cannot be read ({reason}); copy the file again.") from error
    tensors = {each.name: _stored(each) for each in reader.tensors}
    file_read = GGUFFile(path, dict(reader.fields), tensors)
    if (num_parts := file_read.value("split.count", 1)) > 1:
        raise ConfigError(
            f"{str(path)!r} is one of {num_parts} parts; join them into one file (llama-gguf-split --merge)."
        )
    return file_read


def plain_values(tensor: StoredTensor) -> Tensor:
    """Return the numbers of a tensor without blocks, in a copy, in the dtype that the file has."""
    raw = torch.from_numpy(np.array(tensor.data))  # a copy, because the map is read-only
    return raw.view(PLAIN_TYPES[tensor.type_name]).view(tensor.shape)


def _stored(tensor: Any) -> StoredTensor:
    data = tensor.data.view(np.uint8)
    return StoredTensor(tensor.name, tensor.tensor_type.name, tuple(map(int, reversed(tensor.shape))), data)


def _reader_class(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(f"reading {str(path)!r} needs the package gguf; pip install gguf.") from error
    readable = PLAIN_TYPES.keys() | BLOCK_TYPES.keys()

    class CheckedReader(gguf.GGUFReader):
        """``GGUFReader``, which does not check that the file is as long as its header says."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            end = offset + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ConfigError(
                    f"{str(path)!r} is truncated: its header needs {end} bytes or more, it has {len(self.data)}; "
                    "copy the file again."
                )
            return super()._get(offset, dtype, count, override_order)

        def _build_fields(self, offs: int, count: int) -> int:
            # Mapped still; slices of np.memmap take ten times as long.
            self.data: Any = np.asarray(self.data)
            if self.byte_order != "I":
                raise ConfigError(f"{str(path)!r} is written for machines of another byte order; convert it again.")
            end: int = super()._build_fields(offs, count)
            return end

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            """Read an array at once: vocabularies have hundreds of thousands of texts."""
            item = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0])) if raw_type == _ARRAY else None
            if item is None or item == gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            types = [gguf.GGUFValueType.ARRAY, item]
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            start = orig_offs + 12
            if item != gguf.GGUFValueType.STRING:
                numbers = self._get(start, self.gguf_scalar_to_np[item], count)
                return 12 + numbers.nbytes, [numbers], [0], types
            texts = _texts(memoryview(self.data), start, count)
            return 12 + 8 * count + sum(map(len, texts)), texts, list(range(count)), types

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            for field in fields:
                _expect_readable(path, field, start_offs, len(self.data), readable)
            super()._build_tensors(start_offs, fields)

    return CheckedReader


def _texts(content: memoryview, start: int, count: int) -> list[memoryview]:
    texts = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(content, start)
        start += 8 + length
        texts.append(content[start - length : start])
    return texts


def _expect_readable(path: Path, field: Any, start: int, num_bytes: int, readable: set[str]) -> None:
    """Raise ConfigError unless a tensor has a type that is read, whole rows of blocks, and lies within the file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    _, name_data, _, dims, raw_type, offset = field.parts
    tensor = f"tensor {bytes(name_data).decode('utf-8', 'replace')!r} of {str(path)!r}"
    try:
        block_type = GGMLQuantizationType(int(raw_type[0]))
    except ValueError:
        block_type = None
    if block_type is None or block_type.name not in readable:
        name = f"number {int(raw_type[0])}, which is unknown" if block_type is None else block_type.name
        raise ConfigError(f"{tensor} has the type {name}; types that are read: {', '.join(sorted(readable))}.")
    block_size, block_bytes = GGML_QUANT_SIZES[block_type]
    shape = [int(size) for size in reversed(dims.tolist())]
    if not shape or min(shape) < 1 or shape[-1] % block_size:
        raise ConfigError(
            f"{tensor} has the shape {shape}; expected rows of a positive multiple of {block_size} numbers, as "
            f"{block_type.name} has them."
        )
    count = 1
    for size in shape:
        count *= size
    end = start + int(offset[0]) + count // block_size * block_bytes
    if end > num_bytes:
        raise ConfigError(
            f"{str(path)!r} is truncated: {tensor} ends at byte {end}, the file at {num_bytes}; copy the file again."
        )
