"""The op ``realign_kv_``: shift every row of a dense, right-aligned KV cache by its own amount."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_fast.ops.checks import FLOATS, expect, expect_tensor, is_in_memory
from specdec_fast.ops.registry import Case, Op


def realign_kv_(layers: Sequence[tuple[Tensor, Tensor]], starts: Tensor, lengths: Tensor, shifts: Tensor) -> None:
    """Move columns ``starts[b]`` to ``starts[b] + lengths[b] - 1`` of row b by ``shifts[b]``, in place, in all layers.

    A shift may be negative (to the left), and the new place may overlap the old one. Rows with shift 0 do not change.
    Columns that a row leaves keep their old numbers.

    Args:
        layers: keys and values of each layer, each ``[B, num_kv_heads, columns, head_dim]``; all with one shape and the
            same strides; the last axis is contiguous.
        starts, lengths, shifts: ``[B]`` int32, of each row its first column, its number of columns, and its shift.
    """
    moves = zip(starts.tolist(), lengths.tolist(), shifts.tolist(), strict=True)
    for row, (start, length, shift) in enumerate(moves):
        if shift == 0:
            continue
        for tensor in (tensor for layer in layers for tensor in layer):
            content = tensor[row, :, start : start + length].clone()
            tensor[row, :, start + shift : start + shift + length] = content


def _check(layers: Sequence[tuple[Tensor, Tensor]], starts: Tensor, lengths: Tensor, shifts: Tensor) -> None:
    expect(len(layers) > 0, "layers is empty; expected keys and values of at least one layer.")
    first = layers[0][0]
    expect_tensor("keys of layer 0", first, (None,) * 4, FLOATS, first.device)
    shape = first.shape
    stride = first.stride()
    dtype = first.dtype
    device = first.device
    for i, (keys, values) in enumerate(layers):
        for name, t in (("keys", keys), ("values", values)):
            # Names are made only for an error, because small caches move in ten microseconds.
            if t.shape != shape or t.dtype is not dtype or t.device != device or not is_in_memory(t):
                expect_tensor(f"{name} of layer {i}", t, tuple(shape), (dtype,), device)
            if t.stride() != stride:
                raise ValueError(f"{name} of layer {i} has other strides than keys of layer 0.")
    expect(stride[3] == 1 or shape[3] == 1, "the last axis of the cache must be contiguous.")
    is_expanded = any(step == 0 and size > 1 for step, size in zip(stride, shape, strict=True))
    expect(not is_expanded, "the cache is expanded; every entry must have memory of its own.")
    rows = (shape[0],)
    for name, array in (("starts", starts), ("lengths", lengths), ("shifts", shifts)):
        expect_tensor(name, array, rows, (torch.int32,), device)
        expect(array.is_contiguous(), "starts, lengths and shifts must be contiguous.")
    if device.type == "cpu":  # on a device, reading them would wait
        num_columns = shape[2]
        for start, length, shift in zip(starts.tolist(), lengths.tolist(), shifts.tolist(), strict=True):
            low, high = (start, start + shift) if shift > 0 else (start + shift, start)
            if low < 0 or length < 0 or high + length > num_columns:
                raise ValueError(
                    f"a row of {length} columns from {start} cannot be shifted by {shift} within {num_columns} columns."
                )


@dataclass(frozen=True)
class _Shape:
    moves: tuple[tuple[int, int, int], ...]  # per row: start, length, shift
    columns: int
    num_layers: int = 2
    heads: int = 2
    head_dim: int = 32
    transposed: bool = False  # columns before heads in memory


def _make(shape: _Shape, generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    size = (len(shape.moves), shape.heads, shape.columns + 1, shape.head_dim)  # one more column than the rows use

    def layer() -> Tensor:
        tensor = torch.randn(size, generator=generator, device="cpu").to(dtype).to(device)
        if shape.transposed:
            tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
        return tensor[:, :, : shape.columns]

    moves = torch.tensor(shape.moves, dtype=torch.int32, device="cpu").view(-1, 3).T.contiguous().to(device)
    layers = [(layer(), layer()) for _ in range(shape.num_layers)]
    return {"layers": layers, "starts": moves[0], "lengths": moves[1], "shifts": moves[2]}


def _cases() -> Iterator[Case]:
    step = ((5, 90, -2), (0, 97, 1), (40, 60, 0), (12, 83, 5), (99, 0, -3))
    far = ((60, 40, -60), (0, 40, 60), (50, 50, -10))
    grid = (
        ("step", "rows of a batch after a step: left, right, unmoved, empty", _Shape(step, 101)),
        ("no_overlap", "shifts longer than the content", _Shape(far, 100)),
        ("one_column", "the smallest shifts of long rows, both ways", _Shape(((1, 300, -1), (0, 300, 1)), 301)),
        ("unmoved", "nothing to do", _Shape(((3, 20, 0), (0, 23, 0)), 23)),
        ("odd_entries", "columns that are no multiple of a vector", _Shape(step, 101, heads=3, head_dim=20)),
        ("transposed", "columns before heads in memory", _Shape(step, 101, transposed=True)),
        ("many_layers", "more layers than threads", _Shape(step[:2], 101, num_layers=9)),
        ("empty", "no rows", _Shape((), 4)),
    )
    for name, why, shape in grid:
        yield Case(name, why, partial(_make, shape))


def _benchmarks() -> Iterator[Case]:
    emitted = (1, 6, 3, 2, 1, 4, 6, 2)  # every emitted token adds a column of KV
    context = 1024  # a batch of equal lengths
    moves = tuple((0, context + e, max(emitted) - e) for e in emitted)
    shape = _Shape(moves, context + max(emitted), num_layers=8, heads=8, head_dim=128)
    yield Case("step", "batch 8, K 5, 8 layers of Qwen3-8B", partial(_make, shape))


def _bytes_moved(layers: Sequence[tuple[Tensor, Tensor]], starts: Tensor, lengths: Tensor, shifts: Tensor) -> int:
    keys = layers[0][0]
    per_column = 2 * len(layers) * keys.shape[1] * keys.shape[3] * keys.element_size()
    return 2 * int(lengths[shifts != 0].sum()) * per_column  # read and written


OP = Op(
    name="realign_kv_",
    implementations={
        "torch": "specdec_fast.ops.realign_kv:realign_kv_",
        "cpp": "specdec_fast.ops.cpp:realign_kv_",
        "triton": "specdec_fast.triton_kernels.realign_kv:realign_kv_",
    },
    check=_check,
    cases=_cases,
    benchmarks=_benchmarks,
    bytes_moved=_bytes_moved,
)
