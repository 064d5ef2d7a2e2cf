"""The sampled path of ``verify_chain``: it chooses the token of each row by the rule of ``ops/sampling.py``.

Bytes: logits are read once to find the best token; in rows with ``top_k`` or ``top_p`` a few times more, mostly from
the L2 cache; and once more to draw, except in tiles where no token could win. 32 bytes are written per row and tile,
one bit per token, and 16 KiB of scratch per row.
Rows with bitmasks, biases, presence or frequency penalties are edited first (``sampling_edits``), into fp64.
Grids: (rows,) marks seen tokens; (rows, tiles) finds the best token of each tile; (rows,) combines these and finds what
the filters keep; (rows, tiles) draws; (rows,) combines. Sums have a fixed order, whatever the other rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.triton_kernels.sampling_edits import edited_logits, is_edited, spent_rows
from specdec_fast.triton_kernels.sampling_kernels import best_kernel, draw_kernel, pick_kernel, row_kernel
from specdec_fast.triton_kernels.sampling_noise import philox_kernel
from specdec_fast.triton_kernels.sampling_threshold import threshold_kernel
from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

_TILE = 1024  # tokens of a tile; they share a best token, and a bound on the noise that they need to win
_TILES = 2  # tiles that a search reads at a time
_CANDIDATES = 2048  # gaps that a search holds in registers
_BLOCK = 1024  # seen tokens or counters that a program processes at a time
_INVALID = 0x7FFFFFFF  # the key of a row that has no token
_SEQUENCES = 128  # sequences that a program compares at a time to find that of a row

# Every tensor of a launch except the logits.
_TENSORS = {
    "fp64": (
        *("temperatures", "top_p", "min_p", "penalties", "candidates"),
        *("tile_best", "tile_mass", "tile_drawn", "row_best", "row_limit", "row_drawn"),
    ),
    "i32": (
        *("parents", "cu_seqlens", "top_k", "cu_seen", "row_sequences", "seen", "tile_ids"),
        *("row_token", "keys", "tokens"),
    ),
    "i64": ("token_ids", "positions", "seeds", "seen_ids", "row_positions", "counters", "seed", "words"),
}

_LOGITS = {**TYPE_NAMES, torch.float64: "fp64"}  # fp64: of requests with masks or adjustments

_Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _row_launch(has_trees: bool) -> Launch:
    return Launch({"SEQUENCES": _SEQUENCES, "BLOCK": _BLOCK, "TREE": has_trees}, num_warps=4)


def _tile_launch() -> Launch:
    return Launch({"TILE": _TILE}, num_warps=4)


def _threshold_launch(num_tiles: int) -> Launch:
    block_tiles = triton.next_power_of_2(num_tiles)
    constexprs = {"TILE": _TILE, "TILES": _TILES, "CANDIDATES": _CANDIDATES, "BLOCK_TILES": block_tiles}
    return Launch(constexprs, num_warps=8)  # eight tokens per thread; more would not fit into registers


def _pick_launch(num_tiles: int) -> Launch:
    return Launch({"BLOCK_TILES": triton.next_power_of_2(num_tiles)}, num_warps=1)


def _philox_launch() -> Launch:
    return Launch({"BLOCK": _BLOCK}, num_warps=8)  # with four, it spills on sm_100


def philox4x32(counter: _Words, key: tuple[int, int]) -> _Words:
    """Launch the generator by itself; the contract is that of the oracle's ``philox4x32``."""
    counters = torch.stack([words.flatten() for words in counter])
    size = counters.shape[1]
    unsigned = key[0] | key[1] << 32
    seed = torch.tensor([unsigned - (unsigned >> 63 << 64)], dtype=torch.int64, device=counters.device)
    words = torch.empty_like(counters)
    if size > 0:
        philox_kernel[(triton.cdiv(size, _BLOCK),)](counters, seed, words, size, **_philox_launch().options)
    first, second, third, fourth = (word.view(counter[0].shape) for word in words)
    return first, second, third, fourth


def choose_tokens(
    logits: Tensor, token_ids: Tensor, cu_seqlens: Tensor, sampling: Sampling, parents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Launch all kernels; return keys and tokens as if each row were one chunk of ``verify_chain``'s first kernel.

    ``logits [T, vocab_size]`` have a contiguous last axis; neither axis is empty. ``token_ids [T]`` are int64,
    ``cu_seqlens [B + 1]`` and ``parents [T]`` int32; None: chains.
    """
    (num_rows, vocab_size) = logits.shape
    device = logits.device
    batch = sampling
    num_tiles = triton.cdiv(vocab_size, _TILE)
    seen = torch.zeros(num_rows, triton.cdiv(vocab_size, 32), dtype=torch.int32, device=device)
    sequences, row_tokens, tokens, keys = torch.empty(4, num_rows, dtype=torch.int32, device=device)
    row_positions = torch.empty(num_rows, dtype=torch.int64, device=device)
    tile_best, tile_mass, tile_drawn = torch.empty(3, num_rows, num_tiles, dtype=torch.float64, device=device)
    tile_ids = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    row_best, row_limit, row_drawn = torch.empty(3, num_rows, dtype=torch.float64, device=device)
    candidates = torch.empty(num_rows, _CANDIDATES, dtype=torch.float64, device=device)
    temperatures = batch.temperatures
    penalties = batch.repetition_penalties if batch.adjustments is None else torch.ones_like(batch.repetition_penalties)
    seeds = batch.seeds

    row_kernel[(num_rows,)](
        token_ids, cu_seqlens if parents is None else parents, cu_seqlens, penalties, batch.positions, batch.seen_ids,
        batch.cu_seen, sequences, row_positions, seen, cu_seqlens.numel() - 1, vocab_size, seen.stride(0),
        **_row_launch(parents is not None).options,
    )  # fmt: skip
    if is_edited(batch):
        logits = edited_logits(logits, token_ids, cu_seqlens, batch, parents, sequences)
    sizes = (logits.stride(0), seen.stride(0), vocab_size)
    best_kernel[(num_rows, num_tiles)](
        logits, seen, sequences, penalties, temperatures, batch.top_p,
        tile_best, tile_ids, tile_mass, *sizes, **_tile_launch().options,
    )  # fmt: skip
    threshold_kernel[(num_rows,)](
        logits, seen, sequences, row_positions, temperatures, batch.top_k, batch.top_p, batch.min_p, penalties, seeds,
        tile_best, tile_ids, tile_mass, candidates, row_best, row_limit, row_drawn, row_tokens, *sizes, num_tiles,
        **_threshold_launch(num_tiles).options,
    )  # fmt: skip
    draw_kernel[(num_rows, num_tiles)](
        logits, seen, sequences, row_positions, temperatures, penalties, seeds, tile_best, row_best, row_limit,
        row_drawn, tile_drawn, tile_ids, *sizes, **_tile_launch().options,
    )  # fmt: skip
    pick_kernel[(num_rows,)](
        tile_drawn, tile_ids, row_drawn, row_tokens, keys, tokens, num_tiles, **_pick_launch(num_tiles).options
    )
    if (spent := spent_rows(batch, row_best)) is not None:
        keys.masked_fill_(spent, _INVALID)
    return keys, tokens


def _variant(launch: Launch, name: str, kernel: Any, dtype: torch.dtype | None, aligned: bool) -> Variant:
    """Describe a compilation. Every argument of a kernel is a tensor above, a size, or a compile-time choice."""
    tensors = {name: f"*{kind}" for kind, names in _TENSORS.items() for name in names}
    if dtype is not None:
        tensors["logits"] = f"*{_LOGITS[dtype]}"
    arguments = [argument for argument in kernel.arg_names if argument not in launch.constexprs]
    whole = {"logits", "candidates", *(("stride_logits_row", "vocab_size") if aligned else ())}
    signature = {argument: tensors.get(argument, "i32") for argument in arguments}
    return launch.variant(name, kernel, signature, tuple(argument for argument in arguments if argument in whole))


def variants() -> Iterator[Variant]:
    """Yield the compilations: logits of every type, aligned rows or not, small to large vocabularies."""
    yield _variant(_philox_launch(), "philox", philox_kernel, None, False)
    yield _variant(_row_launch(False), "rows", row_kernel, None, False)
    yield _variant(_row_launch(True), "rows_trees", row_kernel, None, False)
    for num_tiles in (32, 50, 149, 256):  # 32,000, 50,257, 151,936 and 262,144 tokens
        yield _variant(_pick_launch(num_tiles), f"pick_{num_tiles}_tiles", pick_kernel, None, False)
    for dtype, kind in _LOGITS.items():
        for name, aligned in (("aligned", True), ("odd_vocabulary", False)):
            suffix = f"{kind}_{name}"
            yield _variant(_tile_launch(), f"best_{suffix}", best_kernel, dtype, aligned)
            yield _variant(_tile_launch(), f"draw_{suffix}", draw_kernel, dtype, aligned)
        for num_tiles, aligned in ((32, True), (50, False), (149, True), (256, True)):
            name = f"threshold_{kind}_{num_tiles}_tiles"
            yield _variant(_threshold_launch(num_tiles), name, threshold_kernel, dtype, aligned)
