"""The ops of recurrent layers by their definition in fp64: of each the output, and the states that it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.recurrent_batch import LinearAttentionParams, RecurrentBatch


def conv_in_float64(
    rows: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, batch: RecurrentBatch
) -> Tensor:
    """Compute ``conv_rows_`` as one convolution of each sequence, its earlier inputs included."""
    out = torch.empty(rows.shape, dtype=torch.float64, device=rows.device)
    kernel = weight.shape[1]
    for b, (first, stop) in enumerate(_spans(batch)):
        position = int(batch.state_lengths[b] + batch.num_replayed[b])
        places = torch.arange(position - kernel + 1, position, device=rows.device)
        before = state[int(batch.slots[b]), places % state.shape[1]].double()
        before[places < 0] = 0
        inputs = torch.cat([before, rows[first:stop].double()])
        if stop > first:
            windows = inputs.unfold(0, kernel, 1)  # [rows, channels, kernel]
            out[first:stop] = (windows * weight.double()).sum(-1)
    if bias is not None:
        out += bias.double()
    return torch.nn.functional.silu(out) if activation == "silu" else out


def linear_attention_in_float64(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    pools: tuple[Tensor, Tensor],
    batch: RecurrentBatch,
    params: LinearAttentionParams,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``linear_attention_rows_``; also return the states, and the kept rows, after it."""
    states, kept = (pool.double() for pool in pools)
    group = value.shape[1] // key.shape[1]
    parts = [key, value, log_decay, *([] if beta is None else [beta])]
    inputs = torch.cat([part.flatten(1).double() for part in parts], dim=1)
    out = torch.empty(value.shape, dtype=torch.float64, device=value.device)

    def unit(vectors: Tensor) -> Tensor:
        eps = params.l2norm_eps
        return vectors if eps is None else vectors / (vectors.square().sum(-1, keepdim=True) + eps).sqrt()

    for slot, state, steps in _sequences(states, kept, batch):
        for stored, given, row in steps(inputs):
            k, v, g, *b = given.split([part.shape[1:].numel() for part in parts])
            keys, values = unit(k.view(key.shape[1:])).repeat_interleave(group, 0), v.view(value.shape[1:])
            state.mul_(g.view(*log_decay.shape[1:], *(1,) * (4 - log_decay.dim())).exp())
            change = values - torch.einsum("hkv,hk->hv", state, keys) if params.delta_rule else values
            state.add_(torch.einsum("hk,hv->hkv", keys, change * b[0][:, None] if b else change))
            if row is not None:
                queries = unit(query[row].double()).repeat_interleave(group, 0) * params.scale
                out[row] = torch.einsum("hkv,hk->hv", state, queries)
                if params.skip is not None:
                    out[row] += params.skip.double()[:, None] * values
            if stored:
                states[slot] = state
    return out, states, kept


def scan_in_float64(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    skip: Tensor | None,
    pools: tuple[Tensor, Tensor],
    batch: RecurrentBatch,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``selective_scan_rows_``; also return the states, and the kept rows, after it."""
    states, kept = (pool.double() for pool in pools)
    channels, state_dim = A.shape
    groups = torch.arange(channels, device=x.device) // (channels // B.shape[1])
    inputs = torch.cat([x.double(), dt.double(), B.flatten(1).double()], dim=1)
    out = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    for slot, state, steps in _sequences(states, kept, batch):
        for stored, given, row in steps(inputs):
            own, step, keys = given.split([channels, channels, B.shape[1] * state_dim])
            state.mul_((step[:, None] * A.double()).exp().T)
            state.add_((step * own) * keys.view(-1, state_dim)[groups].T)
            if row is not None:
                out[row] = (state * C[row].double()[groups].T).sum(0)
                if skip is not None:
                    out[row] += skip.double() * own
            if stored:
                states[slot] = state
    return out, states, kept


def _spans(batch: RecurrentBatch) -> list[tuple[int, int]]:
    return list(pairwise(batch.cu_seqlens.tolist()))


def _sequences(states: Tensor, kept: Tensor, batch: RecurrentBatch) -> Iterator[tuple[int, Tensor, Any]]:
    """Yield of each sequence its slot, a copy of its state, and a function that yields its rows.

    Of each row it yields whether the state after it is stored, its inputs, and its number if it has an output.
    """
    for b, (first, stop) in enumerate(_spans(batch)):
        slot, length = int(batch.slots[b]), int(batch.state_lengths[b])
        replayed, num_stored = int(batch.num_replayed[b]), int(batch.num_stored[b])
        if length == 0:
            states[slot] = 0

        def steps(inputs: Tensor, first=first, stop=stop, slot=slot, length=length, replayed=replayed,
                  num_stored=num_stored) -> Iterator[tuple[bool, Tensor, int | None]]:  # fmt: skip
            for i in range(replayed):
                yield i < num_stored, kept[slot, (length + i) % kept.shape[1]].clone(), None
            for i, row in enumerate(range(first, stop), start=replayed):
                if i >= num_stored:
                    kept[slot, (length + i) % kept.shape[1]] = inputs[row]
                yield i < num_stored, inputs[row], row

        yield slot, states[slot].clone(), steps


# The number of terms of the longest sums: of one row, and of the rows that a state has seen.


def conv_terms(args: dict[str, Any]) -> int:
    """Return how many terms the longest sum of ``conv_rows_`` has."""
    return int(args["weight"].shape[1])


def linear_attention_terms(args: dict[str, Any]) -> int:
    """Return how many terms the longest sum of ``linear_attention_rows_`` has."""
    return int(args["key"].shape[2]) + _most_rows(args["batch"])


def scan_terms(args: dict[str, Any]) -> int:
    """Return how many terms the longest sum of ``selective_scan_rows_`` has."""
    return int(args["A"].shape[1]) + _most_rows(args["batch"])


def _most_rows(batch: RecurrentBatch) -> int:
    return int((batch.cu_seqlens.diff() + batch.num_replayed).max()) if batch.slots.numel() else 0
