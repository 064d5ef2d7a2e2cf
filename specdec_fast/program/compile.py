"""From a model to its forward program: record it twice, compare, plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec_fast.batch.ragged_batch import AttentionParams, RaggedBatch, Rows
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.hf_cache import PagedCache
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.model_watch import hooked_class
from specdec_fast.ops import Ops
from specdec_fast.program.ir import ROWS, Instruction, Operand, Plan, RowOp
from specdec_fast.program.memory_plan import linears_first, placed, without_unread
from specdec_fast.program.row_views import NotLowerableError
from specdec_fast.program.tape import Index, Tape
from specdec_fast.program.tracer import Recorder

# Numbers of rows, and of rows whose logits are wanted: odd and even, and unlikely to be a size of a model. There are
# two pairs, so that a size that is mistaken for the number of rows in one recording is not in the other.
_COUNTS = ((37, 23), (44, 29))
_SPAN = 8  # rows of a sequence; every model has so many positions
_PAGE_SIZE = 16

Forward = Callable[[Tensor, Tensor, PagedCache, Tensor], Tensor]
# While the context lasts, a forward passes every tap to the function: its index and its tensor, ``[1, T, H]``.
Tapped = Callable[[Callable[[int, Tensor], None]], AbstractContextManager[None]]


@dataclass(frozen=True)
class _Recorded:
    tape: Tape
    instructions: list[Instruction]
    logits: int  # the buffer of the logits
    vocab_size: int
    baked: set[int]  # addresses of storages of which the program keeps numbers
    taps: list[int]  # the buffers of the taps


class _RecordingCache(PagedCache):
    """A cache that writes and attends as a PagedCache does, and records both on the tape."""

    def __init__(self, recorder: Recorder, *args: Any) -> None:
        super().__init__(*args)
        self._recorder = recorder
        self._own_ops = self.ops
        self.ops = self.ops.replaced(grouped_linear=self._choose_experts)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer_idx: int, params: AttentionParams) -> Tensor:
        with self._recorder.paused():
            result = super().attend(query, key, value, layer_idx, params)
        if self.pool.layout.sources[layer_idx] == layer_idx:
            self._recorder.tape.append(layer_idx, key, value)
        self._recorder.tape.attend(layer_idx, query, params, result)
        return result

    def _choose_experts(self, rows: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with self._recorder.paused():
            result = self._own_ops.grouped_linear(rows, expert_ids, weight, bias)
        self._recorder.tape.grouped_linear(rows, expert_ids, weight, bias, result)
        return result


@torch.inference_mode()
def compile_forward(
    model: nn.Module,
    forward: Forward,
    layout: KVLayout,
    ops: Ops,
    sliding: frozenset[int],
    tapped: Tapped | None = None,
) -> Plan:
    """Record a model's forward, and plan its program.

    Args:
        model: the model, in eval mode.
        forward: runs the model: from ``[T]`` token ids and positions, a cache and ``[R]`` rows to their logits.
        layout: the layout of its KV cache.
        ops: the ops that the recorded runs use.
        sliding: layers that must pass their window to attention.
        tapped: collects the hidden states that are further outputs of the program; None: it has none. Without taps
            the program is the same, except for the copies of the taps.

    Returns:
        The plan from which an executor builds the program.

    Raises:
        NotLowerableError: the model does something that a program cannot express.

    """
    hooked = hooked_class(model)
    if hooked is not None:
        raise NotLowerableError(f"a {hooked} has forward hooks, which a program would not call")
    first, second = (_record(forward, layout, ops, sliding, tapped, counts) for counts in _COUNTS)
    tensors = [*model.parameters(), *model.buffers()]
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if (first.taps, _signature(first, own)) != (second.taps, _signature(second, own)):
        raise NotLowerableError("two batches are not computed in the same way")
    places, arena_bytes, scratch_bytes = placed(first.instructions, first.tape.buffers, first.logits, first.taps)
    return Plan(
        layout.dtype,
        layout.shapes,
        places,
        first.instructions,
        arena_bytes,
        scratch_bytes,
        first.vocab_size,
        first.tape.buffers[first.logits].dtype,
        tuple(tensor for tensor in tensors if tensor.untyped_storage().data_ptr() in first.baked),
        places[first.taps[0]].row_bytes if first.taps else 0,
    )


def _record(
    forward: Forward,
    layout: KVLayout,
    ops: Ops,
    sliding: frozenset[int],
    tapped: Tapped | None,
    counts: tuple[int, int],
) -> _Recorded:
    num_rows, num_logit_rows = counts
    batch, pool = _batch(layout, num_rows)
    tape = Tape(num_rows, num_logit_rows, layout.dtype)
    token_ids, positions = batch.token_ids[None], batch.positions[None]
    logit_rows = torch.arange(num_logit_rows, device=layout.device)
    for tensor, kind in ((token_ids, "token_ids"), (positions, "positions"), (logit_rows, "logit_rows")):
        tape.bind(tensor, Index(kind))
    recorder = Recorder(tape)
    cache = _RecordingCache(recorder, pool, batch, ops, sliding)
    taps: dict[int, int] = {}

    def collect(index: int, hidden: Tensor) -> None:
        taps[index] = _tap(tape, hidden)

    with nullcontext() if tapped is None else tapped(collect), recorder:
        logits = forward(token_ids, positions, cache, logit_rows)
    if cache.num_attended != layout.num_layers:
        raise NotLowerableError(f"{cache.num_attended} of {layout.num_layers} layers attend over pages")
    view = tape.row_view(logits)
    if (view.domain, view.axis, view.sizes[:2]) != (1, 1, (1, 1)) or logits.dim() != 3:
        raise NotLowerableError("logits are not computed for the wanted rows alone")
    if not view.is_dense or view.size != tape.buffers[view.buffer].size:
        view = tape.copied(view)
    in_order = [buffer for _, buffer in sorted(taps.items())]
    instructions = linears_first(without_unread(tape.instructions, [view.buffer, *in_order]))
    read = {each.untyped_storage().data_ptr() for instruction in instructions for each in _constants(instruction)}
    baked = recorder.computed_from | (recorder.met_rows - read)
    return _Recorded(tape, instructions, view.buffer, view.size, baked, in_order)


def _tap(tape: Tape, hidden: Tensor) -> int:
    """Record a copy of hidden states ``[1, T, H]``, because the model may change them in place; return its buffer."""
    view = tape.row_view(hidden)
    if (view.domain, view.axis, view.sizes[0], len(view.sizes)) != (ROWS, 1, 1, 3):
        raise NotLowerableError(f"hidden states of shape {list(hidden.shape)} where [1, rows, size] is expected")
    return tape.copied(view).buffer


def _constants(instruction: Instruction) -> list[Tensor]:
    """Return the constants that an instruction reads in place."""
    if isinstance(instruction, RowOp):
        return [operand.source for operand in instruction.inputs if isinstance(operand.source, Tensor)]
    return [value for value in vars(instruction).values() if isinstance(value, Tensor)]


def _batch(layout: KVLayout, num_rows: int) -> tuple[RaggedBatch, PagePool]:
    """Make a batch of several sequences, of which the last one may be shorter."""
    pool = PagePool(layout, (num_rows // _SPAN + 1) * _PAGE_SIZE, _PAGE_SIZE)
    starts = range(0, num_rows, _SPAN)
    for owner in starts:
        pool.add(owner)
    rows = [Rows(start, 0, min(_SPAN, num_rows - start)) for start in starts]
    return lay_out(pool, rows, torch.arange(num_rows, device=layout.device) % 2), pool  # any tokens will do


def _signature(recorded: _Recorded, own: set[int]) -> list[tuple[Any, ...]]:
    """Return what must be equal in every recording of a model; constants are compared by value."""
    return [(type(instruction).__name__, *_comparable(instruction, own)) for instruction in recorded.instructions]


def _comparable(instruction: Instruction, own: set[int]) -> tuple[Any, ...]:
    if isinstance(instruction, RowOp):
        operands = [_operand_key(operand, own) for operand in (*instruction.inputs, instruction.out)]
        return (instruction.code, instruction.shape, instruction.scalar, instruction.by_position, operands)
    fields = vars(instruction).values()
    return tuple(_constant_key(value, own) if isinstance(value, Tensor) else value for value in fields)


def _operand_key(operand: Operand, own: set[int]) -> tuple[Any, ...]:
    source = operand.source
    key = _constant_key(source, own) if isinstance(source, Tensor) else (type(source).__name__, source)
    return (key, operand.dtype, operand.offset, operand.strides, operand.length)


def _constant_key(constant: Tensor, own: set[int]) -> tuple[Any, ...]:
    if constant.untyped_storage().data_ptr() in own:
        return (constant.data_ptr(), constant.shape, constant.stride())
    return (constant.shape, constant.dtype, constant.flatten().tolist())
