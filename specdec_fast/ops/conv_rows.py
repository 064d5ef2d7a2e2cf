"""The op ``conv_rows_``: the short causal convolution of recurrent layers, over ragged rows."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.batch.recurrent_batch import RecurrentBatch
from specdec_fast.ops.checks import FLOATS, expect, expect_tensor
from specdec_fast.ops.recurrent_rows import check_batch
from specdec_fast.ops.registry import Op

ACTIVATIONS = (None, "silu")


def conv_rows_(
    rows: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, batch: RecurrentBatch
) -> Tensor:
    """Convolve every channel over its last inputs, and store the rows as inputs of later ones, in place.

    A row's output is ``activation(bias + sum of weight[:, j] * input at position p - kernel + 1 + j)``, where p is the
    row's own position. Inputs before position 0 are zero. Products are added in the order of j, in fp32, and rounded
    once, after the activation.

    The state is a ring of inputs: that of position p is at place ``p % num_places``. They are copies, so they have the
    rows' dtype. A rejected row needs no care: the row that takes its position overwrites it. The first row of sequence
    b has position ``state_lengths[b] + num_replayed[b]``.

    Args:
        rows: ``[T, channels]`` of fp32, fp16 or bf16, any strides.
        state: ``[num_slots, num_places, channels]`` of the same dtype, contiguous. ``num_places`` is at least
            ``kernel - 1`` plus the rows of a sequence that are not stored.
        weight: ``[channels, kernel]`` of the same dtype, contiguous.
        bias: ``[channels]`` of the same dtype, contiguous, or None.
        activation: ``"silu"`` or None.
        batch: whose rows they are.

    Returns:
        ``[T, channels]`` in the dtype of ``rows``.
    """
    num_places = state.shape[1]
    kernel = weight.shape[1]
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    starts = batch.cu_seqlens.tolist()
    positions = (batch.state_lengths + batch.num_replayed).tolist()
    for b, slot in enumerate(batch.slots.tolist()):
        before = range(positions[b] - kernel + 1, positions[b])
        inputs = [state[slot, p % num_places].clone() if p >= 0 else torch.zeros_like(state[slot, 0]) for p in before]
        for row in range(starts[b], starts[b + 1]):
            inputs = [*inputs, rows[row]]
            out[row] = _output(inputs, weight, bias, activation)
            inputs = inputs[1:]
            state[slot, (positions[b] + row - starts[b]) % num_places] = rows[row]
    return out


def _output(inputs: list[Tensor], weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    total = torch.zeros(weight.shape[0], device=weight.device) if bias is None else bias.float()
    for j, each in enumerate(inputs):
        total = total + weight[:, j].float() * each.float()
    return torch.nn.functional.silu(total) if activation == "silu" else total


def _check(
    rows: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, batch: RecurrentBatch
) -> None:
    device = rows.device
    dtype = (rows.dtype,)
    expect_tensor("rows", rows, (None, None), FLOATS, device)
    num_rows, channels = rows.shape
    expect_tensor("state", state, (None, None, channels), dtype, device)
    expect_tensor("weight", weight, (channels, None), dtype, device)
    tensors = [state, weight]
    if bias is not None:
        expect_tensor("bias", bias, (channels,), dtype, device)
        tensors.append(bias)
    expect(all(x.is_contiguous() for x in tensors), "state, weight and bias must be contiguous.")
    expect(activation in ACTIVATIONS, f"activation is {activation!r}; expected 'silu' or None.")
    check_batch(batch, num_rows, state.shape[0], device)
    kernel = weight.shape[1]
    expect(kernel > 0, "weight has no places for inputs.")
    num_drafts = 0
    if device.type == "cpu" and batch.slots.numel():
        num_drafts = int((batch.num_replayed + batch.cu_seqlens.diff() - batch.num_stored).max())
    needed = max(1, kernel - 1 + num_drafts)
    expect(
        state.shape[1] >= needed,
        f"state has {state.shape[1]} places for inputs; expected at least {needed}: {kernel - 1} for a kernel of "
        f"{kernel}, and one for each of {num_drafts} rows that are not stored.",
    )


OP = Op(
    name="conv_rows_",
    implementations={
        "torch": "specdec_fast.ops.conv_rows:conv_rows_",
        "cpp": "specdec_fast.ops.cpp:conv_rows_",
        "triton": "specdec_fast.triton_kernels.conv_rows:conv_rows_",
    },
    check=_check,
    exact=False,
    invariant=frozenset({"cpp", "torch", "triton"}),
)
