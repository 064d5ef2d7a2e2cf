"""Calls of the ops of recurrent layers as an engine makes them: prompts in chunks, verifications, rejected rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_fast.batch.recurrent_batch import RecurrentBatch
from support.op_cases import make

# Of each op a case, its arguments that are rows, and those that are pools of slots.
ROWS = {
    "conv_rows_": ("rows",),
    "linear_attention_rows_": ("query", "key", "value", "log_decay", "beta"),
    "selective_scan_rows_": ("x", "dt", "B", "C"),
}
POOLS = {"conv_rows_": "state", "linear_attention_rows_": "pools", "selective_scan_rows_": "pools"}
MOST_DRAFTS = 5  # draft rows of a call, and rows that it replays
MOST_KEPT = 2 * MOST_DRAFTS + 1  # places for kept rows

Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Step:
    """What one call does with a sequence: its committed rows, its draft rows, and how many of these are accepted."""

    committed: int
    drafts: int = 0
    accepted: int = 0
    unstored: int = 0  # of the replayed and the committed rows, how many are not stored


@dataclass
class Sequence:
    """One sequence: its rows, as indices of the material, and what its slot holds."""

    rows: list[int]
    slot: int
    length: int = 0  # positions that the stored state has seen
    replayed: int = 0  # kept rows that were accepted
    outputs: dict[int, Tensor] = field(default_factory=dict)  # of each position, all that was computed for it


class Layer:
    """One layer's pools, full of NaN where nothing was written, and the rows of all sequences."""

    def __init__(self, op: str, case: str, run: Run, dtype: torch.dtype, num_slots: int) -> None:
        self.op, self.run = op, run
        self.material = make(op, case, dtype)
        self.num_rows = len(self.material[ROWS[op][0]])
        given = self.material[POOLS[op]]
        shapes = [(num_slots, *pool.shape[1:]) for pool in ([given] if isinstance(given, Tensor) else given)]
        shapes[-1] = (num_slots, MOST_KEPT, shapes[-1][2])  # kept rows, or the ring of a convolution's inputs
        dtypes = [dtype] if op == "conv_rows_" else [torch.float32] * 2
        self.pools = [torch.full(shape, math.nan, dtype=own) for shape, own in zip(shapes, dtypes, strict=True)]

    def call(self, sequences: list[Sequence], steps: list[Step], wrong: list[int]) -> None:
        """Compute one step of each sequence; rejected draft rows are those of ``wrong``, of the material."""
        rows, counts, stored = [], [], []
        for sequence, step in zip(sequences, steps, strict=True):
            first = sequence.length + sequence.replayed
            true = sequence.rows[first : first + step.committed + step.accepted]
            rows += true + wrong[: step.drafts - step.accepted]
            counts.append(step.committed + step.drafts)
            stored.append(max(0, sequence.replayed + step.committed - step.unstored))
        columns = [[s.slot for s in sequences], [s.length for s in sequences], [s.replayed for s in sequences]]
        slots, lengths, replayed = (torch.tensor(column, dtype=torch.int32) for column in columns)
        batch = RecurrentBatch(
            cu_seqlens=torch.tensor([0, *counts]).cumsum(0).int(),
            slots=slots,
            state_lengths=lengths,
            num_replayed=replayed,
            num_stored=torch.tensor(stored, dtype=torch.int32),
        )
        args = {**self.material, **{name: self.material[name][rows] for name in ROWS[self.op]}, "batch": batch}
        args[POOLS[self.op]] = self.pools[0] if len(self.pools) == 1 else tuple(self.pools)
        outs = self.run(**args).split(counts)
        for sequence, step, out, count in zip(sequences, steps, outs, stored, strict=True):
            first = sequence.length + sequence.replayed
            for j in range(step.committed + step.accepted):
                assert first + j not in sequence.outputs
                sequence.outputs[first + j] = out[j]
            sequence.length += count
            sequence.replayed = first + step.committed + step.accepted - sequence.length

    def state(self, sequence: Sequence) -> Tensor:
        """The stored state; of a convolution the last inputs."""
        if self.op != "conv_rows_":
            return self.pools[0][sequence.slot]
        places = range(max(0, sequence.length - 3), sequence.length)
        return self.pools[0][sequence.slot, [p % MOST_KEPT for p in places]]


def random_steps(num_rows: int, generator: torch.Generator) -> Iterator[Step]:
    """A prompt in chunks, then decoding and verifications, until ``num_rows`` positions are committed or accepted.

    Between verifications are chains of draft rows that are computed one by one, and accepted.
    """

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    left = num_rows - draw(0, num_rows)
    prompt = num_rows - left
    while prompt:
        chunk = draw(1, prompt)
        yield Step(chunk)
        prompt -= chunk
    while left:
        drafts = draw(0, MOST_DRAFTS)
        accepted = draw(0, min(drafts, left - 1))
        unstored = min(draw(0, 2), MOST_DRAFTS - accepted)
        yield Step(1, drafts, accepted, unstored)
        left -= 1 + accepted
        for _ in range(min(draw(0, 2), left, MOST_DRAFTS - accepted - unstored)):
            yield Step(0, drafts=1, accepted=1, unstored=num_rows)
            left -= 1
