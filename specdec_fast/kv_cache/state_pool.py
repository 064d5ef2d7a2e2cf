"""The states of recurrent layers: one slot per sequence, beside its pages (see ``batch/recurrent_batch.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.errors import KVCacheAllocationError


@dataclass(frozen=True)
class StateShape:
    """What one call of a recurrent function keeps of a sequence.

    A convolution keeps a ring of its last inputs, in the model's dtype. The other ops keep a state and the inputs of
    draft rows, in fp32.
    """

    op: str  # name of the op that advances the state
    shape: tuple[int, ...]  # of a state; of a convolution, (kernel - 1, channels)
    width: int  # numbers of a kept row; of a convolution 0, because its ring holds the draft rows as well
    dtype: torch.dtype = torch.float32

    @property
    def is_ring(self) -> bool:
        """Whether it is a convolution's, which keeps its inputs alone."""
        return not self.width

    def sizes(self, most_draft_tokens: int) -> list[tuple[int, ...]]:
        """Return the shapes of a slot's tensors, if a verification has at most so many draft tokens.

        The rows of two verifications are alive at once: accepted ones that the second replays, and its own.
        """
        if self.is_ring:
            before, channels = self.shape
            return [(max(1, before + most_draft_tokens), channels)]
        return [self.shape, (2 * most_draft_tokens + 1, self.width)]

    def bytes_per_slot(self, most_draft_tokens: int) -> int:
        """Return the bytes of a slot."""
        return sum(torch.Size(size).numel() for size in self.sizes(most_draft_tokens)) * self.dtype.itemsize


def bytes_per_slot(states: Sequence[StateShape], most_draft_tokens: int) -> int:
    """Return the bytes of all states of a sequence, with room for so many draft tokens."""
    return sum(state.bytes_per_slot(most_draft_tokens) for state in states)


class RecurrentRows(NamedTuple):
    """The arrays of a ``RecurrentBatch`` on the host, ``[B]`` int32 each."""

    slots: np.ndarray
    state_lengths: np.ndarray
    num_replayed: np.ndarray
    num_stored: np.ndarray


class StateMemory(NamedTuple):
    """The memory of a pool's state slots, as a program takes it."""

    addresses: Tensor  # [num_calls, 2] int64 on the CPU: of every recurrent call, its states and kept rows (0: none)
    num_slots: int
    most_draft_tokens: int  # for which a slot has room
    memory: tuple[Tensor, ...]  # the tensors behind the addresses; the references keep them alive


class StatePool:
    """The state slots of one model, and how many positions each stored state has seen.

    A sequence's slot is its place in the page pool. Slot 0 is scratch. The pool records what each forward stores when
    the forward is laid out, so a sequence whose forward fails must begin again from position 0 (``forget``).

    Attributes:
        tensors: per recurrent call of a forward, the tensors of its op, ``[num_slots, ...]`` each.
        lengths: ``[num_slots]`` int32, the positions that each slot's state has seen.
        num_growths: how often ``grow`` has replaced tensors; a graph that has read others is stale.

    Args:
        shapes: of each recurrent call of a forward.
        num_slots: scratch included.
        most_draft_tokens: for which a slot has room.
        device: of all states, or one for each.

    Raises:
        KVCacheAllocationError: there is no memory for so many slots.
    """

    def __init__(
        self,
        shapes: tuple[StateShape, ...],
        num_slots: int,
        most_draft_tokens: int,
        device: torch.device | Sequence[torch.device],
    ) -> None:
        self._sizes = [(shape.sizes(most_draft_tokens), shape.dtype) for shape in shapes]
        self._devices = [device] * len(shapes) if isinstance(device, torch.device) else device
        self._most_draft_tokens = most_draft_tokens
        self._bytes_per_slot = bytes_per_slot(shapes, most_draft_tokens)
        self.tensors = [self._allocated(num_slots, i) for i in range(len(shapes))]
        self.lengths = np.zeros(num_slots, np.int32)
        self.num_growths = 0

    @property
    def num_slots(self) -> int:
        """The number of slots, scratch included."""
        return len(self.lengths)

    def memory(self) -> StateMemory:
        """Return the present memory; ``grow`` replaces it."""
        addresses = [[each[0].data_ptr(), each[1].data_ptr() if len(each) > 1 else 0] for each in self.tensors]
        on_host = torch.tensor(addresses, dtype=torch.int64, device="cpu").view(-1, 2)
        memory = tuple(tensor for each in self.tensors for tensor in each)
        return StateMemory(on_host, self.num_slots, self._most_draft_tokens, memory)

    def grow(self, num_slots: int) -> None:
        """Let there be ``num_slots`` slots; those that exist keep their states.

        The tensors are replaced one by one. If memory runs out for one, the pool has as many slots as before.
        """
        self.num_growths += 1
        for i in range(len(self._sizes)):
            grown = self._allocated(num_slots, i)
            for larger, smaller in zip(grown, self.tensors[i], strict=True):
                kept = min(len(smaller), num_slots)
                larger[:kept] = smaller[:kept]
            self.tensors[i] = grown
        self.lengths = np.pad(self.lengths, (0, num_slots - len(self.lengths)))

    def forget(self, slot: int) -> None:
        """Let the slot's sequence begin again from position 0; what the slot holds is never read then."""
        self.lengths[slot] = 0

    def assume(self, slot: int, length: int) -> None:
        """Take what the slot holds as the state after ``length`` positions, to time forwards."""
        self.lengths[slot] = length

    def advance(self, rows: Sequence[Rows], slots: np.ndarray) -> RecurrentRows:
        """Lay out the rows of a forward, and record what it stores.

        A forward stores the state after the last row that no later step can reject: none of a span of draft tokens
        alone, whose replayed rows are draft tokens too.

        Args:
            rows: the span of each sequence, in batch order.
            slots: ``[B]``, of these sequences.
        """
        starts, counts, drafts = np.array([row[1:] for row in rows], np.int32).reshape(-1, 3).T
        lengths = self.lengths[slots]
        replayed = starts - lengths
        self._expect_kept(lengths, replayed)
        if (drafts > self._most_draft_tokens).any():
            raise ValueError(f"{drafts.max()} draft tokens; the state slots have room for {self._most_draft_tokens}.")
        stored = np.where(drafts < counts, replayed + counts - drafts, 0).astype(np.int32)
        self.lengths[slots] = lengths + stored
        return RecurrentRows(slots.astype(np.int32), lengths, replayed, stored)

    def take_back(self, rows: RecurrentRows) -> None:
        """Forget that the last forward of these slots was laid out: it has not run, and will be laid out again."""
        self.lengths[rows.slots] = rows.state_lengths

    def behind(self, slots: np.ndarray, positions: np.ndarray) -> RecurrentRows:
        """Lay out one draft row per slot at ``positions`` ``[B]``, after the rows of the last forward."""
        lengths = self.lengths[slots]
        replayed = (positions - lengths).astype(np.int32)
        self._expect_kept(lengths, replayed)
        return RecurrentRows(slots.astype(np.int32), lengths, replayed, np.zeros_like(replayed))

    def _expect_kept(self, lengths: np.ndarray, replayed: np.ndarray) -> None:
        """Check that the rows between stored states and new rows are kept: a failed forward must be forgotten."""
        if ((replayed < 0) | (replayed > self._most_draft_tokens)).any():
            raise RuntimeError(
                f"states have seen {lengths.tolist()} positions, and new rows come {replayed.tolist()} rows later; "
                f"expected 0 to {self._most_draft_tokens}, the draft rows that a slot keeps."
            )

    def _allocated(self, num_slots: int, i: int) -> tuple[Tensor, ...]:
        sizes, dtype = self._sizes[i]
        device = self._devices[i]
        try:
            return tuple(torch.zeros(num_slots, *size, dtype=dtype, device=device) for size in sizes)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            needed = num_slots * self._bytes_per_slot
            raise KVCacheAllocationError(
                f"recurrent states of {num_slots - 1} sequences need {needed / 2**30:.1f} GiB, which cannot be "
                f"allocated on {device}; lower max_batch_size, window_size or num_draft_tokens."
            ) from error
