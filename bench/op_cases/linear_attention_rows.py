"""Arguments of ``linear_attention_rows_``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.op_cases.case import Case, OpCases
from bench.op_cases.recurrent_batches import MIXED, Shape, draw_batch, num_kept_rows
from specdec_fast.batch.recurrent_batch import LinearAttentionParams, RecurrentBatch


@dataclass(frozen=True)
class _Shape:
    sequences: Shape
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 16
    value_dim: int = 24
    decay_per_channel: bool = False
    has_beta: bool = True
    delta_rule: bool = True
    normalised: bool = True
    has_skip: bool = False


def _draw(shape: _Shape, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    """Draw normal queries, keys and values, slices of one projection, and decays as models compute them."""
    batch = draw_batch(shape.sequences, len(shape.sequences) + 2, generator)
    num_rows = int(batch.cu_seqlens[-1])
    num_slots = len(shape.sequences) + 2
    normal = partial(torch.randn, generator=generator, device="cpu")
    widths = (shape.key_heads * shape.key_dim,) * 2 + (shape.value_heads * shape.value_dim,)
    query, key, value = normal(num_rows, sum(widths)).to(dtype).split(widths, dim=1)
    decays = (num_rows, shape.value_heads, *((shape.key_dim,) if shape.decay_per_channel else ()))
    log_decay = -torch.nn.functional.softplus(normal(*decays) - 1)
    beta = torch.sigmoid(normal(num_rows, shape.value_heads)) if shape.has_beta else None
    num_decays = log_decay.shape[1:].numel() + (shape.value_heads if shape.has_beta else 0)
    kept = torch.cat([normal(num_slots, 8, sum(widths[1:])), -normal(num_slots, 8, num_decays).sigmoid()], dim=2)
    states = normal(num_slots, shape.value_heads, shape.key_dim, shape.value_dim)
    return {
        "query": query.unflatten(1, (shape.key_heads, shape.key_dim)),
        "key": key.unflatten(1, (shape.key_heads, shape.key_dim)),
        "value": value.unflatten(1, (shape.value_heads, shape.value_dim)),
        "log_decay": log_decay,
        "beta": None if beta is None else beta,
        "pools": (states.contiguous(), kept),
        "batch": batch,
        "params": LinearAttentionParams(
            scale=shape.key_dim**-0.5,
            delta_rule=shape.delta_rule,
            l2norm_eps=1e-6 if shape.normalised else None,
            skip=normal(shape.value_heads).contiguous() if shape.has_skip else None,
        ),
    }


def _cases() -> Iterator[Case]:
    mixed = partial(_Shape, MIXED)
    small = partial(_Shape, MIXED[3:6])
    linear = partial(small, delta_rule=False, normalised=False)
    mamba = partial(linear, key_heads=2, value_heads=4, has_skip=True)
    grid = (
        ("gated_delta", "gated delta rule, as in Qwen3-Next", mixed()),
        ("delta_per_channel", "decay per key channel, as in Kimi-Linear", mixed(key_heads=2, decay_per_channel=True)),
        ("mamba", "groups, a time step and a skip, as in Mamba-2", mamba(key_dim=20, value_dim=16)),
        ("lightning", "no beta, as in MiniMax", linear(key_heads=2, has_beta=False)),
        ("odd_sizes", "no multiple of a vector", small(value_heads=3, key_dim=13, value_dim=37)),
        ("wide_values", "several blocks of value channels", small(value_heads=1, key_dim=20, value_dim=70)),
        ("wide_keys", "several runs of a sum", small(value_heads=1, key_dim=128, value_dim=8)),
        ("one_channel", "the smallest state", small(value_heads=1, key_dim=1, value_dim=1)),
        ("chunk", "a longer prompt", _Shape(((0, 0, 30, 30), (3, 0, 2, 2)))),
        ("empty", "no sequences", _Shape(())),
    )
    for name, why, shape in grid:
        yield Case(name, why, partial(_draw, shape))


def _benchmarks() -> Iterator[Case]:
    qwen3_5 = partial(_Shape, key_heads=16, value_heads=16, key_dim=128, value_dim=128)  # Qwen3.5-0.8B: one layer
    grid = (
        ("decode", "plain decoding, batch 8", ((900, 0, 1, 1),) * 8),
        ("decode_alone", "plain decoding, batch 1", ((900, 0, 1, 1),)),
        ("verify", "batch 8, K 5, 2 accepted", ((900, 2, 3, 6),) * 8),
        ("prefill", "a prompt of 512 tokens", ((0, 0, 512, 512),)),
    )
    for name, why, sequences in grid:
        yield Case(name, why, partial(_draw, qwen3_5(sequences)))


def _bytes_moved(
    query: Tensor, key: Tensor, value: Tensor, pools: tuple[Tensor, Tensor], batch: RecurrentBatch, **others: Any
) -> int:
    states, kept = pools
    inputs = (query.numel() + key.numel() + 2 * value.numel()) * query.element_size()
    return inputs + 4 * (2 * batch.slots.numel() * states[0].numel() + num_kept_rows(batch) * kept.shape[2])


OP_CASES = OpCases(cases=tuple(_cases()), benchmarks=tuple(_benchmarks()), bytes_moved=_bytes_moved)
