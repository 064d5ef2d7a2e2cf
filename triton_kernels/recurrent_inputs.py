"""What the kernels of recurrent layers share: the rows that advance a state, and where their inputs come from."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(sequence, cu_seqlens, slots, state_lengths, num_replayed, num_stored):
    """Return of a sequence its slot, the position and the number of its rows, and what these are.

    The rows are the kept ones, then those of the forward; ``stored`` of them advance the stored state. The last number
    is the row of the forward that would stand at the place of the first kept one.
    """
    slot = tl.load(slots + sequence).to(tl.int64)
    position = tl.load(state_lengths + sequence)
    replayed = tl.load(num_replayed + sequence)
    first = tl.load(cu_seqlens + sequence)
    stored = tl.load(num_stored + sequence)
    count = replayed + tl.load(cu_seqlens + sequence + 1) - first
    return slot, position, count, replayed, stored, first.to(tl.int64) - replayed


@triton.jit
def load_and_keep(own, kept, place, size, is_own, to_keep):
    """Load the numbers at ``place`` of ``size`` as fp32: of ``own`` if ``is_own`` is 1, else of ``kept``.

    If ``to_keep`` is 1, they are stored in ``kept``. Conditions are numbers that bound a mask: a condition of another
    shape than the mask is none in Triton's interpreter.
    """
    given = tl.load(own + place, mask=place < is_own * size, other=0.0).to(tl.float32)
    numbers = given + tl.load(kept + place, mask=place < (1 - is_own) * size, other=0.0)  # one of them is 0
    tl.store(kept + place, numbers, mask=place < to_keep * size)
    return numbers
