"""Operations in place: which other tensors have the new numbers, and which keep the old ones.

A tape gives an operation's result a new buffer. Views of PyTorch share a buffer as they share memory; a copy of a
tensor (``clone``, ``contiguous``) has the tensor's buffer, too, until one of them is overwritten.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from specdec_fast.program.record.row_views import NotLowerableError, RowView
from specdec_fast.program.record.tape import Tape
from specdec_fast.program.record.tape_values import Complex, Overwritten, Value


def changed_in_place(tape: Tape, tensor: Tensor, before: Value | None) -> None:
    """Record that an operation has changed ``tensor``, whose value was ``before``, in place.

    Tensors that share its memory are outdated, unless the new numbers can be copied to the old place.
    """
    others = [each for each, _ in tape.of_memory(tensor) if each is not tensor]
    after = tape.value(tensor)
    if others and isinstance(before, RowView) and isinstance(after, RowView) and _is_own(tape, before, tensor):
        _keep_copies(tape, before, tensor)
        tape.row_op("copy", [after], before)
        tape.bind(tensor, before)
        return
    for other in others:
        tape.bind(other, Overwritten())


def writable(tape: Tape, tensor: Tensor) -> RowView:
    """Return the places of a tensor's numbers for writing: its memory is in one buffer, other than the inputs'."""
    view = tape.row_view(tensor)
    if not _is_own(tape, view, tensor):
        raise NotLowerableError("numbers are overwritten that are not in one buffer")
    _keep_copies(tape, view, tensor)
    return view


def _is_own(tape: Tape, view: RowView, tensor: Tensor) -> bool:
    """Return whether all tensors of a tensor's memory are views of its buffer, as they are of the memory."""
    others = [(each, value) for each, value in tape.of_memory(tensor) if each is not tensor]
    return view.buffer != tape.inputs and all(
        isinstance(value, RowView) and value.buffer == view.buffer and not _repeats(value, each)
        for each, value in [(tensor, view), *others]
    )


def _repeats(view: RowView, tensor: Tensor) -> bool:
    """Return whether numbers that have memory of their own are one number of the buffer."""
    axes = zip(view.sizes, view.strides, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 != memory_stride for size, stride, memory_stride in axes)


def _keep_copies(tape: Tape, view: RowView, tensor: Tensor) -> None:
    """Give tensors of the buffer, but of other memory, a buffer of their own, because this one will change."""
    of_memory = {id(each) for each, _ in tape.of_memory(tensor)}
    copies = [each for each in tape.of_buffer(view.buffer) if id(each[0]) not in of_memory]
    if not copies:
        return
    size = tape.buffers[view.buffer].size
    kept = tape.copied(replace(view, axis=0, sizes=(1, size), strides=(0, 1), offset=0)).buffer
    for each, value in copies:
        moved = replace(value.parts if isinstance(value, Complex) else value, buffer=kept)
        tape.bind(each, Complex(moved) if isinstance(value, Complex) else moved)
