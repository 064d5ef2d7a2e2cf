"""The inner part of ``sampling``: which scores of a row its filters keep.

A *gap* is the distance of a score from the row's best, ``(best - logit) / temperature``: never negative, and infinite
for a masked token. The gaps of a row sort its tokens, so every filter is a limit on the gap. The search for a limit
narrows two bounds: first it reads the vocabulary; once the candidates between the bounds fit into registers, it
searches these. It does not read blocks of the vocabulary whose tokens are all too far from the best.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_fast.triton_kernels.sampling_noise import gumbel, tile_words

# Addresses and sizes that change with the batch. If they were specialised, the order of sums could change, too.
UNSPECIALISED = (
    *("token_ids", "parents", "cu_seqlens", "penalties", "positions", "seen_ids", "cu_seen", "temperatures", "top_k"),
    *("top_p", "min_p", "seeds", "seen", "row_sequences", "row_positions", "row_best", "row_limit", "row_drawn"),
    *("row_token", "tile_best", "tile_ids", "tile_mass", "tile_drawn", "keys", "tokens", "batch_size", "num_tiles"),
    "stride_seen_row",
)
NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def load_logits(
    logits,  # [vocab_size], of one row
    seen,  # [ceil(vocab_size / 32)] int32, of the same row: bit i % 32 of word i // 32 is set if token i was seen
    ids, inside, penalty,
):  # fmt: skip
    """Return the penalised logits of some tokens in fp64; -inf outside the vocabulary."""
    values = tl.load(logits + ids, mask=inside, other=float("-inf")).to(tl.float64)
    if penalty != 1.0:
        word = tl.load(seen + (ids >> 5), mask=inside, other=0)
        # The product must be rounded before it is subtracted; after an fma, the compiler has nothing to fuse.
        less = tl.where(values < 0, tl.fma(values, penalty, 0.0), values / penalty)
        values = tl.where((word >> (ids & 31)) & 1 == 1, less, values)
    return values


@triton.jit
def _middle(lowest, highest, step):
    """Return a number to try, at least lowest and less than highest. Most limits are small, so gaps double at first."""
    if step < 32:
        middle = tl.minimum(2 * lowest + 1, lowest + (highest - lowest) * 0.5)
    else:  # The bits of such numbers sort as the numbers do, so any bounds meet within 64 more steps.
        low = lowest.to(tl.int64, bitcast=True)
        high = highest.to(tl.int64, bitcast=True)
        middle = (low + ((high - low) >> 1)).to(tl.float64, bitcast=True)
    return tl.where(middle < highest, middle, lowest)


@triton.jit
def _narrow(
    gaps,  # [N] fp64
    weights,  # [N] fp64
    lowest, highest, wanted,
):  # fmt: skip
    """Return the smallest gap from lowest to highest up to which the weights sum to ``wanted``, or highest."""
    step = 0
    while lowest < highest:
        middle = _middle(lowest, highest, step)
        near = gaps <= middle
        enough = tl.sum(tl.where(near, weights, 0.0), axis=0) >= wanted
        nearer = tl.max(tl.where(near, gaps, 0.0), axis=0)
        farther = tl.min(tl.where(near, float("inf"), gaps), axis=0)
        highest = tl.where(enough, nearer, highest)
        lowest = tl.where(enough, lowest, farther)
        step += 1
    return tl.minimum(lowest, highest)


@triton.jit
def _load_gaps(
    logits, seen, first_tile, penalty, best, temperature, vocab_size, TILES: tl.constexpr, TILE: tl.constexpr
):
    """Return the gaps of ``TILES`` tiles, and which of them belong to tokens."""
    ids = first_tile * TILE + tl.arange(0, TILES * TILE)
    inside = ids < vocab_size
    return (best - load_logits(logits, seen, ids, inside, penalty)) / temperature, inside


@triton.jit
def _nearest(tile_best, first_tile, num_tiles, best, temperature, TILES: tl.constexpr):
    tiles = first_tile + tl.arange(0, TILES)
    return (
        best - tl.max(tl.load(tile_best + tiles, mask=tiles < num_tiles, other=float("-inf")), axis=0)
    ) / temperature


@triton.jit
def _measure(
    logits, seen, tile_best, limit, penalty, best, temperature, vocab_size, num_tiles,
    TILES: tl.constexpr, TILE: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """Read the vocabulary; return weight and number of the gaps up to a finite limit, the largest one, and the next.

    A weight is ``exp(score)`` with MASS, else 1.
    """
    weights = tl.zeros([TILES * TILE], tl.float64)
    counts = tl.zeros([TILES * TILE], tl.int32)
    nearer = tl.zeros([TILES * TILE], tl.float64)
    farther = tl.full([TILES * TILE], float("inf"), tl.float64)
    for first_tile in range(0, num_tiles, TILES):
        nearest = _nearest(tile_best, first_tile, num_tiles, best, temperature, TILES)
        if nearest <= limit:
            gaps, _ = _load_gaps(logits, seen, first_tile, penalty, best, temperature, vocab_size, TILES, TILE)
            near = gaps <= limit
            counts += near.to(tl.int32)
            if MASS:
                weights += tl.where(near, tl.exp(-gaps), 0.0)
            nearer = tl.maximum(nearer, tl.where(near, gaps, 0.0))
            farther = tl.minimum(farther, tl.where(near, float("inf"), gaps))
        else:
            farther = tl.minimum(farther, nearest)
    count = tl.sum(counts, axis=0)
    weight = tl.sum(weights, axis=0) if MASS else count.to(tl.float64)
    return weight, count, tl.max(nearer, axis=0), tl.min(farther, axis=0)


@triton.jit
def _gather(
    candidates,  # [CANDIDATES] fp64, scratch
    logits, seen, tile_best, lowest, highest, penalty, best, temperature, vocab_size, num_tiles,
    TILES: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the gaps from lowest to highest, [CANDIDATES]; infinity after the last one."""
    count = 0
    tl.debug_barrier()  # all threads have read the candidates of an earlier search
    for first_tile in range(0, num_tiles, TILES):
        if _nearest(tile_best, first_tile, num_tiles, best, temperature, TILES) <= highest:
            gaps, inside = _load_gaps(logits, seen, first_tile, penalty, best, temperature, vocab_size, TILES, TILE)
            chosen = inside & (gaps >= lowest) & (gaps <= highest)
            places = count + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
            tl.store(candidates + places, gaps, mask=chosen & (places < CANDIDATES))
            count += tl.sum(chosen.to(tl.int32), axis=0)
    tl.debug_barrier()  # other threads read what each thread has stored
    places = tl.arange(0, CANDIDATES)
    return tl.load(candidates + places, mask=places < count, other=float("inf"))


@triton.jit
def _search(
    candidates, logits, seen, tile_best, highest, below_highest, wanted, penalty, best, temperature, vocab_size,
    num_tiles, TILES: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """Return the smallest gap up to which the weights sum to ``wanted``; it must not be above highest.

    ``below_highest`` gaps are at most ``highest``; ``below`` are less than ``lowest``, and weigh ``weight_below``.
    """
    lowest = tl.full((), 0.0, tl.float64)
    weight_below = tl.full((), 0.0, tl.float64)
    below = 0
    step = 0
    while (lowest < highest) & (below_highest - below > CANDIDATES):
        middle = _middle(lowest, highest, step)
        weight, count, nearer, farther = _measure(
            logits, seen, tile_best, middle, penalty, best, temperature, vocab_size, num_tiles, TILES, TILE, MASS
        )
        enough = weight >= wanted
        highest = tl.where(enough, nearer, highest)
        below_highest = tl.where(enough, count, below_highest)
        lowest = tl.where(enough, lowest, farther)
        below = tl.where(enough, below, count)
        weight_below = tl.where(enough, weight_below, weight)
        step += 1
    if lowest < highest:
        gaps = _gather(
            candidates, logits, seen, tile_best, lowest, highest, penalty, best, temperature, vocab_size, num_tiles,
            TILES, TILE, CANDIDATES,
        )  # fmt: skip
        weights = tl.exp(-gaps) if MASS else tl.full([CANDIDATES], 1.0, tl.float64)
        lowest = _narrow(gaps, weights, lowest, highest, wanted - weight_below)
    return tl.minimum(lowest, highest)


@triton.jit
def _largest_kept_gap(
    candidates,  # [CANDIDATES] fp64, scratch
    logits,  # [vocab_size]
    seen,  # [ceil(vocab_size / 32)] int32
    tile_best,  # [num_tiles] fp64
    tile_mass,  # [num_tiles] fp64, only if top_p < 1
    top_k, top_p, min_p, penalty, best, temperature, vocab_size, num_tiles,
    TILES: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """Return the limit of a row's filters on its gaps; infinite if they keep all tokens."""
    tiles = tl.arange(0, BLOCK_TILES)
    tile_gaps = (best - tl.load(tile_best + tiles, mask=tiles < num_tiles, other=float("-inf"))) / temperature
    nothing = tl.full((), 0.0, tl.float64)
    limit = tl.full((), float("inf"), tl.float64)
    count = tl.full((), vocab_size, tl.int32)
    if (top_k > 0) & (top_k < vocab_size):
        # As many tiles as that have at least one token with such a gap.
        limit = _narrow(tile_gaps, tl.full([BLOCK_TILES], 1.0, tl.float64), nothing, limit, top_k)
        if limit < float("inf"):
            _, count, _, _ = _measure(
                logits, seen, tile_best, limit, penalty, best, temperature, vocab_size, num_tiles, TILES, TILE, False
            )
        limit = _search(
            candidates, logits, seen, tile_best, limit, count, top_k.to(tl.float64), penalty, best, temperature,
            vocab_size, num_tiles, TILES, TILE, CANDIDATES, MASS=False,
        )  # fmt: skip
    if top_p < 1:
        if limit < float("inf"):
            total, count, _, _ = _measure(
                logits, seen, tile_best, limit, penalty, best, temperature, vocab_size, num_tiles, TILES, TILE, True
            )
        else:
            count = tl.full((), vocab_size, tl.int32)
            masses = tl.load(tile_mass + tiles, mask=tiles < num_tiles, other=0.0)
            total = tl.sum(masses * tl.exp(-tile_gaps), axis=0)
        limit = _search(
            candidates, logits, seen, tile_best, limit, count, top_p * total, penalty, best, temperature,
            vocab_size, num_tiles, TILES, TILE, CANDIDATES, MASS=True,
        )  # fmt: skip
    if min_p > 0:
        limit = tl.minimum(limit, -tl.log(min_p))
    return limit


@triton.jit(do_not_specialize=UNSPECIALISED)
def threshold_kernel(
    logits,  # [T, vocab_size], the last axis contiguous
    seen,  # [T, words] int32
    row_sequences,  # [T] int32
    row_positions,  # [T] int64
    temperatures,  # [B] fp64
    top_k,  # [B] int32
    top_p,  # [B] fp64
    min_p,  # [B] fp64
    penalties,  # [B] fp64
    seeds,  # [B] int64
    tile_best,  # [T, num_tiles] fp64
    tile_ids,  # [T, num_tiles] int32
    tile_mass,  # [T, num_tiles] fp64
    candidates,  # [T, CANDIDATES] fp64, scratch
    row_best,  # [T] fp64, out: the largest penalised logit
    row_limit,  # [T] fp64, out: the largest gap that the filters keep
    row_drawn,  # [T] fp64, out: sum of score and noise of the likeliest token; infinite if nothing is drawn
    row_token,  # [T] int32, out: the likeliest token, -1 if the row holds a NaN
    stride_logits_row,
    stride_seen_row,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Combine a row's tiles, and find what its filters keep and what sum a token must reach to win."""
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(row_sequences + row)
    tiles = tl.arange(0, BLOCK_TILES)
    bests = tl.load(tile_best + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    ids = tl.load(tile_ids + row * num_tiles + tiles, mask=tiles < num_tiles, other=NO_ID)
    is_nan = ~(tl.abs(bests) <= float("inf"))
    holds_nan = tl.max(is_nan.to(tl.int32), axis=0) == 1
    best = tl.max(tl.where(is_nan, float("-inf"), bests), axis=0)
    token = tl.where(holds_nan, -1, tl.min(tl.where(bests == best, ids, NO_ID), axis=0))
    temperature = tl.load(temperatures + sequence)
    limit = tl.full((), 0.0, tl.float64)
    drawn = tl.full((), float("inf"), tl.float64)
    if (token >= 0) & (temperature > 0) & (tl.abs(best) < float("inf")):
        limit = _largest_kept_gap(
            candidates + row * CANDIDATES, logits + row * stride_logits_row, seen + row * stride_seen_row,
            tile_best + row * num_tiles, tile_mass + row * num_tiles, tl.load(top_k + sequence),
            tl.load(top_p + sequence), tl.load(min_p + sequence), tl.load(penalties + sequence), best, temperature,
            vocab_size, num_tiles, TILES, TILE, CANDIDATES, BLOCK_TILES,
        )  # fmt: skip
        words = tile_words(tl.load(seeds + sequence), tl.load(row_positions + row), token // TILE, TILE)
        drawn = tl.max(tl.where(tl.arange(0, TILE) == token % TILE, gumbel(words), float("-inf")), axis=0)
    tl.store(row_best + row, best)
    tl.store(row_limit + row, limit)
    tl.store(row_drawn + row, drawn)
    tl.store(row_token + row, token)
