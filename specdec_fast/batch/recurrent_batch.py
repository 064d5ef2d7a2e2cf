"""The rows of one forward for recurrent layers: whose they are, and which of them advance a stored state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RecurrentBatch:
    """The rows of one forward and the state slots that they start from; ``B`` sequences, ``T`` rows.

    A slot holds the state of one sequence after its first ``state_lengths[b]`` positions, and the inputs of later
    positions (*kept rows*): draft rows, which may be rejected. A forward advances the state over the kept rows that
    were accepted, then over the sequence's committed rows, and stores it. The other rows are draft rows: they start
    from that state, leave it as it is, and are kept. So rejecting rows copies nothing. Afterwards the state's length is
    ``state_lengths[b] + num_replayed[b] + num_committed[b]``.

    Rows advance one after the other, always by the same arithmetic. So the bits of a row depend on its sequence alone,
    not on how the rows before it were divided among forwards.
    """

    cu_seqlens: Tensor  # [B + 1] int32, the first row of each sequence, and the number of rows
    # [B] int32, the slot of each sequence. Slot 0 is scratch, for rows that pad a batch; every other slot appears at
    # most once.
    slots: Tensor
    state_lengths: Tensor  # [B] int32, positions that the stored state has seen; 0: it is zero, whatever the slot holds
    num_replayed: Tensor  # [B] int32, kept rows of the slot that were accepted, from position ``state_lengths[b]`` on
    num_committed: Tensor  # [B] int32, leading rows of the sequence that advance the stored state


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
