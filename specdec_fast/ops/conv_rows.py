"""The op ``conv_rows_``: the short causal convolution of recurrent layers, over ragged rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.recurrent_batch import RecurrentBatch
from specdec_fast.ops.checks import FLOATS, expect, expect_tensor
from specdec_fast.ops.recurrent_rows import MIXED, Shape, check_batch, make_batch
from specdec_fast.ops.registry import Case, Op

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


def _make(
    sequences: Shape,
    shape: tuple[int, int],
    has_bias: bool,
    activation: str | None,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Make normal numbers; ``shape``: channels and kernel. The rows are columns of a wider projection."""
    channels, kernel = shape
    batch = make_batch(sequences, len(sequences) + 2, generator, device)
    drafts = max((replayed + rows - stored for _, replayed, stored, rows in sequences), default=0)
    num_rows = int(batch.cu_seqlens[-1])
    normal = partial(torch.randn, generator=generator, device="cpu")
    projected = normal(num_rows, channels + 8).to(dtype).to(device)
    return {
        "rows": projected[:, 8:],
        "state": normal(len(sequences) + 2, kernel + drafts, channels).contiguous().to(dtype).to(device),
        "weight": normal(channels, kernel).contiguous().to(dtype).to(device),
        "bias": normal(channels).contiguous().to(dtype).to(device) if has_bias else None,
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
        yield Case(name, why, partial(_make, sequences, shape, has_bias, activation))


def _benchmarks() -> Iterator[Case]:
    qwen3_5 = (6144, 4)  # channels and kernel of Qwen3.5-0.8B: one layer
    grid = (
        ("decode", "plain decoding, batch 8", ((900, 0, 1, 1),) * 8),
        ("verify", "batch 8, K 5, 3 accepted", ((900, 3, 4, 6),) * 8),
        ("prefill", "a prompt of 512 tokens", ((0, 0, 512, 512),)),
    )
    for name, why, sequences in grid:
        yield Case(name, why, partial(_make, sequences, qwen3_5, False, "silu"))


def _bytes_moved(rows: Tensor, weight: Tensor, batch: RecurrentBatch, **others: Any) -> int:
    num_rows, channels = rows.shape
    inputs = 3 * num_rows + batch.slots.numel() * (weight.shape[1] - 1)  # rows are read, written and stored
    return (inputs * channels + weight.numel()) * rows.element_size()


OP = Op(
    name="conv_rows_",
    implementations={
        "torch": "specdec_fast.ops.conv_rows:conv_rows_",
        "cpp": "specdec_fast.ops.cpp:conv_rows_",
        "triton": "specdec_fast.triton_kernels.conv_rows:conv_rows_",
    },
    check=_check,
    cases=_cases,
    benchmarks=_benchmarks,
    bytes_moved=_bytes_moved,
    exact=False,
    invariant=frozenset({"cpp", "torch", "triton"}),
)
