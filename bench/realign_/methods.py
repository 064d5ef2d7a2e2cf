"""The methods of realignment: each moves one step of a dense, right-aligned batch.

A random step is like one of eqspec: a ragged batch whose longest row ends in the last column. Every row emits one token
more than it accepts, and rows that emit fewer tokens than the batch grows by move right. All methods of a repeat, and
all shapes, have the same random steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from bench.common.timing import Call, Clock, median_ratio
from specdec_fast.oracle.dense import (
    DenseLayerKV,
    RealignKV,
    Repad,
    RowMove,
    as_tensors,
    repad_in_place,
    repad_in_python,
    row_moves,
)

CPU = torch.device("cpu")
SEED = 0
GATE_LAYERS, GATE_STEPS = 2, 2  # enough to find a mistake in layers or steps
COPIES = 3  # most copies of the cache at once: the cache, the new tensors of a method, the target of memcpy
MEMCPY, OP = "memcpy", "op"  # timed beside the methods: a copy of the bytes that fused moves, and realign_kv_ alone
# Every smaller 16-bit integer is a finite number in fp16 and bf16 (a copy through arithmetic may quiet a NaN). It is
# prime, so that no axis has its period.
PERIOD = 31_741


@dataclass(frozen=True)
class Shape:
    """The KV cache of one model."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, config: PreTrainedConfig, dtype: torch.dtype) -> Shape:
        """Read the shape of a model's cache from its config."""
        return cls(name, config.num_hidden_layers, config.num_key_value_heads, config.head_dim, dtype)

    @property
    def bytes_per_column(self) -> int:
        """The bytes of one position of one row in one layer, keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, num_layers: int, batch_size: int, num_columns: int) -> Tensor:
        """Return a cache ``[num_layers, 2, B, num_kv_heads, columns, head_dim]``."""
        size = (num_layers, 2, batch_size, self.num_kv_heads, num_columns, self.head_dim)
        return torch.ones(size, dtype=self.dtype)  # memory that is not written would have no pages yet


def layers_of(cache: Tensor) -> list[DenseLayerKV]:
    """Return the keys and values of each layer in the layout of the oracle."""
    return [(layer[0], layer[1]) for layer in cache]


PUBLISHED = (("vicuna-7b", 32, 32, 128), ("qwen3-8b", 36, 8, 128), ("glm-4-9b", 40, 2, 128))


@dataclass(frozen=True)
class Step:
    """One realignment: the moves, the number of columns that it keeps, and those of the cache."""

    moves: list[RowMove]
    num_columns: int
    cache_columns: int

    def columns_copied(self) -> dict[str, int]:
        """Return the columns that each method writes, summed over rows."""
        return {
            "python": sum(move.length for move in self.moves),
            "gather": len(self.moves) * self.num_columns,
            "fused": sum(move.length for move in self.moves if move.shift),
            "engine": 0,
        }


def draw_steps(accepted_counts: list[int], batch_size: int, columns: int, num_steps: int) -> list[Step]:
    """Make random steps in which at least one row moves.

    Args:
        accepted_counts: at index a, how often a draft tokens were accepted; its last index is K.
        batch_size: number of rows.
        columns: length of the longest row before the step. All rows had half of that length at the beginning.
        num_steps: number of steps; all begin with the same ragged batch.

    """
    if batch_size < 2 or sum(count > 0 for count in accepted_counts) < 2:
        raise ValueError(f"batch {batch_size}, accepted {accepted_counts}: all rows emit alike, so nothing ever moves.")
    generator = torch.Generator().manual_seed(SEED)
    weights = torch.tensor(accepted_counts, dtype=torch.float64)

    def emitted() -> Tensor:
        return 1 + torch.multinomial(weights, batch_size, replacement=True, generator=generator)

    grown = torch.zeros(batch_size, dtype=torch.int64)
    while grown.max() < columns - columns // 2:
        grown += emitted()
    padding = (grown.max() - grown).clamp_max(columns - 1)
    steps: list[Step] = []
    while len(steps) < num_steps:
        new_tokens = emitted()
        growth = int((columns - padding + new_tokens).max()) - columns
        shifts = (growth - new_tokens).tolist()
        if any(shifts):
            kept = columns + growth - 1  # the newest token has no KV entry yet (I3)
            moves = row_moves(padding.tolist(), shifts, kept)
            steps.append(Step(moves, kept, columns - 1 + len(accepted_counts)))
    return steps


def repad_by_gather(layers: list[DenseLayerKV], moves: list[RowMove], num_columns: int) -> list[DenseLayerKV]:
    """Make every tensor new by one ``torch.gather`` of its entries; columns of padding are arbitrary.

    It gathers along axis 0 of ``[B * num_kv_heads * columns, head_dim]``. Along axis 2 of the original tensor, torch
    copies number by number, which is several times slower.
    """
    batch_size, num_heads, columns, head_dim = layers[0][0].shape
    shifts = torch.tensor([move.shift for move in moves])
    sources = (torch.arange(num_columns) - shifts[:, None]).clamp(0, columns - 1)  # [B, num_columns]
    first = torch.arange(batch_size * num_heads).view(batch_size, num_heads, 1) * columns
    index = (first + sources[:, None]).view(-1, 1).expand(-1, head_dim)

    def gathered(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 2).gather(0, index).view(batch_size, num_heads, num_columns, head_dim)

    return [(gathered(keys), gathered(values)) for keys, values in layers]


def methods(realign_kv_: RealignKV) -> dict[str, Repad]:
    """Return the methods that move KV entries, by name; the engine moves none."""
    return {"python": repad_in_python, "gather": repad_by_gather, "fused": repad_in_place(realign_kv_)}


def check(repads: Mapping[str, Repad], shape: Shape, num_layers: int, steps: list[Step]) -> str | None:
    """Run all methods on the same numbers; return which one disagrees with ``python`` on the rows, or None."""
    for step in steps[:GATE_STEPS]:
        cache = _numbered(shape.allocate(min(num_layers, GATE_LAYERS), len(step.moves), step.cache_columns))
        expected = repads["python"](layers_of(cache), step.moves, step.num_columns)
        for name, repad in repads.items():
            got = repad(layers_of(cache.clone()), step.moves, step.num_columns)
            if not _hold_the_same(got, expected, step):
                return f"{name} leaves other KV entries than python does"
    return None


def _numbered(cache: Tensor) -> Tensor:
    """Fill a cache with consecutive integers as bits of floats, so that neighbours along every axis differ."""
    for i, tensor in enumerate(
        cache.view(_same_width(cache.dtype)).flatten(0, 2)
    ):  # in parts, which bounds the memory for int64 numbers
        numbers = torch.arange(i * tensor.numel(), (i + 1) * tensor.numel()).remainder_(PERIOD)
        tensor.copy_(numbers.view_as(tensor))
    return cache


def _same_width(dtype: torch.dtype) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32}[dtype.itemsize]


def _hold_the_same(got: list[DenseLayerKV], expected: list[DenseLayerKV], step: Step) -> bool:
    for layer, expected_layer in zip(got, expected, strict=True):
        for tensor, wanted in zip(layer, expected_layer, strict=True):
            for row, move in enumerate(step.moves):
                first = move.start + move.shift
                held = (t[row, :, first : first + move.length].view(_same_width(t.dtype)) for t in (tensor, wanted))
                if not torch.equal(*held):
                    return False
    return True


def measure(
    repads: Mapping[str, Repad], realign_kv_: RealignKV, shape: Shape, num_layers: int, steps: list[Step]
) -> list[dict[str, Any]]:
    """Time every method on every step, interleaved; return one row per method, the engine's included.

    ``fused`` is the whole step of the oracle: making the tensors of the moves, the op, and the cropped views.
    """
    batch_size = len(steps[0].moves)
    cache = shape.allocate(num_layers, batch_size, steps[0].cache_columns)
    source, layers = cache.flatten().view(torch.uint8), layers_of(cache)
    bytes_per_column = shape.bytes_per_column * num_layers
    largest = max(step.columns_copied()["fused"] for step in steps) * bytes_per_column
    destination = torch.ones(largest, dtype=torch.uint8)

    def calls(step: Step) -> dict[str, Call]:
        num_bytes = step.columns_copied()["fused"] * bytes_per_column
        by_name: dict[str, Call] = {
            name: partial(r, layers, step.moves, step.num_columns) for name, r in repads.items()
        }
        by_name[OP] = partial(realign_kv_, layers, *as_tensors(step.moves, CPU))
        return {**by_name, MEMCPY: partial(destination[:num_bytes].copy_, source[:num_bytes])}

    # Repeated moves of the same rows leave nonsense in the cache, but each costs the same.
    seconds = Clock(CPU).interleave([calls(step) for step in steps])
    rows = []
    for method in (*repads, "engine"):
        own = seconds.get(method)
        rows.append(
            {
                "shape": shape.name,
                "batch": batch_size,
                "method": method,
                "milliseconds": 1e3 * median(own) if own else 0.0,
                "bytes_moved": int(median(step.columns_copied()[method] for step in steps) * bytes_per_column),
                "speedup_over_python": median_ratio(seconds["python"], own) if own else None,
                "time_over_memcpy": median_ratio(own, seconds[MEMCPY]) if own and method == "fused" else None,
                "op_over_memcpy": median_ratio(seconds[OP], seconds[MEMCPY]) if method == "fused" else None,
                "memcpy_milliseconds": 1e3 * median(seconds[MEMCPY]) if method == "fused" else None,
                "layers": num_layers,
                "of_layers": shape.num_layers,
                "dtype": str(shape.dtype).removeprefix("torch."),
            }
        )
    return rows


def layers_that_fit(shape: Shape, batch_size: int, cache_columns: int, memory_bytes: int) -> int:
    """Return the number of layers that can be measured within ``memory_bytes``, at most all."""
    per_layer = COPIES * batch_size * cache_columns * shape.bytes_per_column
    return min(shape.num_layers, memory_bytes // per_layer)
