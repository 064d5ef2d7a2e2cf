"""The kernels that a forward launches on a GPU, with the bytes that each moves and its floating-point operations.

All ways begin from the instructions of the forward program. *present*: PyTorch runs the model within a CUDA graph, one
kernel for each instruction, with rows padded as deterministic forwards pad them. *fused*: the launches of the program
(``program/triton/launches.py``). Row operations that follow one another, and the append of keys and values, are one
kernel, which keeps in registers what nothing else reads; linears of one input are one kernel.

Bytes: what a kernel reads and writes, each number once. Weights and constants count once per launch, everything else
per row; no result counts as found in a cache. Operations: two per weight and row; in attention two per number of a key
or value, row and query head; one per number that a row operation writes. A quantised linear is a launch, and one more
if it rounds its rows; turning codes into values counts as nothing, and products of integers as those of 16 bits, which
a tensor core computes at half the speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod

from torch import Tensor

from bench.model_step_.attention_pieces import PARTIAL_BYTES, Batch, num_pieces
from bench.model_step_.recording import Recorded, layer_of
from specdec_fast.errors import NotYetSupportedError
from specdec_fast.kv_cache.layer_layout import KVShape
from specdec_fast.planner.costs import Device
from specdec_fast.program.plan.ir import (
    Append,
    Attend,
    Gather,
    GroupedLinear,
    GroupedPackedLinear,
    Instruction,
    Linear,
    Operand,
    PackedLinear,
    Plan,
    Recurrent,
    RowOp,
)
from specdec_fast.program.triton.launches import JointLinear, PlannedLaunch, RowFusion, launches_of
from specdec_fast.runner.batch_invariance import ROW_MULTIPLE

LAUNCH_SECONDS = 2e-6  # of one kernel in a graph, besides what it reads and computes
PRESENT, FUSED = "present", "fused"
_CHOICE_LAUNCHES = 3  # of verify_chain
_STEP_BYTES = 4  # of what the integers of a rounded block are multiples of


@dataclass(frozen=True)
class Kernel:
    """One launch, or a few that do one thing.

    Attributes:
        name: what it computes.
        num_bytes: bytes that it reads and writes.
        flops: floating-point operations.
        launches: number of launches.

    """

    name: str
    num_bytes: float
    flops: float
    launches: int = 1

    def seconds(self, device: Device) -> float:
        """Return the larger of the times for bytes and for operations, and the time of the launches."""
        return max(self.num_bytes / device.bandwidth, self.flops / device.peak) + self.launches * LAUNCH_SECONDS


def forward_kernels(recorded: Recorded, batch: Batch, way: str) -> list[Kernel]:
    """Return the kernels of one forward of all layers and of the choice of its tokens, in their order.

    Args:
        recorded: the forward program.
        batch: the rows.
        way: ``PRESENT`` or ``FUSED``.

    """
    costs = _Costs(recorded.plan, batch, way)
    kernels = [(index, kernel) for index, group in costs.groups() for kernel in costs.kernels_of(group)]
    begin, end = layer_of(recorded.plan.instructions)
    before = [kernel for index, kernel in kernels if index < end]
    layer = [kernel for index, kernel in kernels if begin <= index < end]
    after = [kernel for index, kernel in kernels if index >= end]
    logits = batch.num_rows * recorded.plan.vocab_size
    choice = Kernel("choice of tokens", logits * recorded.plan.logits_dtype.itemsize, logits, _CHOICE_LAUNCHES)
    return [*before, *layer * (recorded.num_layers - recorded.num_recorded), *after, choice]


class _Costs:
    """Bytes and operations of groups of instructions, at the rows of one forward."""

    def __init__(self, plan: Plan, batch: Batch, way: str) -> None:
        self._plan, self._batch, self._way = plan, batch, way
        multiple = ROW_MULTIPLE if way == PRESENT else 1
        self._rows = ceil(batch.num_rows / multiple) * multiple
        self._itemsize = plan.dtype.itemsize
        self._last_read = {n: i for i, each in enumerate(plan.instructions) for n in each.reads}

    def groups(self) -> Iterator[tuple[int, list[Instruction]]]:
        """Yield the instructions of each kernel, and the index of the first one."""
        instructions = self._plan.instructions
        if self._way == PRESENT:
            yield from ((index, [each]) for index, each in enumerate(instructions))
            return
        index_of = {id(each): index for index, each in enumerate(instructions)}
        for launch in launches_of(self._plan):
            group = _instructions_of(launch)
            yield index_of[id(group[0])], group

    def kernels_of(self, group: list[Instruction]) -> Iterator[Kernel]:
        """Yield the kernel of a group, or two for attention in pieces.

        Raises:
            NotYetSupportedError: the group multiplies with experts, or is a recurrent layer's.

        """
        first = group[0]
        linears = [each for each in group if isinstance(each, Linear)]
        if linears:
            yield self._linear(linears)
        elif isinstance(first, Attend):
            yield from self._attention(first)
        elif isinstance(first, Gather):
            yield Kernel("gather rows", 2 * self._rows * self._plan.buffers[first.source].row_bytes, 0)
        elif isinstance(first, PackedLinear):
            yield from self._packed_linear(first)
        elif isinstance(first, GroupedLinear | GroupedPackedLinear):
            raise NotYetSupportedError("bench.model_step does not model experts: their bytes depend on the choices.")
        elif isinstance(first, Recurrent):
            raise NotYetSupportedError("bench.model_step does not model recurrent layers and their states.")
        else:
            yield self._row_operations(group)

    def _linear(self, group: list[Linear]) -> Kernel:
        vectors, (_, in_features) = self._rows * group[0].num_vectors, group[0].weight.shape
        out_features = sum(each.weight.shape[0] for each in group)
        weights = sum(t.numel() for each in group for t in (each.weight, each.bias) if t is not None)
        num_bytes = (weights + vectors * (in_features + out_features)) * self._itemsize
        return Kernel(f"linear {in_features} to {out_features}", num_bytes, 2 * vectors * in_features * out_features)

    def _packed_linear(self, step: PackedLinear) -> Iterator[Kernel]:
        """Yield the kernel that rounds the rows, if the weight asks for it, and that of the products."""
        weight = step.weight
        vectors = self._rows * step.num_vectors
        row_bytes = weight.in_features * self._itemsize
        if weight.rounds_rows:
            whole_bytes = weight.in_features + _STEP_BYTES * ceil(weight.in_features / weight.block_size)
            yield Kernel("rounding of rows", vectors * (row_bytes + whole_bytes), vectors * weight.in_features)
            row_bytes = whole_bytes
        biases = 0 if step.bias is None else step.bias.nbytes
        num_bytes = weight.nbytes + biases + vectors * (row_bytes + weight.out_features * self._itemsize)
        name = f"quantised linear {weight.in_features} to {weight.out_features}"
        yield Kernel(name, num_bytes, 2 * vectors * weight.in_features * weight.out_features)

    def _attention(self, attend: Attend) -> Iterator[Kernel]:
        shape, batch, rows = self._plan.kv_shapes[attend.layer], self._batch, self._batch.num_rows
        window = attend.sliding_window or attend.attention_chunk or batch.context
        context = min(batch.context, window)
        per_row = attend.num_heads * (shape.key_head_dim + shape.value_head_dim)
        num_bytes = (batch.batch_size * context * _numbers(shape) + rows * per_row) * self._itemsize
        pieces = num_pieces(self._plan, attend, batch, window)
        partial = rows * attend.num_heads * pieces * (shape.value_head_dim + 2) * PARTIAL_BYTES
        merged = rows * attend.num_heads * shape.value_head_dim
        computing = Kernel("attention", num_bytes + partial, 2 * rows * context * per_row)
        merging = Kernel("merge of attention", partial + merged * self._itemsize, pieces * merged)
        if not pieces:
            yield computing
        else:
            yield from (computing, merging)

    def _row_operations(self, group: list[Instruction]) -> Kernel:
        name = f"{len(group)} row operations" if len(group) > 1 else getattr(group[0], "code", "append")
        return Kernel(name, self._moved(group), self._rows * _num_written(group))

    def _moved(self, group: list[Instruction]) -> float:
        """Count what the group reads from before it, the constants, and what is read after it."""
        instructions = self._plan.instructions
        end = next(i for i, each in enumerate(instructions) if each is group[-1])
        once, indices = 0, 0
        read, written = _Moved(self._plan), _Moved(self._plan)
        for each in group:
            if isinstance(each, Linear):
                once += sum(t.nbytes for t in (each.weight, each.bias) if t is not None)
                written.add(each.out, each.weight.shape[0] * self._itemsize)
            elif isinstance(each, Append):
                indices += _numbers(self._plan.kv_shapes[each.layer]) * self._itemsize
            elif isinstance(each, RowOp):
                once += sum(_num_bytes(each, o) for o in each.inputs if _is_constant(each, o))
                indices += sum(_num_bytes(each, o) for o in each.inputs if each.code == "embedding")
            for number in {*each.reads} - written.keys():
                read.add(number, self._read_of(each, number))
            if isinstance(each, RowOp):
                written.add(each.writes[0], _num_bytes(each, each.out))
            elif isinstance(each, Gather):
                written.add(each.out, self._plan.buffers[each.source].row_bytes)
        later = sum(size for n, size in written.items() if self._last_read.get(n, end + 1) > end)
        return once + self._rows * (indices + sum(read.values()) + later)

    def _read_of(self, each: Instruction, number: int) -> int:
        """Return the bytes of a buffer's row that an instruction reads."""
        if isinstance(each, RowOp):
            own = [o for o in each.inputs if isinstance(o.source, int) and o.source == number]
            return sum(_num_bytes(each, operand) for operand in own)
        if isinstance(each, Linear):
            return each.weight.shape[1] * self._itemsize
        return self._plan.buffers[number].row_bytes


def _instructions_of(launch: PlannedLaunch) -> list[Instruction]:
    return list(launch.steps) if isinstance(launch, (RowFusion, JointLinear)) else [launch]


def _num_written(group: list[Instruction]) -> int:
    return sum(prod(each.shape) for each in group if isinstance(each, RowOp))


def _num_bytes(step: RowOp, operand: Operand) -> int:
    return _distinct(step.shape, operand) * operand.dtype.itemsize


def _is_constant(step: RowOp, operand: Operand) -> bool:
    return isinstance(operand.source, Tensor) and step.code != "embedding"


class _Moved(dict[int, int]):
    """Bytes per row by buffer, of each no more than it has."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def add(self, number: int, num_bytes: int) -> None:
        """Count ``num_bytes`` more of a buffer."""
        self[number] = min(self.get(number, 0) + num_bytes, self._plan.buffers[number].row_bytes)


def _numbers(shape: KVShape) -> int:
    """Return the numbers of a KV entry."""
    return shape.num_kv_heads * (shape.key_head_dim + shape.value_head_dim)


def _distinct(shape: tuple[int, ...], operand: Operand) -> int:
    """Return how many numbers an operand has; along an axis of stride 0 they are the same."""
    sizes = zip((*shape[:-1], operand.length), operand.strides, strict=True)
    return prod(size for size, stride in sizes if stride)
