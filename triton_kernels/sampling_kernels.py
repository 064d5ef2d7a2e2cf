"""The kernels of ``sampling`` that run before and after a row's filters are known."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_fast.triton_kernels.sampling_noise import gumbel, tile_words
from specdec_fast.triton_kernels.sampling_threshold import NO_ID, UNSPECIALISED, load_logits

_INVALID = tl.constexpr(0x7FFFFFFF)  # verify_chain's second kernel recognises by it a row that holds a NaN
_LARGEST_NOISE = tl.constexpr(22.88)  # above the noise of the largest word, log(2^33) = 22.87


@triton.jit
def _mark(seen, ids, inside, vocab_size):
    """Set the bits of some tokens in a row's bitmap; several threads may share a word."""
    valid = inside & (ids >= 0) & (ids < vocab_size)
    ids = tl.where(valid, ids, 0)
    bits = tl.full(ids.shape, 1, tl.int32) << (ids & 31).to(tl.int32)
    tl.atomic_or(seen + (ids >> 5), bits, mask=valid, sem="relaxed")


@triton.jit(do_not_specialize=(*UNSPECIALISED, "vocab_size"))
def row_kernel(
    token_ids,  # [T] int64
    parents,  # [T] int32, counted from the sequence's first row; read if TREE
    cu_seqlens,  # [B + 1] int32
    penalties,  # [B] fp64
    positions,  # [B] int64
    seen_ids,  # [N] int64
    cu_seen,  # [B + 1] int32
    row_sequences,  # [T] int32, out
    row_positions,  # [T] int64, out: the position that the row's token will have
    seen,  # [T, words] int32, zeros: bit i % 32 of word i // 32 is set if token i was seen; only with a penalty
    batch_size,
    vocab_size,
    stride_seen_row,
    SEQUENCES: tl.constexpr,
    BLOCK: tl.constexpr,
    TREE: tl.constexpr,
):
    """Find the sequence and the position of a row, and mark the tokens to which its penalty applies."""
    row = tl.program_id(0).to(tl.int64)
    sequence = 0
    for first in range(0, batch_size, SEQUENCES):
        sequences = first + tl.arange(0, SEQUENCES)
        stops = tl.load(cu_seqlens + sequences + 1, mask=sequences < batch_size, other=NO_ID)
        sequence += tl.sum((stops <= row).to(tl.int32), axis=0)
    start = tl.load(cu_seqlens + sequence)
    has_penalty = tl.load(penalties + sequence) != 1.0
    depth = row - start
    if TREE:
        depth = tl.full((), 0, tl.int64)
        ancestor = row
        while ancestor > start:
            if has_penalty:
                _mark(seen + row * stride_seen_row, tl.load(token_ids + ancestor), True, vocab_size)
            ancestor = start + tl.load(parents + ancestor).to(tl.int64)
            depth = depth + 1
        if has_penalty:
            _mark(seen + row * stride_seen_row, tl.load(token_ids + start), True, vocab_size)
    tl.store(row_sequences + row, sequence)
    tl.store(row_positions + row, tl.load(positions + sequence) + depth)
    if has_penalty:
        seen_start = tl.load(cu_seen + sequence)
        seen_stop = tl.load(cu_seen + sequence + 1)
        for first in range(seen_start, seen_stop, BLOCK):
            places = first + tl.arange(0, BLOCK)
            ids = tl.load(seen_ids + places, mask=places < seen_stop, other=-1)
            _mark(seen + row * stride_seen_row, ids, places < seen_stop, vocab_size)
        if not TREE:
            for first in range(start, row.to(tl.int32) + 1, BLOCK):
                places = first + tl.arange(0, BLOCK)
                ids = tl.load(token_ids + places, mask=places <= row, other=-1)
                _mark(seen + row * stride_seen_row, ids, places <= row, vocab_size)


@triton.jit(do_not_specialize=UNSPECIALISED)
def best_kernel(
    logits,  # [T, vocab_size], the last axis contiguous
    seen,  # [T, words] int32
    row_sequences,  # [T] int32
    penalties,  # [B] fp64
    temperatures,  # [B] fp64
    top_p,  # [B] fp64
    tile_best,  # [T, num_tiles] fp64, out: the largest penalised logit, NaN if the tile holds one
    tile_ids,  # [T, num_tiles] int32, out: the lowest token id that has it
    tile_mass,  # [T, num_tiles] fp64, out, only with top_p: sum of exp((logit - largest) / temperature)
    stride_logits_row,
    stride_seen_row,
    vocab_size,
    TILE: tl.constexpr,
):
    """Find the best token of a tile, and with ``top_p`` the tile's mass."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    sequence = tl.load(row_sequences + row)
    ids = tile * TILE + tl.arange(0, TILE)
    penalty = tl.load(penalties + sequence)
    values = load_logits(logits + row * stride_logits_row, seen + row * stride_seen_row, ids, ids < vocab_size, penalty)
    is_nan = ~(tl.abs(values) <= float("inf"))
    holds_nan = tl.max(is_nan.to(tl.int32), axis=0) == 1
    values = tl.where(is_nan, float("-inf"), values)
    largest = tl.max(values, axis=0)
    place = row * tl.num_programs(1) + tile
    tl.store(tile_best + place, tl.where(holds_nan, float("nan"), largest))
    # A masked place may equal -inf, too, but its id is above those inside, so it is never the lowest.
    tl.store(tile_ids + place, tl.min(tl.where(values == largest, ids, NO_ID), axis=0))
    temperature = tl.load(temperatures + sequence)
    if (tl.load(top_p + sequence) < 1) & (temperature > 0):
        scores = (values - tl.where(tl.abs(largest) < float("inf"), largest, 0.0)) / temperature
        tl.store(tile_mass + place, tl.sum(tl.exp(scores), axis=0))


@triton.jit
def _smallest_word(wanted):
    """Return, as fp64, the smallest word whose noise reaches ``wanted``, or a slightly smaller word."""
    return tl.exp(-tl.exp(-wanted)) * 4294967296.0 - 2.0


@triton.jit(do_not_specialize=UNSPECIALISED)
def draw_kernel(
    logits,  # [T, vocab_size], the last axis contiguous
    seen,  # [T, words] int32
    row_sequences,  # [T] int32
    row_positions,  # [T] int64
    temperatures,  # [B] fp64
    penalties,  # [B] fp64
    seeds,  # [B] int64
    tile_best,  # [T, num_tiles] fp64
    row_best,  # [T] fp64
    row_limit,  # [T] fp64
    row_drawn,  # [T] fp64
    tile_drawn,  # [T, num_tiles] fp64, out: the largest sum of a kept score and its noise, -inf if none could win
    tile_ids,  # [T, num_tiles] int32, out: the lowest token id that has it
    stride_logits_row,
    stride_seen_row,
    vocab_size,
    TILE: tl.constexpr,
):
    """Draw from a tile. A tile is skipped if none of its tokens can reach the sum of the likeliest token."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    place = row * tl.num_programs(1) + tile
    to_beat = tl.load(row_drawn + row)
    drawn = tl.full((), float("-inf"), tl.float64)
    token = tl.full((), NO_ID, tl.int32)
    if to_beat < float("inf"):
        sequence = tl.load(row_sequences + row)
        temperature = tl.load(temperatures + sequence)
        best = tl.load(row_best + row)
        limit = tl.load(row_limit + row)
        nearest = (best - tl.load(tile_best + place)) / temperature
        if (nearest <= limit) & (_LARGEST_NOISE - nearest >= to_beat):
            words = tile_words(tl.load(seeds + sequence), tl.load(row_positions + row), tile, TILE)
            # Usually no token has the noise that even the tile's best token needs; then no logarithm is computed.
            if tl.max(words, axis=0).to(tl.float64) >= _smallest_word(to_beat + nearest):
                ids = tile * TILE + tl.arange(0, TILE)
                inside = ids < vocab_size
                row_logits = logits + row * stride_logits_row
                row_seen = seen + row * stride_seen_row
                values = load_logits(row_logits, row_seen, ids, inside, tl.load(penalties + sequence))
                gaps = (best - values) / temperature
                sums = tl.where(inside & (gaps <= limit), gumbel(words) - gaps, float("-inf"))
                drawn = tl.max(sums, axis=0)
                token = tl.min(tl.where(sums == drawn, ids, NO_ID), axis=0)
    tl.store(tile_drawn + place, drawn)
    tl.store(tile_ids + place, token)


@triton.jit(do_not_specialize=UNSPECIALISED)
def pick_kernel(
    tile_drawn,  # [T, num_tiles] fp64
    tile_ids,  # [T, num_tiles] int32
    row_drawn,  # [T] fp64
    row_token,  # [T] int32
    keys,  # [T] int32, out: _INVALID if the row holds a NaN, else 0
    tokens,  # [T] int32, out
    num_tiles,
    BLOCK_TILES: tl.constexpr,
):
    """Combine a row's tiles and its likeliest token: the largest sum wins, and among equals the lowest id."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK_TILES)
    drawn = tl.load(tile_drawn + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    ids = tl.load(tile_ids + row * num_tiles + tiles, mask=tiles < num_tiles, other=NO_ID)
    likeliest = tl.load(row_token + row)
    highest = tl.load(row_drawn + row)
    largest = tl.max(drawn, axis=0)
    lowest = tl.min(tl.where(drawn == largest, ids, NO_ID), axis=0)
    token = tl.where(largest > highest, lowest, likeliest)
    token = tl.where(largest == highest, tl.minimum(lowest, likeliest), token)
    tl.store(keys + row, tl.where(likeliest < 0, _INVALID, 0))
    tl.store(tokens + row, token)
