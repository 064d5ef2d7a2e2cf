"""The op ``noise_words``: the random words from which the noise of a few tokens is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.ops.checks import expect, expect_tensor
from specdec_fast.ops.registry import Op
from specdec_fast.ops.sampling import WORD_MASK, philox4x32


def noise_words(token_ids: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the random word of every token id: ``[N, M]`` int64, of 32 bits; ``gumbel`` makes noise of it.

    The words are those that ``gumbel_noise`` computes for the whole vocabulary, for ``[N, M]`` int64 token ids from 0
    on, ``[N]`` int64 seeds of the requests, and the ``[N]`` int64 positions of the tokens.
    """
    seeds = seeds[:, None]
    positions = positions[:, None]
    zero = torch.zeros_like(token_ids)
    counter = (token_ids // 4, zero + (positions & WORD_MASK), zero + ((positions >> 32) & WORD_MASK), zero)
    words = torch.stack(philox4x32(counter, (seeds & WORD_MASK, (seeds >> 32) & WORD_MASK)))
    return words.gather(0, (token_ids % 4)[None])[0]


def _check(token_ids: Tensor, seeds: Tensor, positions: Tensor) -> None:
    device = token_ids.device
    expect_tensor("token_ids", token_ids, (None, None), (torch.int64,), device)
    rows = token_ids.shape[0]
    expect_tensor("seeds", seeds, (rows,), (torch.int64,), device)
    expect_tensor("positions", positions, (rows,), (torch.int64,), device)
    expect(
        all(tensor.is_contiguous() for tensor in (token_ids, seeds, positions)),
        "token_ids, seeds and positions must be contiguous.",
    )


OP = Op(
    name="noise_words",
    implementations={
        "torch": "specdec_fast.ops.noise_words:noise_words",
        "cpp": "specdec_fast.ops.cpp:noise_words",
        "triton": "specdec_fast.triton_kernels.noise_words:noise_words",
    },
    check=_check,
)
