"""The rows of one forward for recurrent layers: whose they are, and which of them advance a stored state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RecurrentBatch:
    """The rows of one forward and the state slots that they start from; ``B`` sequences, ``T`` rows.

    A slot holds the state of one sequence after its first ``state_lengths[b]`` positions, and the inputs of later
    positions (*kept rows*): draft rows, which may be rejected. A forward takes the state over the kept rows that are
    replayed and then over the sequence's own rows. After ``num_stored[b]`` of them it stores the state, whose length is
    then ``state_lengths[b] + num_stored[b]``. Own rows after that are draft rows: they leave the stored state as it is,
    and are kept. So rejecting rows copies nothing.

    A chunk of a prompt stores all its rows. A verification replays the rows that the last one has accepted and stores
    them and its first row, a committed token. A drafter that computes one row after the other from its own tokens
    replays all rows since its last committed token, and stores none.

    Rows advance one after the other, always by the same arithmetic. So the bits of a row depend on its sequence alone,
    not on how the rows before it were divided among forwards.
    """

    cu_seqlens: Tensor  # [B + 1] int32, the first row of each sequence, and the number of rows
    # [B] int32, the slot of each sequence. Slot 0 is scratch, for rows that pad a batch; every other slot appears at
    # most once.
    slots: Tensor
    state_lengths: Tensor  # [B] int32, positions that the stored state has seen; 0: it is zero, whatever the slot holds
    num_replayed: Tensor  # [B] int32, kept rows of the slot that come first, from position ``state_lengths[b]`` on
    num_stored: Tensor  # [B] int32, how many rows, replayed ones first, advance the stored state

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The arrays in the order in which the kernels take them."""
        return self.cu_seqlens, self.slots, self.state_lengths, self.num_replayed, self.num_stored

    def to(self, device: torch.device) -> RecurrentBatch:
        """Return a copy on another device."""
        cu_seqlens, slots, lengths, replayed, stored = (array.to(device) for array in self.arrays)
        return RecurrentBatch(
            cu_seqlens=cu_seqlens, slots=slots, state_lengths=lengths, num_replayed=replayed, num_stored=stored
        )

    def one_by_one(self, owners: Tensor) -> list[RecurrentBatch]:
        """Return a batch for each row, to be computed one after the other; ``owners`` ``[T]`` are their sequences."""
        offsets = torch.arange(len(owners), device=owners.device) - self.cu_seqlens[owners]
        before = self.num_replayed[owners] + offsets  # rows since the stored state
        stored = self.num_stored[owners]
        done = torch.where(offsets > 0, torch.minimum(stored, before), 0)  # rows that earlier forwards have stored
        one = torch.arange(2, dtype=torch.int32, device=self.cu_seqlens.device)  # the copy of a list would wait
        arrays = (
            self.slots[owners],
            self.state_lengths[owners] + done,
            before - done,
            torch.minimum(stored, before + 1) - done,
        )
        rows = zip(*(array.int().split(1) for array in arrays), strict=True)
        return [
            RecurrentBatch(cu_seqlens=one, slots=slot, state_lengths=length, num_replayed=replayed, num_stored=new)
            for slot, length, replayed, new in rows
        ]


@dataclass(frozen=True, eq=False)
class LinearAttentionParams:
    """How one layer's recurrent state changes, and how it is read."""

    scale: float = 1.0  # factor on the queries, after their normalisation
    # whether the value that the state has for the key is subtracted from the new one (DeltaNet, arXiv 2406.06484)
    delta_rule: bool = True
    # keys and queries are divided by their length, sqrt(sum of squares + l2norm_eps); None: they are not
    l2norm_eps: float | None = None
    # [num_value_heads] fp32: a head's output is increased by its value times this number (D of Mamba-2)
    skip: Tensor | None = None
