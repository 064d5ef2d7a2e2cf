"""The random numbers of ``sampling``: Gumbel noise of Philox4x32-10 words, keyed by seed, position and token id."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["counters", "seed", "words", "size"])
def philox_kernel(
    counters,  # [4, size] int64 that hold 32-bit words
    seed,  # [1] int64, the key
    words,  # [4, size] int64, out
    size,
    BLOCK: tl.constexpr,
):
    """Write the random words of given counters, so that a test can compare them with published ones."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    c0 = tl.load(counters + places, mask=inside, other=0).to(tl.uint32)
    c1 = tl.load(counters + size + places, mask=inside, other=0).to(tl.uint32)
    c2 = tl.load(counters + 2 * size + places, mask=inside, other=0).to(tl.uint32)
    c3 = tl.load(counters + 3 * size + places, mask=inside, other=0).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed), c0, c1, c2, c3)
    tl.store(words + places, w0.to(tl.int64), mask=inside)
    tl.store(words + size + places, w1.to(tl.int64), mask=inside)
    tl.store(words + 2 * size + places, w2.to(tl.int64), mask=inside)
    tl.store(words + 3 * size + places, w3.to(tl.int64), mask=inside)


@triton.jit
def tile_words(seed, position, tile, TILE: tl.constexpr):
    """Return the random word of every token of a tile, [TILE] uint32."""
    c0 = (tile * (TILE // 4) + tl.arange(0, TILE // 4)).to(tl.uint32)
    c1 = (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zeros = tl.zeros([TILE // 4], tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, zeros + c1, zeros + c2, zeros)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def gumbel(words):
    """Return the noise of random words, in fp64."""
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return -tl.log(-tl.log(uniform))
