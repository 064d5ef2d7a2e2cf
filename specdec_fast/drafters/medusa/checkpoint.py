"""The weights of a Medusa checkpoint, in the hub's formats, under one set of names (Cai et al., arXiv 2401.10774).

The formats are that of FasterDecoding/Medusa (``medusa_lm_head.pt`` or ``.safetensors``) and that of vLLM, whose heads
may share one output layer and may know fewer ids than the target. Heads and blocks are counted by their weights,
because the numbers in published ``config.json`` files are wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from specdec_fast.drafters.shared.checkpoint.settings import Settings
from specdec_fast.drafters.shared.checkpoint.weights import read_tensors
from specdec_fast.errors import ConfigError

HEADS_FILE = "medusa_lm_head.safetensors"
_OWN_FILES = (HEADS_FILE, "medusa_lm_head.pt")
_FILES = (*_OWN_FILES, "model.safetensors", "pytorch_model.bin")
_PREFIXES = ("medusa_head.", "medusa_heads.")
_BLOCK = re.compile(r"(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)")
_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
_OUTPUT_OF_VLLM = re.compile(r"lm_heads\.(\d+)\.weight")
_SHARED_OUTPUT = "lm_head.weight"
_TOKEN_MAP = "token_map"


@dataclass(frozen=True)
class Head:
    """One head."""

    blocks: tuple[tuple[Tensor, Tensor | None], ...]  # weight [H, H] and bias [H] or None of each residual block
    output: Tensor  # [draft_vocab_size, H]


@dataclass(frozen=True)
class MedusaWeights:
    """All heads of a checkpoint."""

    heads: tuple[Head, ...]  # head i is for the token i + 1 positions behind the newest one
    target_ids: Tensor | None  # [draft_vocab_size] int64, the target's id of each draft id; None if they are the same


def is_medusa(folder: Path) -> bool:
    """Return whether a folder holds Medusa heads: by the name of a file, or by its ``config.json``.

    Raises:
        ConfigError: ``architectures`` is no list of names.
    """
    if any((folder / name).exists() for name in _OWN_FILES):
        return True
    settings = Settings.read_if_any(folder)  # heads need none
    names = [str(settings.get("model_type")), *settings.names("architectures")]
    return any(name.lower() in ("medusa", "medusamodel") for name in names)


def read_heads(folder: Path, hidden_size: int) -> MedusaWeights:
    """Read all heads of a folder, for a target of a hidden size.

    Raises:
        ConfigError: there is no such file, it is damaged, or a weight is missing, unknown or of another shape; the
            message names the weight.
    """
    path = next((folder / name for name in _FILES if (folder / name).exists()), None)
    if path is None:
        raise ConfigError(f"{str(folder)!r} has no Medusa heads; expected one of {', '.join(_FILES)}.")
    sorted_weights = _SortedWeights(path, hidden_size)
    for key, value in read_tensors(path).items():
        sorted_weights.add(key, value)
    return sorted_weights.joined()


class _SortedWeights:
    """The weights of one file, sorted by head and block."""

    def __init__(self, path: Path, hidden_size: int) -> None:
        self._where = repr(str(path))
        self._hidden_size = hidden_size
        self._blocks: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._outputs: dict[int, tuple[int | None, Tensor]] = {}  # with the number of blocks, if the name says it
        self._shared: Tensor | None = None
        self._token_map: Tensor | None = None

    def add(self, key: str, value: Tensor) -> None:
        """Sort one weight by its name."""
        name = next((key.removeprefix(prefix) for prefix in _PREFIXES if key.startswith(prefix)), key)
        size = self._hidden_size
        if match := _BLOCK.fullmatch(name):
            head, block = (int(part) for part in match.groups()[:4] if part is not None)
            self._expect_shape(key, value, (size, size) if match[5] == "weight" else (size,))
            self._blocks.setdefault((head, block), {})[match[5]] = value
        elif name == _TOKEN_MAP:
            self._token_map = value.long()
        else:
            self._add_output(key, name, value)

    def _add_output(self, key: str, name: str, value: Tensor) -> None:
        if match := _OUTPUT.fullmatch(name):
            index = int(match[1])
            num_blocks = int(match[2])
        elif match := _OUTPUT_OF_VLLM.fullmatch(name):
            index = int(match[1])
            num_blocks = None
        elif name == _SHARED_OUTPUT:
            index = None
        else:
            raise ConfigError(f"{self._where} has the weight {key}, which Medusa heads do not have.")
        self._expect_shape(key, value, (None, self._hidden_size))
        if index is None:
            self._shared = value
        else:
            self._outputs[index] = (num_blocks, value)

    def _expect_shape(self, key: str, value: Tensor, shape: tuple[int | None, ...]) -> None:
        given = tuple(value.shape)
        if len(given) != len(shape) or any(n not in (None, m) for n, m in zip(shape, given, strict=True)):
            expected = ["any number" if n is None else n for n in shape]
            raise ConfigError(
                f"{self._where}: {key} has the shape {list(given)}; expected [{', '.join(map(str, expected))}], where "
                f"{self._hidden_size} is the target's hidden size. Pass heads that were trained for this target."
            )

    def joined(self) -> MedusaWeights:
        """Return the heads, counted from 0 without a gap."""
        num_heads = 1 + max((head for head in (*self._outputs, *(head for head, _ in self._blocks))), default=-1)
        if not num_heads:
            raise ConfigError(f"{self._where} has no head; expected weights such as 0.0.linear.weight and 0.1.weight.")
        if self._shared is None and set(self._outputs) == {0}:
            self._shared = self._outputs[0][1]  # vLLM's original_lm_head
        heads = tuple(self._head(index) for index in range(num_heads))
        sizes = {len(head.output) for head in heads}
        if self._token_map is not None and sizes != {len(self._token_map)}:  # vLLM cuts whole layers itself
            heads = tuple(Head(head.blocks, self._cut(head.output)) for head in heads)
            sizes = {len(head.output) for head in heads}
        if len(sizes) > 1:
            raise ConfigError(f"{self._where} has heads of {sorted(sizes)} ids; expected as many in each.")
        return MedusaWeights(heads, self._token_map)

    def _head(self, index: int) -> Head:
        num_blocks, output = self._outputs.get(index, (None, self._shared))
        if output is None:
            raise ConfigError(f"{self._where} lacks the output layer of head {index}; expected lm_heads.{index}.weight "
                              f"or {index}.N.weight, with N the number of its blocks.")  # fmt: skip
        num_read = 1 + max((block for head, block in self._blocks if head == index), default=-1)
        if num_blocks is not None and num_read > num_blocks:
            raise ConfigError(
                f"{self._where} has the block {index}.{num_read - 1}.linear, but the output {index}.{num_blocks}."
            )
        blocks = []
        for block in range(num_read if num_blocks is None else num_blocks):
            weights = self._blocks.get((index, block), {})
            if "weight" not in weights:
                raise ConfigError(f"{self._where} lacks the weight {index}.{block}.linear.weight; expected all blocks.")
            blocks.append((weights["weight"], weights.get("bias")))
        return Head(tuple(blocks), output)

    def _cut(self, output: Tensor) -> Tensor:
        assert self._token_map is not None
        ids = self._token_map
        if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= len(output):
            raise ConfigError(
                f"{self._where}: token_map names ids outside the {len(output)} rows of the output layers."
            )
        return output[ids]
