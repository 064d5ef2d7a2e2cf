"""Declaration of ``verify_chain``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_fast.ops.checks import FLOATS, expect, expect_offsets, expect_tensor
from specdec_fast.ops.registry import Case, Op


def _check(logits: Tensor, token_ids: Tensor, cu_seqlens: Tensor) -> None:
    rows, device = logits.shape[0], logits.device
    expect_tensor("logits", logits, (None, None), FLOATS, device)
    expect_tensor("token_ids", token_ids, (rows,), (torch.int64,), device)
    expect_tensor("cu_seqlens", cu_seqlens, (None,), (torch.int32,), device)
    expect(logits.shape[1] > 0, "logits has an empty vocabulary.")
    expect(token_ids.is_contiguous() and cu_seqlens.is_contiguous(), "token_ids and cu_seqlens must be contiguous.")
    expect_offsets("cu_seqlens", cu_seqlens, rows, strictly=True)


def _make(
    counts: list[int],
    vocab_size: int,
    special: float | None,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Random logits whose rows partly agree with what is fed; ``special`` is scattered over one in 64."""
    rows = sum(counts)
    # few distinct values, so that ties at the maximum are the rule
    logits = torch.randint(-40, 40, (rows, vocab_size), generator=generator).to(dtype) / 4
    if special == 0:
        # so that a few zeros of both signs are the largest, and the first of them as often the one as the other
        logits = torch.where(torch.rand(rows, vocab_size, generator=generator) < 1 / 64, 0, -1 - logits.abs())
    if special is not None:
        hit = torch.rand(rows, vocab_size, generator=generator) < 1 / 64
        logits = logits.masked_fill(hit, special)
    best = logits.argmax(dim=-1).roll(1)  # the token that accepts, for every row but a sequence's first
    guess = torch.randint(0, vocab_size, (rows,), generator=generator)
    token_ids = torch.where(torch.rand(rows, generator=generator) < 0.7, best, guess)
    cu_seqlens = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
    return {
        "logits": logits.to(device),
        "token_ids": token_ids.to(device),
        "cu_seqlens": cu_seqlens.to(device),
    }


def _cases() -> Iterator[Case]:
    grid: tuple[tuple[str, str, list[int], int, float | None], ...] = (
        ("plain_decoding", "one row per sequence, nothing to accept", [1] * 8, 1000, None),
        ("ragged", "a different number of draft tokens per sequence", [1, 6, 2, 9, 4], 1024, None),
        ("no_sequences", "an empty batch", [], 1024, None),
        ("tiny_vocabulary", "less than one vector; ties everywhere", [4, 4], 2, None),
        ("odd_vocabulary", "a tail after the last full vector and block", [3, 3], 4097, None),
        ("large_vocabulary", "several blocks, threads at work", [6] * 8, 151_936, None),
        ("nan", "NaN rows must be told, not chosen", [5, 5, 5], 97, float("nan")),
        ("positive_infinity", "the first infinity wins", [5, 5], 130, float("inf")),
        ("negative_infinity", "masked tokens never win", [5, 5], 130, float("-inf")),
        ("negative_zero", "-0 and +0 are equal", [5, 5], 130, -0.0),
    )
    for name, why, counts, vocab_size, special in grid:
        yield Case(name, why, partial(_make, counts, vocab_size, special))


def _benchmarks() -> Iterator[Case]:
    yield Case("verify", "batch 8, K 5, the vocabulary of Qwen3", partial(_make, [6] * 8, 151_936, None))


def _bytes_moved(logits: Tensor, token_ids: Tensor, cu_seqlens: Tensor) -> int:
    return logits.numel() * logits.element_size()


OP = Op(
    name="verify_chain",
    implementations={
        "torch": "specdec_fast.oracle.ops.verify_chain:verify_chain",
        "cpp": "specdec_fast.ops.cpp:verify_chain",
        "triton": "specdec_fast.triton_kernels.verify_chain:verify_chain",
    },
    check=_check,
    cases=_cases,
    benchmarks=_benchmarks,
    bytes_moved=_bytes_moved,
)
