"""The op ``noise_words``: the random words from which the noise of a few tokens is computed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_fast.ops.checks import expect, expect_tensor
from specdec_fast.ops.registry import Case, Op
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


def _make(
    shape: tuple[int, int], largest_id: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Make random seeds of 64 bits, and positions on both sides of 32 bits; ``dtype`` has no effect."""
    seeds = torch.randint(-(2**63), 2**63 - 1, shape[:1], generator=generator, device="cpu")
    positions = torch.randint(0, 2**34, shape[:1], generator=generator, device="cpu")
    token_ids = torch.randint(0, largest_id + 1, shape, generator=generator, device="cpu")
    return {"token_ids": token_ids.to(device), "seeds": seeds.to(device), "positions": positions.to(device)}


def _cases() -> Iterator[Case]:
    yield Case("level", "a level of trees: some nodes, some ranks", partial(_make, (12, 10), 151_935))
    yield Case("one", "one token of one row", partial(_make, (1, 1), 31_999))
    yield Case("wide", "more tokens than a block of the Triton kernel", partial(_make, (3, 300), 4_000))
    yield Case("no_tokens", "rows without tokens", partial(_make, (4, 0), 9))
    yield Case("no_rows", "no rows", partial(_make, (0, 8), 9))


def _benchmarks() -> Iterator[Case]:
    yield Case("level", "batch 8, frontiers of 8 nodes, 8 ranks", partial(_make, (64, 8), 151_935))


def _bytes_moved(token_ids: Tensor, seeds: Tensor, positions: Tensor) -> int:
    return 8 * (2 * token_ids.numel() + seeds.numel() + positions.numel())


OP = Op(
    name="noise_words",
    implementations={
        "torch": "specdec_fast.ops.noise_words:noise_words",
        "cpp": "specdec_fast.ops.cpp:noise_words",
        "triton": "specdec_fast.triton_kernels.noise_words:noise_words",
    },
    check=_check,
    cases=_cases,
    benchmarks=_benchmarks,
    bytes_moved=_bytes_moved,
)
