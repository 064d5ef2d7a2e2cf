"""What the ops of recurrent layers share: the order in which rows advance a state, and the checks of their batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec_fast.batch.recurrent_batch import RecurrentBatch
from specdec_fast.ops.checks import expect, expect_offsets, expect_tensor

# From a state and the fp32 inputs of a row to the state after it. The row is None if it is replayed and has no output.
Advance = Callable[[Tensor, Tensor, "int | None"], Tensor]


def advance_rows_(inputs: Tensor, pools: tuple[Tensor, Tensor], batch: RecurrentBatch, advance: Advance) -> None:
    """Advance the states of a batch over its rows, in place, as ``RecurrentBatch`` says.

    Args:
        inputs: ``[T, width]`` fp32, what a row needs to advance a state.
        pools: the states ``[num_slots, ...]``, and the kept rows ``[num_slots, num_kept, width]``. The row at position
            p is kept at place ``p % num_kept``, so that new rows do not replace those that are still to be replayed.
        batch: the rows.
        advance: computes the next state, and the row's output.
    """
    states, kept = pools
    num_kept = kept.shape[1]
    starts = batch.cu_seqlens.tolist()
    for b, slot in enumerate(batch.slots.tolist()):
        first, stop = starts[b : b + 2]
        length, replayed, stored = (int(x[b]) for x in (batch.state_lengths, batch.num_replayed, batch.num_stored))
        state = states[slot].clone() if length > 0 else torch.zeros_like(states[slot])
        if stored == 0:
            states[slot] = state
        for i in range(replayed + stop - first):
            row = first + i - replayed if i >= replayed else None
            given = kept[slot, (length + i) % num_kept] if row is None else inputs[row]
            state = advance(state, given, row)
            if i + 1 == stored:
                states[slot] = state
            if row is not None and i >= stored:
                kept[slot, (length + i) % num_kept] = given


def check_batch(batch: RecurrentBatch, num_rows: int, num_slots: int, device: torch.device) -> None:
    """Check the arrays of a batch; their values only on the CPU, because on a device that would wait.

    Raises:
        ValueError: an array has another shape or dtype, or a value that no slot or row corresponds to.
    """
    expect_tensor("slots", batch.slots, (None,), (torch.int32,), device)
    size = batch.slots.shape[0]
    expect_tensor("cu_seqlens", batch.cu_seqlens, (size + 1,), (torch.int32,), device)
    for name in ("state_lengths", "num_replayed", "num_stored"):
        expect_tensor(name, getattr(batch, name), (size,), (torch.int32,), device)
    expect(all(x.is_contiguous() for x in batch.arrays), "the arrays of the batch must be contiguous.")
    expect_offsets("cu_seqlens", batch.cu_seqlens, num_rows, strictly=False)
    if device.type != "cpu":
        return
    slots = batch.slots.tolist()
    owned = [slot for slot in slots if slot != 0]
    expect(
        all(0 <= slot < num_slots for slot in slots) and len(set(owned)) == len(owned),
        f"slots is {slots}; expected slots from 0 to {num_slots - 1}, and each but slot 0 once.",
    )
    for name in ("state_lengths", "num_replayed"):
        values = getattr(batch, name).tolist()
        expect(all(value >= 0 for value in values), f"{name} is {values}; expected no number below 0.")
    counts = (batch.num_replayed + batch.cu_seqlens.diff()).tolist()
    stored = batch.num_stored.tolist()
    expect(
        all(0 <= own <= count for own, count in zip(stored, counts, strict=True)),
        f"num_stored is {stored}; expected at most the replayed and own rows of each sequence, {counts}.",
    )


def check_pools(
    pools: tuple[Tensor, Tensor], state_shape: tuple[int, ...], width: int, batch: RecurrentBatch, rows: Tensor
) -> None:
    """Check states of ``state_shape``, kept rows of ``width``, and the batch of an op's ``rows``.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or the batch is refused.
    """
    states, kept = pools
    expect_tensor("states", states, (None, *state_shape), (torch.float32,), rows.device)
    expect_tensor("kept rows", kept, (states.shape[0], None, width), (torch.float32,), rows.device)
    expect(states.is_contiguous() and kept.is_contiguous(), "states and kept rows must be contiguous.")
    check_batch(batch, rows.shape[0], states.shape[0], rows.device)
    _check_kept(batch, kept.shape[1])


def _check_kept(batch: RecurrentBatch, num_kept: int) -> None:
    """Check that the kept rows that are replayed, and those that are written, have places of their own.

    Only on the CPU, because on a device it would wait.

    Raises:
        ValueError: a sequence replays more rows than are kept, or its new rows would replace rows that it replays.
    """
    if batch.slots.device.type != "cpu":
        return
    counts = batch.cu_seqlens.diff().tolist()
    stored = batch.num_stored.tolist()
    for b, replayed in enumerate(batch.num_replayed.tolist()):
        needed = replayed + (counts[b] if replayed + counts[b] > stored[b] else 0)
        expect(
            needed <= num_kept,
            f"sequence {b} replays {replayed} rows and has {counts[b]} of its own, and not all are stored; "
            f"{num_kept} places for kept rows are too few, expected at least {needed}.",
        )
