"""Batches of recurrent layers: what may happen to the rows and the state of a sequence."""

from __future__ import annotations

import torch

from specdec_fast.batch.recurrent_batch import RecurrentBatch


def draw_batch(
    rows: tuple[tuple[int, int, int, int], ...], num_slots: int, generator: torch.Generator
) -> RecurrentBatch:
    """Draw a batch of sequences in random slots.

    Args:
        rows: of each sequence the state's length, and the numbers of replayed, stored and own rows.
        num_slots: slots of the pool; more than there are sequences.
        generator: chooses the slots.
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
    return RecurrentBatch(**{name: array.to(torch.int32) for name, array in arrays.items()})


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
