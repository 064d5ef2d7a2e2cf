"""Arguments of ``conv_rows_``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.op_cases.case import Case, OpCases
from bench.op_cases.recurrent_batches import MIXED, Shape, draw_batch
from specdec_fast.batch.recurrent_batch import RecurrentBatch


def _draw(
    sequences: Shape,
    shape: tuple[int, int],
    has_bias: bool,
    activation: str | None,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Draw normal numbers; ``shape``: channels and kernel. The rows are columns of a wider projection."""
    channels, kernel = shape
    batch = draw_batch(sequences, len(sequences) + 2, generator)
    drafts = max((replayed + rows - stored for _, replayed, stored, rows in sequences), default=0)
    num_rows = int(batch.cu_seqlens[-1])
    normal = partial(torch.randn, generator=generator, device="cpu")
    projected = normal(num_rows, channels + 8).to(dtype)
    return {
        "rows": projected[:, 8:],
        "state": normal(len(sequences) + 2, kernel + drafts, channels).contiguous().to(dtype),
        "weight": normal(channels, kernel).contiguous().to(dtype),
        "bias": normal(channels).contiguous().to(dtype) if has_bias else None,
        "activation": activation,
        "batch": batch,
    }


def _cases() -> Iterator[Case]:
    odd = tuple((length, 0, rows, rows) for length, rows in ((0, 17), (1, 1), (2, 40), (3, 2)))
    grid: tuple[tuple[str, str, Shape, tuple[int, int], bool, str | None], ...] = (
        ("mixed", "chunks, decoding and verifications in one batch", MIXED, (24, 4), True, "silu"),
        ("plain", "no bias and no activation", MIXED, (16, 3), False, None),
        ("odd_channels", "channels that are no multiple of a vector", MIXED, (67, 4), True, "silu"),
        ("wide", "several blocks of channels, and a wide kernel", MIXED[3:6], (150, 7), False, "silu"),
        ("chunks", "more rows than places; fewer positions than the kernel", odd, (16, 4), True, None),
        ("kernel_of_one", "no input but the row's own", MIXED, (16, 1), True, "silu"),
        ("empty", "no sequences", (), (16, 4), True, "silu"),
    )
    for name, why, sequences, shape, has_bias, activation in grid:
        yield Case(name, why, partial(_draw, sequences, shape, has_bias, activation))


def _benchmarks() -> Iterator[Case]:
    qwen3_5 = (6144, 4)  # channels and kernel of Qwen3.5-0.8B: one layer
    grid = (
        ("decode", "plain decoding, batch 8", ((900, 0, 1, 1),) * 8),
        ("verify", "batch 8, K 5, 3 accepted", ((900, 3, 4, 6),) * 8),
        ("prefill", "a prompt of 512 tokens", ((0, 0, 512, 512),)),
    )
    for name, why, sequences in grid:
        yield Case(name, why, partial(_draw, sequences, qwen3_5, False, "silu"))


def _bytes_moved(rows: Tensor, weight: Tensor, batch: RecurrentBatch, **others: Any) -> int:
    num_rows, channels = rows.shape
    inputs = 3 * num_rows + batch.slots.numel() * (weight.shape[1] - 1)  # rows are read, written and stored
    return (inputs * channels + weight.numel()) * rows.element_size()


OP_CASES = OpCases(cases=tuple(_cases()), benchmarks=tuple(_benchmarks()), bytes_moved=_bytes_moved)
