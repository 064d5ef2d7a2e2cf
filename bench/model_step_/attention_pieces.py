"""The rows of a forward, and the pieces into which attention splits their contexts."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from specdec_fast.batch.ragged_batch import PagedBatch
from specdec_fast.program.plan.ir import Attend, Plan
from specdec_fast.triton_kernels.paged_attention import launch_config, num_pieces_of

PARTIAL_BYTES = 4  # attention keeps partial results in fp32


@dataclass(frozen=True)
class Batch:
    """The rows of one forward; logits are computed for all of them.

    Attributes:
        batch_size: sequences.
        rows_each: rows of a sequence.
        context: KV positions of a sequence, with those of its rows.

    """

    batch_size: int
    rows_each: int
    context: int

    @property
    def num_rows(self) -> int:
        """Rows of all sequences."""
        return self.batch_size * self.rows_each


def num_pieces(plan: Plan, attend: Attend, batch: Batch, window: int) -> int:
    """Return the pieces of a context that attention merges in a second launch; 0 if it needs none.

    The rows are those of decoding or of a verification, of which each piece has a program of its own.
    """
    shape = plan.kv_shapes[attend.layer]
    group = attend.num_heads // shape.num_kv_heads
    launch = launch_config(plan.dtype, shape.key_head_dim, shape.value_head_dim, group)
    block = launch.constexprs["BLOCK_M"]
    none = torch.empty(0, dtype=torch.int32)
    paged = PagedBatch(
        cu_seqlens_q=none,
        seqused_k=none,
        block_table=none,
        max_seqlen_q=batch.rows_each,
        max_seqlen_k=batch.context,
    )
    pieces = num_pieces_of(paged, window, ceil(block / group) + 1)
    return pieces if pieces > 1 else 0
