"""Oracle of ``noise_words``: the random words from which the noise of a few tokens is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.oracle.sampling import WORD_MASK, philox4x32


def noise_words(token_ids: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the random word of every token id: ``[N, M]`` int64, of 32 bits; ``gumbel`` makes noise of it.

    The words are those that ``gumbel_noise`` computes for the whole vocabulary.

    Args:
        token_ids: ``[N, M]`` int64, from 0 on.
        seeds: ``[N]`` int64, of the requests.
        positions: ``[N]`` int64, at which the tokens would stand.

    """
    seeds, positions, zero = seeds[:, None], positions[:, None], torch.zeros_like(token_ids)
    counter = (token_ids // 4, zero + (positions & WORD_MASK), zero + ((positions >> 32) & WORD_MASK), zero)
    words = torch.stack(philox4x32(counter, (seeds & WORD_MASK, (seeds >> 32) & WORD_MASK)))
    return words.gather(0, (token_ids % 4)[None])[0]
