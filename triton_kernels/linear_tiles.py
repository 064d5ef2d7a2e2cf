"""Tiles, pipeline and pieces of ``linear``: which compilation computes how many rows with which matrices.

Tiles, stages and prefetches change no bit of a result, so they may depend on the number of rows. Pieces do: a sum over
the features may be one sum, or the sum of several, in their order. So pieces depend on the matrices alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import triton

from specdec_fast.triton_kernels.device import properties
from specdec_fast.triton_kernels.overlap import overlaps
from specdec_fast.triton_kernels.variant import Launch

_ENOUGH_PROGRAMS = 96  # each loads at least 16 KiB of weights at a time, so many saturate a large device
_LONG = 2048  # features; a shorter sum is never several
_PIECE_MULTIPLE = 256  # features of a piece are a multiple of it, as of every tile
_MOST_SPLIT_ROWS = 256  # with more, partial sums would be more bytes than weights
# Outputs, rows and warps of tiles for many rows, and how fast one is for its size, compared with the largest: it reads
# more for as many products. The speeds are estimates.
_WIDE = ((128, 256, 8, 1.0), (128, 128, 8, 0.85), (128, 64, 8, 0.7), (64, 128, 4, 0.7), (64, 64, 4, 0.55))
_LEAST_SHARED_MEMORY = 99 << 10  # bytes per program, of the devices of NVIDIA that have least


@dataclass
class TileChoices:
    """What ``bench.gpu`` measures others of; all but ``num_pieces`` change no bit."""

    most_stages: int = 6  # tiles of features that a program loads ahead
    has_low_tiles: bool = True  # whether few outputs get tiles of 32 or 16, so that more programs read weights
    prefetched: int = 256  # numbers of each row of weights for which a program asks before it waits
    # sums of which a sum consists that is long and of a narrow layer; with few rows, each is another program's
    num_pieces: int = 1
    has_wide_tiles: bool = True  # whether more than 64 rows get tiles of all sizes on Hopper


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


def launch_of(
    dtype: torch.dtype,
    in_features: int,
    sizes: Sequence[int],
    num_rows: int,
    num_pieces: int | None = None,
    most_block_rows: int = 256,
) -> Launch:
    """Choose tiles and warps for matrices of these outputs; ``num_pieces``: None for those of the first one.

    16-bit numbers: 64 outputs are the least with which Hopper's largest instruction works. Lower tiles use the one of
    Ampere, which adds in the same order. Few rows share a program, which reads weights once; many rows get tiles that
    are also wide. fp32 uses no tensor cores; larger tiles would spill.
    """
    alignment = alignment_of(dtype, in_features)
    num_outputs = sum(sizes)
    if num_pieces is None:
        num_pieces = pieces_of(dtype, in_features, sizes[0])
    block_rows = 16 if num_rows <= 16 or alignment == 1 else 64
    block_in = 128
    num_warps = 4
    if dtype == torch.float32:
        block_out = 32 if num_outputs >= 32 * _ENOUGH_PROGRAMS else 16
        block_in = 32
        num_warps = 8 if block_out * block_rows > 1024 else 4
    elif num_rows <= 64 or alignment == 1:
        block_out = _height(num_outputs * num_pieces)
        block_in = 256 if block_out == 16 == block_rows and alignment > 1 else 128
    else:
        most_block_rows = most_block_rows if num_pieces == 1 else 128  # pieces need registers for two sums
        block_out, block_rows, num_warps = _many_rows(sizes, num_rows, most_block_rows)
        block_in = 64
    constexprs = {
        "IN_FEATURES": in_features,
        "ALIGNMENT": alignment,
        "BLOCK_ROWS": block_rows,
        "BLOCK_OUT": block_out,
        "BLOCK_IN": block_in,
        "PREFETCHED": CHOICES.prefetched,
        "PIECE": _PIECE_MULTIPLE * triton.cdiv(in_features, num_pieces * _PIECE_MULTIPLE),
        "OVERLAPS": overlaps(),
    }
    stages = _num_stages((block_out + block_rows) * block_in * dtype.itemsize)
    # Without a limit of its own, the assembler would choose fewer registers, and spill.
    return Launch(constexprs, num_warps, stages, max_registers=255, instruction_side=16)


def pieces_of(dtype: torch.dtype, in_features: int, out_features: int) -> int:
    """Return the sums that are added to one, for a matrix of this shape."""
    is_long = dtype != torch.float32 and in_features >= max(_LONG, out_features)
    return CHOICES.num_pieces if is_long and alignment_of(dtype, in_features) > 1 else 1


def is_split(launch: Launch, sizes: Sequence[int], num_rows: int) -> bool:
    """Return whether each piece of a sum should have its own program, because there are few others."""
    tile = launch.constexprs
    groups = triton.cdiv(num_rows, tile["BLOCK_ROWS"])
    programs = groups * sum(triton.cdiv(size, tile["BLOCK_OUT"]) for size in sizes)
    return tile["PIECE"] < tile["IN_FEATURES"] and num_rows <= _MOST_SPLIT_ROWS and programs < _ENOUGH_PROGRAMS


def _height(num_outputs: int) -> int:
    """Return the outputs of a tile: as many as leave enough programs, each of which reads all rows."""
    if not CHOICES.has_low_tiles:
        return 64
    return next((height for height in (64, 32) if num_outputs >= height * _ENOUGH_PROGRAMS // 2), 16)


def _many_rows(sizes: Sequence[int], num_rows: int, most_block_rows: int) -> tuple[int, int, int]:
    """Return outputs, rows and warps of a tile for more than 64 rows."""
    if CHOICES.has_wide_tiles and has_wide_instructions():
        multiprocessors = getattr(properties(), "multi_processor_count", 132)

        def cost(tile: tuple[int, int, int, float]) -> float:
            block_out, block_rows, _, speed = tile
            programs = triton.cdiv(num_rows, block_rows) * sum(triton.cdiv(size, block_out) for size in sizes)
            return triton.cdiv(programs, multiprocessors) * block_out * block_rows / speed

        block_out, block_rows, num_warps, _ = min((each for each in _WIDE if each[1] <= most_block_rows), key=cost)
        return block_out, block_rows, num_warps
    has_many = triton.cdiv(num_rows, 128) * triton.cdiv(sum(sizes), 128) >= 2 * _ENOUGH_PROGRAMS
    return (128, 128, 8) if has_many else (64, 128, 4)


def has_wide_instructions() -> bool:
    """Return whether the current device is a Hopper: there an instruction multiplies with up to 256 rows."""
    device = properties()
    return device is not None and device.major == 9


def _num_stages(num_bytes: int) -> int:
    """Return how many tiles of weights and rows of ``num_bytes`` are loaded ahead. No bit depends on it."""
    if torch.version.hip is not None:
        return 2
    device = properties()
    available = _LEAST_SHARED_MEMORY if device is None else device.shared_memory_per_block_optin
    return max(2, min(available // num_bytes, CHOICES.most_stages))


def alignment_of(dtype: torch.dtype, in_features: int) -> int:
    """Return how many numbers are 16 bytes if a row of weights is a multiple of 16 bytes, else 1."""
    return 16 // dtype.itemsize if in_features * dtype.itemsize % 16 == 0 else 1
