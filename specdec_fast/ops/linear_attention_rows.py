"""The op ``linear_attention_rows_``: linear attention with a recurrent state, over ragged rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.recurrent_batch import LinearAttentionParams, RecurrentBatch
from specdec_fast.ops.checks import FLOATS, expect, expect_tensor
from specdec_fast.ops.recurrent_rows import (
    MIXED,
    Shape,
    advance_rows_,
    check_batch,
    check_kept,
    make_batch,
    num_kept_rows,
)
from specdec_fast.ops.registry import Case, Op


def linear_attention_rows_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    pools: tuple[Tensor, Tensor],
    batch: RecurrentBatch,
    params: LinearAttentionParams,
) -> Tensor:
    """Advance each head's state ``S [key_dim, value_dim]`` row after row, and read it with the row's query.

    With ``g = exp(log_decay)``, and products of a state's rows::

        S = g * S
        u = beta * (v - S^T k)    with the delta rule, else beta * v
        S = S + k u^T
        o = S^T q * scale + skip * v

    Gated delta networks (arXiv 2412.06464) decay per head, Kimi Delta Attention (arXiv 2510.26692) per head and key
    channel. Mamba-2 (arXiv 2405.21060) has B as keys, C as queries, x as values, the time step as beta, and no delta
    rule; lightning attention (arXiv 2401.04658) has a constant decay. All sums are in fp32.

    Args:
        query: ``[T, num_key_heads, key_dim]`` of fp32, fp16 or bf16, any strides.
        key: ``[T, num_key_heads, key_dim]`` of the same dtype.
        value: ``[T, num_value_heads, value_dim]`` of the same dtype. Value head h belongs to key head
            ``h // (num_value_heads // num_key_heads)``.
        log_decay: ``[T, num_value_heads]`` fp32, or ``[T, num_value_heads, key_dim]``.
        beta: ``[T, num_value_heads]`` fp32; None: 1.
        pools: the states ``[num_slots, num_value_heads, key_dim, value_dim]`` fp32, and the kept rows
            ``[num_slots, num_kept, width]`` fp32, both contiguous. ``width`` is that of key, value, log_decay and beta
            of a row, which are kept in this order. Where a sequence has draft rows, ``num_kept`` is at least its
            replayed rows plus its rows.
        batch: whose rows they are.
        params: scale, normalisation, delta rule and skip.

    Returns:
        ``[T, num_value_heads, value_dim]`` in the dtype of ``value``.
    """
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    parts = [key, value, log_decay, *([] if beta is None else [beta])]
    sizes = [part.shape[1:].numel() for part in parts]
    group = value.shape[1] // key.shape[1]

    def advance(state: Tensor, row_inputs: Tensor, row: int | None) -> Tensor:
        k, v, g, *b = row_inputs.split(sizes)
        keys = _normalised(k.view(key.shape[1:]), params).repeat_interleave(group, dim=0)
        values = v.view(value.shape[1:])
        decay = g.view(len(values), -1, 1).exp()  # [num_value_heads, 1 or key_dim, 1]
        state = state * decay
        change = values - (state * keys[:, :, None]).sum(dim=1) if params.delta_rule else values
        if b:
            change = change * b[0][:, None]
        state = state + keys[:, :, None] * change[:, None, :]
        if row is not None:
            queries = _normalised(query[row].float(), params).repeat_interleave(group, dim=0) * params.scale
            read = (state * queries[:, :, None]).sum(dim=1)
            out[row] = read if params.skip is None else read + params.skip[:, None] * values
        return state

    inputs = torch.cat([part.flatten(1).float() for part in parts], dim=1)
    advance_rows_(inputs, pools, batch, advance)
    return out


def _normalised(vectors: Tensor, params: LinearAttentionParams) -> Tensor:
    if params.l2norm_eps is None:
        return vectors
    return vectors * torch.rsqrt((vectors * vectors).sum(dim=-1, keepdim=True) + params.l2norm_eps)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    pools: tuple[Tensor, Tensor],
    batch: RecurrentBatch,
    params: LinearAttentionParams,
) -> None:
    device = query.device
    dtype = (query.dtype,)
    expect_tensor("query", query, (None,) * 3, FLOATS, device)
    num_rows, num_key_heads, key_dim = query.shape
    expect_tensor("key", key, (num_rows, num_key_heads, key_dim), dtype, device)
    expect_tensor("value", value, (num_rows, None, None), dtype, device)
    num_value_heads, value_dim = value.shape[1:]
    expect(
        num_key_heads > 0 and num_value_heads % num_key_heads == 0,
        f"{num_value_heads} value heads are not a multiple of {num_key_heads} key heads.",
    )
    per_channel = (key_dim,) if log_decay.dim() == 3 else ()
    fp32 = (torch.float32,)
    expect_tensor("log_decay", log_decay, (num_rows, num_value_heads, *per_channel), fp32, device)
    if beta is not None:
        expect_tensor("beta", beta, (num_rows, num_value_heads), fp32, device)
    states, kept = pools
    expect_tensor("states", states, (None, num_value_heads, key_dim, value_dim), fp32, device)
    width = sum(part.shape[1:].numel() for part in (key, value, log_decay, *([] if beta is None else [beta])))
    expect_tensor("kept rows", kept, (states.shape[0], None, width), fp32, device)
    expect(states.is_contiguous() and kept.is_contiguous(), "states and kept rows must be contiguous.")
    if params.skip is not None:
        expect_tensor("skip", params.skip, (num_value_heads,), fp32, device)
        expect(params.skip.is_contiguous(), "skip must be contiguous.")
    check_batch(batch, num_rows, states.shape[0], device)
    check_kept(batch, kept.shape[1])


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


def _make(shape: _Shape, generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Make normal queries, keys and values, slices of one projection, and decays as models compute them."""
    batch = make_batch(shape.sequences, len(shape.sequences) + 2, generator, device)
    num_rows = int(batch.cu_seqlens[-1])
    num_slots = len(shape.sequences) + 2
    normal = partial(torch.randn, generator=generator, device="cpu")
    widths = (shape.key_heads * shape.key_dim,) * 2 + (shape.value_heads * shape.value_dim,)
    query, key, value = normal(num_rows, sum(widths)).to(dtype).to(device).split(widths, dim=1)
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
        "log_decay": log_decay.to(device),
        "beta": None if beta is None else beta.to(device),
        "pools": (states.contiguous().to(device), kept.to(device)),
        "batch": batch,
        "params": LinearAttentionParams(
            scale=shape.key_dim**-0.5,
            delta_rule=shape.delta_rule,
            l2norm_eps=1e-6 if shape.normalised else None,
            skip=normal(shape.value_heads).contiguous().to(device) if shape.has_skip else None,
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
        yield Case(name, why, partial(_make, shape))


def _benchmarks() -> Iterator[Case]:
    qwen3_5 = partial(_Shape, key_heads=16, value_heads=16, key_dim=128, value_dim=128)  # Qwen3.5-0.8B: one layer
    grid = (
        ("decode", "plain decoding, batch 8", ((900, 0, 1, 1),) * 8),
        ("decode_alone", "plain decoding, batch 1", ((900, 0, 1, 1),)),
        ("verify", "batch 8, K 5, 2 accepted", ((900, 2, 3, 6),) * 8),
        ("prefill", "a prompt of 512 tokens", ((0, 0, 512, 512),)),
    )
    for name, why, sequences in grid:
        yield Case(name, why, partial(_make, qwen3_5(sequences)))


def _bytes_moved(
    query: Tensor, key: Tensor, value: Tensor, pools: tuple[Tensor, Tensor], batch: RecurrentBatch, **others: Any
) -> int:
    states, kept = pools
    inputs = (query.numel() + key.numel() + 2 * value.numel()) * query.element_size()
    return inputs + 4 * (2 * batch.slots.numel() * states[0].numel() + num_kept_rows(batch) * kept.shape[2])


OP = Op(
    name="linear_attention_rows_",
    implementations={
        "torch": "specdec_fast.ops.linear_attention_rows:linear_attention_rows_",
        "cpp": "specdec_fast.ops.cpp:linear_attention_rows_",
        "triton": "specdec_fast.triton_kernels.linear_attention_rows:linear_attention_rows_",
    },
    check=_check,
    cases=_cases,
    benchmarks=_benchmarks,
    bytes_moved=_bytes_moved,
    exact=False,
    rounded=("pools",),
    invariant=frozenset({"cpp", "torch", "triton"}),
)
