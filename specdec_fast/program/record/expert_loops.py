"""Loops over experts, as models write them that do not leave their experts to transformers.

Such a loop finds the experts that some row has chosen, and for each of them the rows and their choices; it computes
these rows, weights them, and adds them to the result (``one_hot``, ``nonzero``, ``where``, ``index_add_``). While it is
recorded, every expert is visited, with every row: what a visit computes is recorded as if the row's first choice were
that expert. Visits that are the same but for weights that lie one after the other are one group. A group is recorded
for every choice of a row, with the weights of the expert that was chosen there (``GroupedLinear``).

A row's result may not depend on other rows, so the visit of an expert that the row has not chosen has no effect on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specdec_fast.program.plan.ir import MAX_RANK, OF_ROW, GroupedLinear, Instruction, Linear, Operand, RowOp
from specdec_fast.program.record.row_views import NotLowerableError, RowView
from specdec_fast.program.record.tape import Tape
from specdec_fast.program.record.tape_values import OfAllRows, Overwritten

_MOST_GROUPS = 4


@dataclass(frozen=True)
class _Visit:
    """What a visit computes, and the buffers from ``first`` on that it has made; ``weights`` are read per choice."""

    instructions: list[Instruction]
    first: int
    states: RowView
    weights: dict[int, int]  # from the id of a copy to the distance between the numbers of two choices


class ExpertLoop:
    """The loop over ``num_experts`` experts, among which the numbers at ``ids`` ``[T, num_choices]`` choose."""

    def __init__(self, tape: Tape, ids: RowView, num_experts: int) -> None:
        self.ids = ids
        self.num_experts = num_experts
        self.num_choices = ids.sizes[1]
        self._tape = tape
        self._groups: list[tuple[int, _Visit]] = []  # with the first expert of each
        self._next = 0
        self._start = -1
        self._first = 0
        self._end = 0
        self._weights: dict[int, int] = {}

    @property
    def num_rows(self) -> int:
        """Rows of the recording."""
        return self._tape.counts[self.ids.domain]

    def begin(self, expert: int) -> None:
        """Begin the visit of an expert; experts are visited in their order."""
        if expert != self._next or self._start >= 0:
            raise NotLowerableError("a loop that does not visit expert after expert")
        if expert and len(self._tape.instructions) != self._end:  # groups are recorded after the last visit
            raise NotLowerableError("a loop that computes between its visits")
        self._start = len(self._tape.instructions)
        self._first = len(self._tape.buffers)
        self._weights = {}

    def expect_visit(self, expert: int) -> None:
        """Refuse what is not part of the visit of an expert."""
        if expert != self._next or self._start < 0:
            raise NotLowerableError("rows of an expert are used outside of its visit")

    def of_choices(self, view: RowView, out: RowView) -> None:
        """Record that ``out`` ``[T, ...]`` is what ``view`` ``[T, num_choices, ...]`` has for the visited choice."""
        self._tape.row_op("copy", [view.without(1, 0)], out)
        self._weights[id(self._tape.instructions[-1])] = view.strides[1]

    def end(self, states: RowView) -> bool:
        """End a visit that adds ``states`` ``[T, ...]`` to the result; return whether it was the last one."""
        tape = self._tape
        expert = self._next
        visit = _Visit(tape.instructions[self._start :], self._first, states, self._weights)
        del tape.instructions[self._start :]
        for buffer in range(self._first, len(tape.buffers)):
            for tensor, _ in tape.of_buffer(buffer):  # what a visit has computed is not known after it
                tape.bind(tensor, Overwritten())
        if not self._groups or not _continues(*self._groups[-1], visit, expert):
            self._groups.append((expert, visit))
        if len(self._groups) > _MOST_GROUPS:
            raise NotLowerableError("experts that are computed in too many different ways")
        self._next = expert + 1
        self._start = -1
        self._end = len(tape.instructions)
        return self._next == self.num_experts

    def added_to(self, target: RowView) -> RowView:
        """Record the groups; return the sum of ``target`` and what the chosen experts add, in the order of choices."""
        ends = [first for first, _ in self._groups[1:]] + [self.num_experts]
        for (first, visit), end in zip(self._groups, ends, strict=True):
            states = self._of_all_choices(visit, first, end - first)
            total = states.without(1, 0)
            for choice in range(1, self.num_choices):
                added = self._fresh(total.sizes, torch.float32)
                self._tape.row_op("add", [total, states.without(1, choice)], added)
                total = added
            out = self._fresh(target.sizes, target.dtype)
            self._tape.row_op("add", [target, total], out)
            target = out
        return target

    def _fresh(self, sizes: tuple[int, ...], dtype: torch.dtype) -> RowView:
        return self._tape.fresh(self.ids.domain, 0, sizes, dtype)

    def _of_all_choices(self, visit: _Visit, first: int, count: int) -> RowView:
        """Record a visit for every choice; return ``[T, num_choices, ...]``, 0 for experts of other groups."""
        tape = self._tape
        ids = self.ids
        is_all = count == self.num_experts
        if not is_all:
            shifted, bounded, chosen = (self._fresh(ids.sizes, torch.float32) for _ in range(3))
            tape.row_op("sub", [ids, float(first)], shifted)
            tape.row_op("maximum", [shifted, 0.0], bounded)
            tape.row_op("minimum", [bounded, float(count - 1)], chosen)
        else:
            chosen = ids if ids.is_dense else tape.copied(ids)
        states = _Repeated(tape, visit, chosen, count).states()
        if is_all:
            return states
        inside = self._fresh(ids.sizes, torch.bool)
        masked = self._fresh(states.sizes, states.dtype)
        tape.row_op("eq", [shifted, chosen], inside)
        sizes = (*inside.sizes, *[1] * (len(states.sizes) - 2))
        is_own = replace(inside, sizes=sizes, strides=(*inside.strides, *[0] * (len(states.sizes) - 2)))
        tape.row_op("where", [is_own, states, 0.0], masked)
        return masked


@dataclass(frozen=True, eq=False)
class OfLoop(OfAllRows):
    """A tensor by which a loop over experts finds the rows of each of them."""

    # "one_hot"; "counts" and "chosen", per expert; "mask" of an expert's rows; their "rows" and "choices"; or the
    # "sums" of the experts visited so far
    kind: str
    loop: ExpertLoop  # the loop
    axes: tuple[str, ...] = ()  # what the axes of "one_hot" and "mask" are: "rows", "choices", "experts"
    expert: int = 0  # that of a mask, rows and choices
    target: RowView | None = None  # the value to which the sums are added

    def with_axes(self, axes: tuple[str, ...]) -> OfLoop:
        """Return the same with axes in another order."""
        return replace(self, axes=axes)


class _Repeated:
    """The instructions of a visit, for all choices of a row: every buffer of it becomes one per choice."""

    def __init__(self, tape: Tape, visit: _Visit, chosen: RowView, count: int) -> None:
        self._tape = tape
        self._visit = visit
        self._chosen = chosen
        self._count = count
        self._num_choices = chosen.sizes[1]
        self._buffers: dict[int, int] = {}

    def states(self) -> RowView:
        for step in self._visit.instructions:
            if isinstance(step, RowOp) and step.code not in ("embedding", *OF_ROW.values()):
                self._row_op(step)
            elif isinstance(step, Linear):
                self._linear(step)
            else:
                raise NotLowerableError("experts that are more than row operations and linear layers")
        view = self._visit.states
        buffer, stride = self._placed(view.buffer)
        sizes = (1, self._num_choices, *view.sizes[1:])
        strides = (0, stride, *view.strides[1:])
        return replace(view, buffer=buffer, sizes=sizes, strides=strides)

    def _placed(self, buffer: int) -> tuple[int, int]:
        if buffer < self._visit.first:
            return buffer, 0
        size = self._tape.buffers[buffer].size
        if buffer not in self._buffers:
            self._buffers[buffer] = len(self._tape.buffers)
            self._tape.buffers.append(replace(self._tape.buffers[buffer], size=size * self._num_choices))
        return self._buffers[buffer], size

    def _row_op(self, step: RowOp) -> None:
        distance = self._visit.weights.get(id(step))
        if len(step.shape) == MAX_RANK:
            raise NotLowerableError(f"experts that compute {step.code} over {MAX_RANK} axes")

        def of_all(operand: Operand, distance: int | None = None) -> Operand:
            source = operand.source
            stride = 0
            if isinstance(source, int):
                source, stride = self._placed(source)
            return replace(operand, source=source, strides=(distance or stride, *operand.strides))

        if isinstance(step.out.source, int) and step.out.source < self._visit.first:
            raise NotLowerableError("experts that change tensors in place")
        inputs = tuple(of_all(each, distance) for each in step.inputs)
        out = of_all(step.out)
        self._tape.instructions.append(replace(step, shape=(self._num_choices, *step.shape), inputs=inputs, out=out))

    def _linear(self, step: Linear) -> None:
        out_features, in_features = step.weight.shape
        source, stride = self._placed(step.source)
        if step.num_vectors != 1 or (stride and (stride, step.offset) != (in_features, 0)):
            raise NotLowerableError("experts whose linear layers have several vectors per row")
        sizes = self._count, *step.weight.shape
        weight = step.weight.as_strided(sizes, (out_features * in_features, *step.weight.stride()))
        bias = None if step.bias is None else step.bias.as_strided((self._count, out_features), (out_features, 1))
        of_all = GroupedLinear(
            source=source,
            offset=step.offset,
            num_vectors=self._num_choices if stride else 1,
            experts=self._chosen.buffer,
            experts_offset=self._chosen.offset,
            choices=self._num_choices,
            weight=weight,
            bias=bias,
            out=self._placed(step.out)[0],
        )
        self._tape.instructions.append(of_all)


def _continues(first_expert: int, first: _Visit, visit: _Visit, expert: int) -> bool:
    """Return whether a visit is the first one of a group with the weights of another expert."""
    if len(first.instructions) != len(visit.instructions) or _place(first.states, first) != _place(visit.states, visit):
        return False
    pairs = zip(first.instructions, visit.instructions, strict=True)
    return all(_is_same(one, first, other, visit, expert - first_expert) for one, other in pairs)


def _place(view: RowView, visit: _Visit) -> RowView:
    return replace(view, buffer=_relative(view.buffer, visit))


def _relative(buffer: int, visit: _Visit) -> int:
    return -1 - (buffer - visit.first) if buffer >= visit.first else buffer


def _is_same(one: Instruction, first: _Visit, other: Instruction, visit: _Visit, apart: int) -> bool:
    if isinstance(one, Linear) and isinstance(other, Linear):
        keys = [
            (_relative(s.source, v), s.offset, s.num_vectors, _relative(s.out, v), s.weight.shape, s.weight.stride())
            for s, v in ((one, first), (other, visit))
        ]
        tensors = [(one.weight, other.weight), (one.bias, other.bias)]
        return keys[0] == keys[1] and all(_lie_apart(a, b, apart) for a, b in tensors)
    if isinstance(one, RowOp) and isinstance(other, RowOp):
        keys_of_row = [
            (s.code, s.shape, s.scalar, s.by_position, v.weights.get(id(s)), [_key(o, v) for o in (*s.inputs, s.out)])
            for s, v in ((one, first), (other, visit))
        ]
        constants = zip(one.inputs, other.inputs, strict=False)
        return keys_of_row[0] == keys_of_row[1] and all(_are_equal(a.source, b.source) for a, b in constants)
    return False


def _key(operand: Operand, visit: _Visit) -> tuple[Any, ...]:
    source = operand.source
    known: int | float | None = None
    if isinstance(source, int):
        known = _relative(source, visit)
    elif not isinstance(source, Tensor):
        known = source
    return (type(source), known, operand.dtype, operand.offset, operand.strides, operand.length)


def _lie_apart(one: Tensor | None, other: Tensor | None, apart: int) -> bool:
    """Return whether the second tensor lies as many times its size behind the first one, in the same memory."""
    if one is None or other is None:
        return one is other
    same_memory = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return same_memory and other.data_ptr() - one.data_ptr() == apart * one.numel() * one.itemsize


def _are_equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and (one.data_ptr() == other.data_ptr() or torch.equal(one, other))
    return True
