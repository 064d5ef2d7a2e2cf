"""The op ``linear_attention_rows_``: linear attention with a recurrent state, over ragged rows."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.batch.recurrent_batch import LinearAttentionParams, RecurrentBatch
from specdec_fast.ops.checks import FLOATS, expect, expect_tensor
from specdec_fast.ops.recurrent_rows import advance_rows_, check_pools
from specdec_fast.ops.registry import Op


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
    parts = _kept_parts(key, value, log_decay, beta)
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


def _kept_parts(key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None) -> list[Tensor]:
    return [key, value, log_decay, *([] if beta is None else [beta])]


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
    if params.skip is not None:
        expect_tensor("skip", params.skip, (num_value_heads,), fp32, device)
        expect(params.skip.is_contiguous(), "skip must be contiguous.")
    width = sum(part.shape[1:].numel() for part in _kept_parts(key, value, log_decay, beta))
    check_pools(pools, (num_value_heads, key_dim, value_dim), width, batch, query)


OP = Op(
    name="linear_attention_rows_",
    implementations={
        "torch": "specdec_fast.ops.linear_attention_rows:linear_attention_rows_",
        "cpp": "specdec_fast.ops.cpp:linear_attention_rows_",
        "triton": "specdec_fast.triton_kernels.linear_attention_rows:linear_attention_rows_",
    },
    check=_check,
    exact=False,
    rounded=("pools",),
    invariant=frozenset({"cpp", "torch", "triton"}),
)
