"""Arguments of ``selective_scan_rows_``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.op_cases.case import Case, OpCases
from bench.op_cases.recurrent_batches import MIXED, Shape, draw_batch, num_kept_rows
from specdec_fast.batch.recurrent_batch import RecurrentBatch


def _draw(
    sequences: Shape,
    shape: tuple[int, int, int],
    has_skip: bool,
    generator: torch.Generator,
    dtype: torch.dtype,
    by_channel: bool = False,
) -> dict[str, Any]:
    """Draw normal inputs and time steps as models compute them.

    ``shape``: channels, state_dim and groups. With ``by_channel``, the rows of a channel are contiguous.
    """
    channels, state_dim, num_groups = shape
    num_slots = len(sequences) + 2
    batch = draw_batch(sequences, num_slots, generator)
    num_rows = int(batch.cu_seqlens[-1])
    normal = partial(torch.randn, generator=generator, device="cpu")
    width = num_groups * state_dim
    projected = normal(num_rows, 4 + 2 * width).to(dtype)
    widths = (channels, channels, width)
    own, steps, keys = (normal(num_slots, 8, size) for size in widths)
    kept = torch.cat([own, torch.nn.functional.softplus(steps - 2), keys], dim=2)
    scales = torch.arange(1, state_dim + 1, device="cpu").float().expand(channels, -1)
    x = normal(channels, num_rows).T if by_channel else normal(num_rows, channels)
    return {
        "x": x.to(dtype),
        "dt": torch.nn.functional.softplus(normal(num_rows, channels) - 2),
        "A": -(scales * (1 + 0.1 * normal(channels, state_dim))),
        "B": projected[:, 4 : 4 + width].unflatten(1, (num_groups, state_dim)),
        "C": projected[:, 4 + width :].unflatten(1, (num_groups, state_dim)),
        "skip": normal(channels).contiguous() if has_skip else None,
        "pools": (normal(num_slots, state_dim, channels).contiguous(), kept),
        "batch": batch,
    }


def _cases() -> Iterator[Case]:
    grid: tuple[tuple[str, str, Shape, tuple[int, int, int], bool], ...] = (
        ("mixed", "chunks, decoding and verifications in one batch", MIXED, (24, 16, 1), True),
        ("groups", "heads with B and C of their own, as in Zamba", MIXED, (40, 8, 2), True),
        ("odd_sizes", "no multiple of a vector", MIXED[3:6], (67, 5, 1), False),
        ("wide", "several blocks of channels", MIXED[3:6], (200, 16, 1), True),
        ("chunk", "a longer prompt", ((0, 0, 40, 40), (3, 0, 2, 2)), (16, 4, 1), True),
        ("empty", "no sequences", (), (16, 16, 1), True),
    )
    for name, why, sequences, shape, has_skip in grid:
        yield Case(name, why, partial(_draw, sequences, shape, has_skip))
    why = "inputs as a convolution over time returns them"
    yield Case("by_channel", why, partial(_draw, MIXED[3:6], (24, 4, 1), True, by_channel=True))


def _benchmarks() -> Iterator[Case]:
    falcon_mamba = (8192, 16, 1)  # channels, state_dim and groups of Falcon-Mamba-7B: one layer
    grid = (
        ("decode", "plain decoding, batch 8", ((900, 0, 1, 1),) * 8),
        ("verify", "batch 8, K 5, 2 accepted", ((900, 2, 3, 6),) * 8),
        ("prefill", "a prompt of 512 tokens", ((0, 0, 512, 512),)),
    )
    for name, why, sequences in grid:
        yield Case(name, why, partial(_draw, sequences, falcon_mamba, True))


def _bytes_moved(
    x: Tensor, A: Tensor, B: Tensor, pools: tuple[Tensor, Tensor], batch: RecurrentBatch, **others: Any
) -> int:
    states, kept = pools
    inputs = 2 * (x.numel() + B.numel()) * x.element_size() + 4 * (x.numel() + A.numel())
    return inputs + 4 * (2 * batch.slots.numel() * states[0].numel() + num_kept_rows(batch) * kept.shape[2])


OP_CASES = OpCases(cases=tuple(_cases()), benchmarks=tuple(_benchmarks()), bytes_moved=_bytes_moved)
