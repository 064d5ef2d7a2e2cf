"""The op ``selective_scan_rows_``: the state space of Mamba-1, over ragged rows."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.batch.recurrent_batch import RecurrentBatch
from specdec_fast.ops.checks import FLOATS, expect, expect_tensor
from specdec_fast.ops.recurrent_rows import advance_rows_, check_pools
from specdec_fast.ops.registry import Op


def selective_scan_rows_(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    skip: Tensor | None,
    pools: tuple[Tensor, Tensor],
    batch: RecurrentBatch,
) -> Tensor:
    """Advance each channel's state ``S [state_dim]`` row after row (Mamba, arXiv 2312.00752), and read it.

    For channel c, with its group's B and C::

        S = exp(dt * A[c]) * S + dt * x * B
        y = sum of S * C + skip[c] * x

    All sums are in fp32.

    Args:
        x: ``[T, channels]`` of fp32, fp16 or bf16, any strides.
        dt: ``[T, channels]`` fp32, the time step, after its bias and softplus.
        A: ``[channels, state_dim]`` fp32, any strides; fastest if its channels are contiguous.
        B: ``[T, num_groups, state_dim]`` of the dtype of ``x``; channel c belongs to group
            ``c // (channels // num_groups)``.
        C: ``[T, num_groups, state_dim]`` of the dtype of ``x``.
        skip: ``[channels]`` fp32, contiguous, or None.
        pools: the states ``[num_slots, state_dim, channels]`` fp32, and the kept rows ``[num_slots, num_kept, width]``
            fp32, both contiguous. ``width`` is that of x, dt and B of a row, which are kept in this order. Where a
            sequence has draft rows, ``num_kept`` is at least its replayed rows plus its rows.
        batch: whose rows they are.

    Returns:
        ``[T, channels]`` in the dtype of ``x``.
    """
    channels, state_dim = A.shape
    group = channels // B.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def advance(state: Tensor, row_inputs: Tensor, row: int | None) -> Tensor:
        own, step, keys = row_inputs.split([channels, channels, B.shape[1] * state_dim])
        keys = keys.view(-1, state_dim).T.repeat_interleave(group, dim=1)  # [state_dim, channels]
        state = torch.exp(A.T * step) * state + (step * own) * keys
        if row is not None:
            read = (state * C[row].float().T.repeat_interleave(group, dim=1)).sum(dim=0)
            out[row] = read if skip is None else read + skip * own
        return state

    inputs = torch.cat([x.float(), dt, B.flatten(1).float()], dim=1)
    advance_rows_(inputs, pools, batch, advance)
    return out


def _check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    skip: Tensor | None,
    pools: tuple[Tensor, Tensor],
    batch: RecurrentBatch,
) -> None:
    device = x.device
    fp32 = (torch.float32,)
    expect_tensor("x", x, (None, None), FLOATS, device)
    num_rows, channels = x.shape
    expect_tensor("dt", dt, (num_rows, channels), fp32, device)
    expect_tensor("A", A, (channels, None), fp32, device)
    state_dim = A.shape[1]
    expect_tensor("B", B, (num_rows, None, state_dim), (x.dtype,), device)
    num_groups = B.shape[1]
    expect_tensor("C", C, (num_rows, num_groups, state_dim), (x.dtype,), device)
    expect(
        num_groups > 0 and channels % num_groups == 0,
        f"{channels} channels are not a multiple of {num_groups} groups.",
    )
    if skip is not None:
        expect_tensor("skip", skip, (channels,), fp32, device)
        expect(skip.is_contiguous(), "skip must be contiguous.")
    check_pools(pools, (state_dim, channels), 2 * channels + num_groups * state_dim, batch, x)


OP = Op(
    name="selective_scan_rows_",
    implementations={
        "torch": "specdec_fast.ops.selective_scan_rows:selective_scan_rows_",
        "cpp": "specdec_fast.ops.cpp:selective_scan_rows_",
        "triton": "specdec_fast.triton_kernels.selective_scan_rows:selective_scan_rows_",
    },
    check=_check,
    exact=False,
    rounded=("pools",),
    invariant=frozenset({"cpp", "torch", "triton"}),
)
