"""From a model to its forward program: record it twice, compare, plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from specdec_fast.batch.ragged_batch import RaggedBatch, Rows
from specdec_fast.kv_cache.cache_rules import CacheRules
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.hf_cache import PagedCache
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.model_watch import hooked_class
from specdec_fast.ops import Ops
from specdec_fast.program.plan.ir import ROWS, Instruction, Operand, Plan, RowOp
from specdec_fast.program.plan.memory import gathers_first, linears_first, placed, without_unread
from specdec_fast.program.record.recording_ops import recording_ops
from specdec_fast.program.record.row_views import NotLowerableError
from specdec_fast.program.record.tape import Tape
from specdec_fast.program.record.tape_values import Index
from specdec_fast.program.record.tracer import Recorder
from specdec_fast.quantization.packed_weight import PackedWeight

# Numbers of rows, and of rows whose logits are wanted: odd and even, and unlikely to be a size of a model. There are
# two pairs, so that a size that is mistaken for the number of rows in one recording is not in the other.
_COUNTS = ((37, 23), (44, 29))
_SPAN = 8  # rows of a sequence; every model has so many positions
_PAGE_SIZE = 16

PagedForward = Callable[[Tensor, Tensor, PagedCache, Tensor], Tensor]
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


# What is recorded: from a pool, a batch and the ``[R]`` rows whose logits are wanted to the logits, and the buffers of
# the taps. It computes with ``recording_ops``.
_Run = Callable[[Recorder, PagePool, RaggedBatch, Tensor], tuple[Tensor, list[int]]]


@dataclass(frozen=True)
class RowFunction:
    """A function of rows, such as the layers of a drafter, that a program can compute instead."""

    # from ops, a pool, a batch of T rows, what the rows take besides their tokens ([T, input_size]), and the
    # [R] rows whose logits are wanted (None: all), to the logits [R, vocab_size] and the hidden states [T,
    # hidden_size] or None. It calls append_kv_, paged_attention, linear and grouped_linear of the ops
    # that it receives, with the pages of the pool and the batch as they are. A row may depend on no other row except
    # through the pages.
    run: Callable[[Ops, PagePool, RaggedBatch, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
    layout: KVLayout  # the layout of its KV entries
    input_size: int  # numbers that a row takes besides its token, in the dtype of the layout
    hidden_size: int = 0  # numbers of its hidden state, in the same dtype; 0 if run returns none


@torch.inference_mode()
def compile_forward(
    model: nn.Module,
    forward: PagedForward,
    layout: KVLayout,
    ops: Ops,
    rules: CacheRules,
    tapped: Tapped | None = None,
    max_positions: int | None = None,
    cache_class: type[PagedCache] = PagedCache,
) -> Plan:
    """Record a model's forward, and plan its program.

    Args:
        model: in eval mode.
        forward: from ``[T]`` token ids and positions, a cache and ``[R]`` rows to their logits.
        layout: of the model's KV cache.
        ops: the recorded runs use them.
        rules: of the model's KV cache.
        tapped: collects the hidden states that are further outputs of the program; None: it has none, and is the same
            except for the copies of the taps.
        max_positions: the program will compute positions below it only; None: any.
        cache_class: of the cache that the forward takes.
    """
    if layout.indexers:
        raise NotLowerableError("its indexers select the positions over which each row attends")
    hooked = hooked_class(model)
    if hooked is not None:
        raise NotLowerableError(f"a {hooked} has forward hooks, which a program would not call")

    def run(recorder: Recorder, pool: PagePool, batch: RaggedBatch, logit_rows: Tensor) -> tuple[Tensor, list[int]]:
        cache = cache_class(pool, batch, recording_ops(recorder, ops, pool, batch), rules)
        taps: dict[int, int] = {}

        def collect(index: int, hidden: Tensor) -> None:
            taps[index] = _tap(recorder.tape, hidden)

        with nullcontext() if tapped is None else tapped(collect):
            logits = forward(batch.token_ids[None], batch.positions[None], cache, logit_rows)
        if cache.num_attended != layout.num_layers:
            raise NotLowerableError(f"{cache.num_attended} of {layout.num_layers} layers attend over pages")
        if cache.num_advanced != len(layout.states):
            raise NotLowerableError(f"{cache.num_advanced} of {len(layout.states)} recurrent calls are made")
        return logits, [buffer for _, buffer in sorted(taps.items())]

    return _planned(run, layout, 0, [*model.parameters(), *model.buffers()], max_positions)


@torch.inference_mode()
def compile_rows(function: RowFunction, ops: Ops) -> Plan:
    """Record a function of rows with the given ops, and plan its program."""
    layout = function.layout

    def run(recorder: Recorder, pool: PagePool, batch: RaggedBatch, logit_rows: Tensor) -> tuple[Tensor, list[int]]:
        with recorder.paused():
            inputs = torch.ones(len(batch.token_ids), function.input_size, dtype=layout.dtype, device=layout.device)
        recorder.tape.bind_inputs(inputs)
        recorded_ops = recording_ops(recorder, ops, pool, batch)
        logits, hidden = function.run(recorded_ops, pool, batch, inputs, logit_rows)
        return logits, [] if hidden is None else [_tap(recorder.tape, hidden)]

    return _planned(run, layout, function.input_size, [])


def _planned(
    run: _Run, layout: KVLayout, input_size: int, tensors: list[Tensor], max_positions: int | None = None
) -> Plan:
    """Record twice, compare, plan; ``tensors`` are a model's parameters and buffers, in which changes are watched."""
    first, second = (_record(run, layout, counts, max_positions) for counts in _COUNTS)
    watched = {tensor.untyped_storage().data_ptr() for tensor in tensors} | (
        _addresses(first.instructions) & _addresses(second.instructions)
    )
    if (first.taps, _signature(first, watched)) != (second.taps, _signature(second, watched)):
        raise NotLowerableError("two batches are not computed in the same way")
    tape = first.tape
    places, arena_bytes, scratch_bytes = placed(first.instructions, tape.buffers, first.logits, first.taps, tape.inputs)
    return Plan(
        dtype=layout.dtype,
        kv_shapes=layout.shapes,
        buffers=places,
        instructions=first.instructions,
        arena_bytes=arena_bytes,
        scratch_bytes=scratch_bytes,
        vocab_size=first.vocab_size,
        logits_dtype=tape.buffers[first.logits].dtype,
        baked=tuple(tensor for tensor in tensors if tensor.untyped_storage().data_ptr() in first.baked),
        tap_bytes=places[first.taps[0]].row_bytes if first.taps else 0,
        input_bytes=input_size * layout.dtype.itemsize,
    )


def _record(run: _Run, layout: KVLayout, counts: tuple[int, int], max_positions: int | None) -> _Recorded:
    num_rows, num_logit_rows = counts
    batch, pool = _batch(layout, num_rows)
    tape = Tape(num_rows, num_logit_rows, layout.dtype, max_positions)
    logit_rows = torch.arange(num_logit_rows, device=layout.device)
    for tensor, kind in ((batch.token_ids, "token_ids"), (batch.positions, "positions"), (logit_rows, "logit_rows")):
        tape.bind(tensor, Index(kind))
    recorder = Recorder(tape)
    with recorder:
        logits, taps = run(recorder, pool, batch, logit_rows)
    view = tape.row_view(logits)
    if (view.axis, prod(view.sizes[:-2])) != (logits.dim() - 2, 1) or logits.dim() not in (2, 3):
        raise NotLowerableError("logits are not computed for the wanted rows alone")
    if view.domain == ROWS:  # a model that knows no wanted rows computes those of all
        wanted = logits.index_select(view.axis, logit_rows)
        tape.gather(view, wanted)
        view = tape.row_view(wanted)
    if not view.is_dense or view.size != tape.buffers[view.buffer].size:
        view = tape.copied(view)
    needed = gathers_first(without_unread(tape.instructions, [view.buffer, *taps]), tape.buffers)
    instructions = linears_first(needed)
    read = _addresses(instructions)
    baked = recorder.computed_from | (recorder.met_rows - read)
    return _Recorded(tape, instructions, view.buffer, view.size, baked, taps)


def _tap(tape: Tape, hidden: Tensor) -> int:
    """Record a copy of ``[1, T, H]`` or ``[T, H]``, which the model may change in place; return its buffer."""
    view = tape.row_view(hidden)
    if (view.domain, view.axis, prod(view.sizes[:-2])) != (ROWS, hidden.dim() - 2, 1) or hidden.dim() not in (2, 3):
        raise NotLowerableError(f"hidden states of shape {list(hidden.shape)} where [1, rows, size] is expected")
    return tape.copied(view).buffer


def _addresses(instructions: list[Instruction]) -> set[int]:
    return {each.untyped_storage().data_ptr() for instruction in instructions for each in _constants(instruction)}


def _constants(instruction: Instruction) -> list[Tensor]:
    if isinstance(instruction, RowOp):
        return [operand.source for operand in instruction.inputs if isinstance(operand.source, Tensor)]
    return [value for value in _fields(instruction) if isinstance(value, Tensor)]


def _fields(instruction: Instruction) -> list[Any]:
    """Return the fields of an instruction; those of a packed weight instead of it."""
    values = vars(instruction).values()
    parts = [vars(value).values() if isinstance(value, PackedWeight) else (value,) for value in values]
    return list(chain.from_iterable(parts))


def _batch(layout: KVLayout, num_rows: int) -> tuple[RaggedBatch, PagePool]:
    pool = PagePool(layout, (num_rows // _SPAN + 1) * _PAGE_SIZE, _PAGE_SIZE)
    starts = range(0, num_rows, _SPAN)
    for owner in starts:
        pool.add(owner)
    rows = [Rows(start, 0, min(_SPAN, num_rows - start)) for start in starts]
    return lay_out(pool, rows, torch.arange(num_rows, device=layout.device) % 2), pool  # any tokens will do


def _signature(recorded: _Recorded, watched: set[int]) -> list[tuple[Any, ...]]:
    """Return what must be equal in every recording of a model; numbers as bits or text, because a NaN equals none."""
    return [(type(instruction).__name__, *_comparable(instruction, watched)) for instruction in recorded.instructions]


def _comparable(instruction: Instruction, watched: set[int]) -> tuple[Any, ...]:
    if isinstance(instruction, RowOp):
        operands = [_operand_key(operand, watched) for operand in (*instruction.inputs, instruction.out)]
        return (instruction.code, instruction.shape, repr(instruction.scalar), instruction.by_position, operands)
    fields = _fields(instruction)
    return tuple(_constant_key(value, watched) if isinstance(value, Tensor) else value for value in fields)


def _operand_key(operand: Operand, watched: set[int]) -> tuple[Any, ...]:
    source = operand.source
    key = _constant_key(source, watched) if isinstance(source, Tensor) else (type(source).__name__, repr(source))
    return (key, operand.dtype, operand.offset, operand.strides, operand.length)


def _constant_key(constant: Tensor, watched: set[int]) -> tuple[Any, ...]:
    if constant.untyped_storage().data_ptr() in watched:
        return (constant.data_ptr(), constant.shape, constant.stride())
    numbers = constant.flatten().resolve_conj().resolve_neg().contiguous()
    return (constant.shape, constant.dtype, bytes(numbers.view(torch.uint8).cpu().numpy()))
