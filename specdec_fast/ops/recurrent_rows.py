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
    expect(all(x.is_contiguous() for x in vars(batch).values()), "the arrays of the batch must be contiguous.")
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


def check_kept(batch: RecurrentBatch, num_kept: int) -> None:
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


def make_batch(
    rows: tuple[tuple[int, int, int, int], ...], num_slots: int, generator: torch.Generator, device: torch.device
) -> RecurrentBatch:
    """Make a batch of sequences in random slots, for tests and benchmarks.

    Args:
        rows: of each sequence the state's length, and the numbers of replayed, stored and own rows.
        num_slots: slots of the pool; more than there are sequences.
        generator: chooses the slots.
        device: of the arrays.
    """
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    slots = 1 + torch.randperm(num_slots - 1, generator=generator, device="cpu")[: len(rows)]
    arrays = {
        "cu_seqlens": torch.tensor([0, *columns[3]], device="cpu").cumsum(0),
        "slots": slots,
        "state_lengths": torch.tensor(columns[0], device="cpu"),
        "num_replayed": torch.tensor(columns[1], device="cpu"),
        "num_stored": torch.tensor(columns[2], device="cpu"),
    }
    return RecurrentBatch(**{name: array.to(torch.int32).to(device) for name, array in arrays.items()})


# Rows of a batch with all that may happen to a sequence: its state's length, and its replayed, stored and own rows.
MIXED = (
    (0, 0, 5, 5),  # the first chunk of a prompt
    (4, 0, 3, 3),  # another chunk
    (9, 0, 1, 1),  # plain decoding
    (7, 0, 1, 5),  # a verification after none
    (11, 3, 4, 3),  # a verification after one
    (0, 0, 1, 4),  # a prompt of one token
    (6, 2, 2, 0),  # accepted rows alone
    (8, 3, 1, 2),  # draft rows after draft rows
    (0, 2, 3, 2),  # nothing but draft rows so far
)
Shape = tuple[tuple[int, int, int, int], ...]  # of a batch, as above


def num_kept_rows(batch: RecurrentBatch) -> int:
    """Return how many kept rows a forward reads or writes."""
    written = batch.cu_seqlens.diff() - (batch.num_stored - batch.num_replayed).clamp(min=0)
    return int(batch.num_replayed.sum() + written.sum())
