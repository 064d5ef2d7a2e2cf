"""Tiles of ``linear``: which compilation computes how many rows with which matrices. No choice here changes a bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import triton

from specdec_fast.triton_kernels.device import properties
from specdec_fast.triton_kernels.overlap import overlaps
from specdec_fast.triton_kernels.variant import Launch

_ENOUGH_PROGRAMS = 96  # each loads at least 16 KiB of weights at a time, so many saturate a large device
_FEW_ROWS = 64  # of one program, which reads weights once
_LEAST_SHARED_MEMORY = 99 << 10  # bytes per program, of the devices of NVIDIA that have least
_HOPPERS_MULTIPROCESSORS = 132  # if the device is not asked


class Tile(NamedTuple):
    """The size of a tile for many rows.

    ``speed``: how fast it is for its size, relative to the largest one, which reads least for as many products. On an
    H200, the tiles chosen by these speeds took 1% longer than the best ones, over six layers and 96 to 2,048 rows.
    """

    block_out: int
    block_rows: int
    num_warps: int
    speed: float
    has_descriptors: bool  # computed by ``linear_descriptors``


_LARGE = (
    Tile(128, 256, 8, 1.0, has_descriptors=True),
    Tile(128, 192, 8, 0.9, has_descriptors=True),
    Tile(128, 128, 8, 0.82, has_descriptors=True),
    Tile(128, 64, 8, 0.43, has_descriptors=False),
    Tile(64, 64, 4, 0.36, has_descriptors=False),
)


@dataclass
class TileChoices:
    """What ``bench.gpu`` measures others of."""

    most_stages: int = 6  # tiles of features that a program loads ahead
    has_low_tiles: bool = True  # whether few outputs get tiles of 32 or 16, so that more programs read weights
    has_large_tiles: bool = True  # whether more than 64 rows get tiles of all sizes on Hopper
    has_descriptors: bool = True  # whether the device copies such tiles by their descriptors, if that is faster


CHOICES = TileChoices()


@contextmanager
def chosen(**changes: int) -> Iterator[None]:
    """Change ``CHOICES`` for launches within, while no other thread launches."""
    before = asdict(CHOICES)
    vars(CHOICES).update(changes)
    try:
        yield
    finally:
        vars(CHOICES).update(before)


def launch_of(dtype: torch.dtype, in_features: int, sizes: Sequence[int], num_rows: int) -> Launch:
    """Choose tiles and warps for matrices of these outputs in one launch of ``linear``'s own kernel.

    16-bit numbers: 64 outputs are the least with which Hopper's largest instruction works. Lower tiles use the one of
    Ampere, which adds in the same order. Few rows share a program, which reads weights once; many rows get tiles that
    are also wide. fp32 uses no tensor cores; larger tiles would spill. Splitting sums instead of outputs would need a
    second launch; on an H200 that gained nothing.
    """
    alignment = alignment_of(dtype, in_features)
    block_rows = 16 if num_rows <= 16 or alignment == 1 else _FEW_ROWS
    block_in = 128
    num_warps = 4
    if dtype == torch.float32:
        block_out = 32 if sum(sizes) >= 32 * _ENOUGH_PROGRAMS else 16
        block_in = 32
        num_warps = 8 if block_out * block_rows > 1024 else 4
    elif num_rows <= _FEW_ROWS or alignment == 1:
        block_out = _height(sum(sizes))
        block_in = 256 if block_out == 16 == block_rows and alignment > 1 else 128
    else:
        block_out, block_rows, num_warps = _many_rows(sizes, num_rows)
        block_in = 64
    return _launch(dtype, in_features, (block_out, block_rows, block_in), num_warps)


def described_launch(dtype: torch.dtype, in_features: int, size: int, num_rows: int) -> Launch | None:
    """Return the launch of ``linear_descriptors`` for one matrix; None if ``linear``'s own kernel is faster."""
    if not _has_large_tiles(dtype, in_features, num_rows) or not CHOICES.has_descriptors:
        return None
    tile = min(_LARGE, key=lambda each: _cost(each, (size,), num_rows))
    if not tile.has_descriptors:
        return None
    return _launch(dtype, in_features, (tile.block_out, tile.block_rows, 64), tile.num_warps)


def are_faster_alone(dtype: torch.dtype, in_features: int, sizes: Sequence[int], num_rows: int) -> bool:
    """Return whether several matrices should have a launch each, because descriptors compute some of them faster."""
    if len(sizes) == 1 or not _has_large_tiles(dtype, in_features, num_rows) or not CHOICES.has_descriptors:
        return False
    together = min(_cost(tile, sizes, num_rows) for tile in _LARGE if not tile.has_descriptors)
    alone = (min(_cost(tile, (size,), num_rows) for tile in _LARGE) for size in sizes)
    return sum(alone) < together


def _has_large_tiles(dtype: torch.dtype, in_features: int, num_rows: int) -> bool:
    of_16_bits = dtype != torch.float32 and alignment_of(dtype, in_features) > 1
    return of_16_bits and num_rows > _FEW_ROWS and CHOICES.has_large_tiles and is_hopper()


def _cost(tile: Tile, sizes: Sequence[int], num_rows: int) -> float:
    """Return the time of the waves of programs that a launch needs; its unit depends on the number of features."""
    multiprocessors = getattr(properties(), "multi_processor_count", _HOPPERS_MULTIPROCESSORS)
    programs = triton.cdiv(num_rows, tile.block_rows) * sum(triton.cdiv(size, tile.block_out) for size in sizes)
    return triton.cdiv(programs, multiprocessors) * tile.block_out * tile.block_rows / tile.speed


def _launch(dtype: torch.dtype, in_features: int, blocks: tuple[int, int, int], num_warps: int) -> Launch:
    block_out, block_rows, block_in = blocks
    constexprs = {
        "IN_FEATURES": in_features,
        "ALIGNMENT": alignment_of(dtype, in_features),
        "BLOCK_ROWS": block_rows,
        "BLOCK_OUT": block_out,
        "BLOCK_IN": block_in,
        "OVERLAPS": overlaps(),
    }
    stages = _num_stages((block_out + block_rows) * block_in * dtype.itemsize)
    # Without a limit of its own, the assembler would choose fewer registers, and spill.
    return Launch(constexprs, num_warps, stages, max_registers=255, instruction_side=16)


def _height(num_outputs: int) -> int:
    """Return the outputs of a tile for few rows: as many as leave enough programs, each of which reads all rows."""
    device = properties()
    if not CHOICES.has_low_tiles or (device is not None and device.major > 9):
        return 64  # nobody has compared the bits of Blackwell's own instruction with those of Ampere's
    return next((height for height in (64, 32) if num_outputs >= height * _ENOUGH_PROGRAMS // 2), 16)


def _many_rows(sizes: Sequence[int], num_rows: int) -> tuple[int, int, int]:
    """Return outputs, rows and warps of a tile of ``linear``'s own kernel for many rows."""
    if CHOICES.has_large_tiles and is_hopper():
        own = [tile for tile in _LARGE if not tile.has_descriptors]
        tile = min(own, key=lambda each: _cost(each, sizes, num_rows))
        return tile.block_out, tile.block_rows, tile.num_warps
    has_many = triton.cdiv(num_rows, 128) * triton.cdiv(sum(sizes), 128) >= 2 * _ENOUGH_PROGRAMS
    return (128, 128, 8) if has_many else (64, 128, 4)


def is_hopper() -> bool:
    """Return whether the current device is a Hopper: there an instruction multiplies with up to 256 rows."""
    device = properties()
    return device is not None and device.major == 9


def _num_stages(num_bytes: int) -> int:
    """Return how many tiles of weights and rows of ``num_bytes`` are loaded ahead."""
    if torch.version.hip is not None:
        return 2
    device = properties()
    available = _LEAST_SHARED_MEMORY if device is None else device.shared_memory_per_block_optin
    return max(2, min(available // num_bytes, CHOICES.most_stages))


def alignment_of(dtype: torch.dtype, in_features: int) -> int:
    """Return how many numbers are 16 bytes if a row of weights is a multiple of 16 bytes, else 1."""
    return 16 // dtype.itemsize if in_features * dtype.itemsize % 16 == 0 else 1
