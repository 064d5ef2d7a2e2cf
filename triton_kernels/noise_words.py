"""``noise_words``: the random words from which the noise of a few tokens is computed.

Bytes: every token id is read and every word written once. Grid: (rows, blocks of a row's tokens). A program computes
all four words of each token's counter and keeps one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.triton_kernels.variant import Launch, Variant

_LAUNCH = Launch({"BLOCK": 32}, num_warps=1)  # usually a node has fewer ranks


@triton.jit(do_not_specialize=["num_tokens"])
def _noise_words_kernel(
    token_ids,  # [N, num_tokens] int64, contiguous
    seeds,  # [N] int64
    positions,  # [N] int64
    words,  # [N, num_tokens] int64, out
    num_tokens,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_tokens
    places = row * num_tokens + columns
    token = tl.load(token_ids + places, mask=inside, other=0)
    position = tl.load(positions + row)
    c0 = (token // 4).to(tl.uint32)
    zeros = tl.zeros([BLOCK], tl.uint32)
    c1 = (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seeds + row), c0, zeros + c1, zeros + c2, zeros)
    low = tl.where(token % 2 == 0, w0, w1)
    high = tl.where(token % 2 == 0, w2, w3)
    tl.store(words + places, tl.where(token % 4 < 2, low, high).to(tl.int64), mask=inside)


def noise_words(token_ids: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Launch the kernel; the contract is the oracle's."""
    words = torch.empty_like(token_ids)
    num_rows, num_tokens = token_ids.shape
    if words.numel():
        grid = (num_rows, triton.cdiv(num_tokens, _LAUNCH.constexprs["BLOCK"]))
        _noise_words_kernel[grid](token_ids, seeds, positions, words, num_tokens, **_LAUNCH.options)
    return words


def variants() -> Iterator[Variant]:
    """Yield the only compilation."""
    arrays = ("token_ids", "seeds", "positions", "words")
    signature = dict.fromkeys(arrays, "*i64") | {"num_tokens": "i32"}
    yield _LAUNCH.variant("tokens", _noise_words_kernel, signature, arrays)
