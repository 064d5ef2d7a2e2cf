"""From a tape to a plan: drop what is not needed, move linears up, give buffers their memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from specdec_fast.program.plan.ir import (
    ARENA,
    INPUTS,
    LOGIT_ROWS,
    LOGITS,
    ROWS,
    SCRATCH,
    TAPS,
    Append,
    Buffer,
    Gather,
    Instruction,
    Linear,
    PackedLinear,
    Placed,
    RowOp,
)

_ALIGNMENT = 64  # bytes; a cache line


class Life(NamedTuple):
    """The first and the last time at which a buffer is needed."""

    first: int
    last: int


def without_unread(instructions: Sequence[Instruction], outputs: Collection[int]) -> list[Instruction]:
    """Drop instructions whose results are not read; the results of a forward are ``outputs`` and the KV entries."""
    needed = set(outputs)
    kept = []
    for instruction in reversed(instructions):
        if isinstance(instruction, Append) or not needed.isdisjoint(instruction.writes):
            needed.update(instruction.reads)
            kept.append(instruction)
    return kept[::-1]


def gathers_first(instructions: Sequence[Instruction], buffers: list[Buffer]) -> list[Instruction]:
    """Take rows before a linear instead of after it if nothing else reads its result; add the buffer of the rows."""
    ordered = list(instructions)
    for gather in [each for each in instructions if isinstance(each, Gather)]:
        writers = [each for each in ordered if gather.source in each.writes]
        readers = [each for each in ordered if gather.source in each.reads]
        linear = writers[-1] if writers else None
        if len(writers) + len(readers) > 2 or not isinstance(linear, Linear | PackedLinear) or linear.num_vectors > 1:
            continue
        source = buffers[linear.source]
        buffers.append(replace(source, domain=LOGIT_ROWS))
        taken = len(buffers) - 1
        ordered[ordered.index(gather)] = replace(linear, source=taken, out=gather.out)
        ordered[ordered.index(linear)] = Gather(linear.source, taken)
    return ordered


def linears_first(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Move every linear to directly after its input, so that row operations form fewer and longer fusions."""
    ordered: list[Instruction] = []
    for instruction in instructions:
        place = len(ordered)
        if isinstance(instruction, Linear | PackedLinear):
            while place and not set(ordered[place - 1].writes) & set(instruction.reads):
                place -= 1
            while place < len(ordered) and isinstance(ordered[place], Linear | PackedLinear):
                place += 1
        ordered.insert(place, instruction)
    return ordered


def placed(
    instructions: Sequence[Instruction],
    buffers: Sequence[Buffer],
    logits: int,
    taps: Sequence[int] = (),
    inputs: int | None = None,
) -> tuple[list[Placed], tuple[int, int], int]:
    """Give every buffer its memory.

    Several threads compute the rows of one group of row operations, each row after row. So shared memory can be reused
    from the next step on, and a thread's own memory from the next operation on.

    Args:
        instructions, buffers: all, in the order in which they run.
        logits: the buffer of the logits.
        taps: the buffers of the taps, in their order; a row of the hidden states has one after the other.
        inputs: the buffer of what the rows take besides their tokens, which is read only; None: nothing.

    Returns:
        The memory of every buffer, by its index; the bytes per row of each domain that are shared; those of a thread.
    """
    steps = _steps(instructions, buffers)
    by_step = _lives(instructions, steps.__getitem__)
    by_operation = _lives(instructions, lambda i: i)
    others = {n for i in instructions if not isinstance(i, RowOp) for n in (*i.reads, *i.writes)}
    is_local = {n: life.first == life.last and n not in others for n, life in by_step.items()}
    places = [Placed(LOGITS, buffer.domain, 0, buffer.size * buffer.dtype.itemsize) for buffer in buffers]
    spaces = {(ARENA, 0): _Space(), (ARENA, 1): _Space(), (SCRATCH, 0): _Space()}
    for number in sorted(by_step, key=lambda n: by_operation[n].first):
        if number in (logits, inputs) or number in taps:
            continue
        buffer = buffers[number]
        row_bytes = places[number].row_bytes
        place, life = (SCRATCH, by_operation[number]) if is_local[number] else (ARENA, by_step[number])
        space = spaces[place, 0 if place == SCRATCH else buffer.domain]
        places[number] = Placed(place, buffer.domain, space.take(row_bytes, life), row_bytes)
    offsets = [0, *accumulate(places[number].row_bytes for number in taps)]
    for number, offset in zip(taps, offsets, strict=False):
        places[number] = Placed(TAPS, ROWS, offset, offsets[-1])
    if inputs is not None:
        places[inputs] = Placed(INPUTS, ROWS, 0, places[inputs].row_bytes)
    return places, (spaces[ARENA, 0].size, spaces[ARENA, 1].size), spaces[SCRATCH, 0].size


def _steps(instructions: Sequence[Instruction], buffers: Sequence[Buffer]) -> list[int]:
    """Number the steps: consecutive row operations of one domain are one step."""
    steps: list[int] = []
    before: tuple[bool, int] | None = None
    for instruction in instructions:
        is_row_op = isinstance(instruction, RowOp)
        kind = (is_row_op, buffers[instruction.writes[0]].domain if is_row_op else ROWS)
        steps.append(steps[-1] + (not is_row_op or kind != before) if steps else 0)
        before = kind
    return steps


def _lives(instructions: Sequence[Instruction], time_of: Callable[[int], int]) -> dict[int, Life]:
    lives: dict[int, Life] = {}
    for index, instruction in enumerate(instructions):
        for number in (*instruction.reads, *instruction.writes):
            lives[number] = Life(lives[number].first if number in lives else time_of(index), time_of(index))
    return lives


class _Space:
    """Memory in which buffers share a place if they are not needed at the same time."""

    def __init__(self) -> None:
        self.size = 0
        self._taken: list[tuple[int, int, int]] = []  # begin, end, last use

    def take(self, num_bytes: int, life: Life) -> int:
        """Return the offset of ``num_bytes`` free bytes; calls come in the order in which lives begin."""
        self._taken = sorted(taken for taken in self._taken if taken[2] >= life.first)
        num_bytes += -num_bytes % _ALIGNMENT
        offset = 0
        for begin, end, _ in self._taken:
            if begin - offset >= num_bytes:
                break
            offset = max(offset, end)
        self._taken.append((offset, offset + num_bytes, life.last))
        self.size = max(self.size, offset + num_bytes)
        return offset
