"""The memory that the operations of a forward program allocate while they run."""

from __future__ import annotations

from collections.abc import Callable

from specdec_fast.program.plan.ir import (
    LOGIT_ROWS,
    Attend,
    AttendLinearly,
    Convolve,
    GroupedLinear,
    GroupedPackedLinear,
    Instruction,
    Linear,
    PackedLinear,
    Plan,
    Scan,
)
from specdec_fast.quantization.packed_weight import PackedWeight

# Of one task of attention (csrc/kernels/attention_task.h): positions of a tile, the most pairs of a row and a head, and
# the largest number of lanes to which a value's size is rounded up.
_TILE = 64
_MOST_VECTORS = 256
_LANES = 16
_FEWEST_ROWS = 16  # of a task, whatever the number of heads
# Channels of one task of a recurrent op, at most, and of a convolution (csrc/kernels/recurrent_channels.h).
_BLOCK = 64
_CONV_BLOCK = 16 * _BLOCK


def working_bytes(
    plan: Plan,
    num_rows: int,
    num_logit_rows: int,
    num_threads: int,
    linear_bytes: Callable[[tuple[int, int, int], bool, int], int],
    packed_linear_bytes: Callable[[int, PackedWeight, int], int],
) -> int:
    """Return an upper bound of what one operation of a program allocates while it runs.

    ``num_logit_rows`` are those whose logits are wanted. Each of ``num_threads`` has working memory of its own.
    ``linear_bytes`` returns what a linear allocates, from its rows, inputs and outputs, whether its weight is
    transposed, and the threads. ``packed_linear_bytes`` does of a quantised one, from its rows, weight and threads.
    """

    def of_packed(step: PackedLinear | GroupedPackedLinear) -> int:
        if isinstance(step, PackedLinear):
            rows = num_logit_rows if plan.buffers[step.source].domain == LOGIT_ROWS else num_rows
            return packed_linear_bytes(rows * step.num_vectors, step.weight, num_threads)
        copies = num_rows * (step.weight.in_features + step.weight.out_features) * step.dtype.itemsize
        return copies + packed_linear_bytes(num_rows, step.weight, num_threads)

    def of(step: Instruction) -> int:
        if isinstance(step, Linear):
            rows = num_logit_rows if plan.buffers[step.source].domain == LOGIT_ROWS else num_rows
            out_features, in_features = step.weight.shape
            sizes = rows * step.num_vectors, in_features, out_features
            return linear_bytes(sizes, not step.weight.is_contiguous(), num_threads)
        if isinstance(step, PackedLinear | GroupedPackedLinear):
            return of_packed(step)
        if isinstance(step, GroupedLinear):  # at worst every row chooses the same expert
            _, out_features, in_features = step.weight.shape
            copies = num_rows * (in_features + out_features) * step.weight.dtype.itemsize
            sizes = num_rows, in_features, out_features
            return copies + linear_bytes(sizes, not step.weight.is_contiguous(), num_threads)
        if isinstance(step, Attend):
            shape = plan.kv_shapes[step.layer]
            group = step.num_heads // shape.num_kv_heads
            vectors = min(num_rows * group, max(_FEWEST_ROWS * group, _MOST_VECTORS))
            columns = -(-shape.value_head_dim // _LANES) * _LANES
            numbers = vectors * (shape.key_head_dim + columns + 3 + _TILE)
            numbers += (shape.key_head_dim + 1) * _TILE + (_TILE + 1) * columns
            return numbers * 4 * num_threads
        if isinstance(step, Convolve | AttendLinearly | Scan):
            return _numbers_of_channels(step) * 4 * num_threads
        return 0

    return max((of(step) for step in plan.instructions), default=0)


def _numbers_of_channels(step: Convolve | AttendLinearly | Scan) -> int:
    """Return the numbers of one task of a recurrent op, as ``scratch_of`` in csrc/kernels/recurrent_work.h does."""
    if isinstance(step, Convolve):
        return 2 * (step.weight.shape[1] + 1) * _CONV_BLOCK
    if isinstance(step, AttendLinearly):
        _, _, key_dim, _ = step.shape
        return key_dim * (_BLOCK + 4)
    return step.A.shape[1] * (2 * _BLOCK + 2)
