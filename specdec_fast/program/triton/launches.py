"""From a plan to launches: what a GPU runs as one kernel, in order.

Consecutive row operations on one domain are one launch, a ``RowFusion``: each reads its own row alone, so one program
can compute a row through all of them, and results that nothing else reads never leave its registers. The append of keys
and values joins the fusion before it, because it writes numbers of the same row. Linears, grouped linears, attention,
recurrent ops, the choice of logit rows and exchanges between ranks are launches of their own: their rows share weights,
pages or states. Linears of one input, such as queries, keys and values, are one launch, a ``JointLinear``, if that
leaves every result its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec_fast.program.plan.ir import (
    ARENA,
    ROWS,
    SCRATCH,
    Append,
    Attend,
    BufferUse,
    Exchange,
    Gather,
    GroupedLinear,
    GroupedPackedLinear,
    Instruction,
    Linear,
    PackedLinear,
    Plan,
    Recurrent,
    RowOp,
)
from specdec_fast.triton_kernels.linear import MAX_WEIGHTS


@dataclass(frozen=True, eq=False)
class RowFusion:
    """Instructions that one kernel computes, row by row."""

    domain: int  # the rows that it computes
    steps: tuple[RowOp | Append, ...]  # row operations and appends, in order
    stored: frozenset[int]  # buffers that instructions outside of the fusion read, the logits and the taps


@dataclass(frozen=True, eq=False)
class JointLinear(BufferUse):
    """Linears of the same vectors that one kernel computes: see ``triton_kernels.linear.linears``."""

    steps: tuple[Linear, ...]  # two to MAX_WEIGHTS of them, in order

    @property
    def reads(self) -> list[int]:
        return self.steps[0].reads

    @property
    def writes(self) -> list[int]:
        return [buffer for step in self.steps for buffer in step.writes]


_Single = Linear | PackedLinear | GroupedLinear | GroupedPackedLinear | Attend | Recurrent | Gather | Exchange
Shared = _Single | JointLinear  # read weights, pages or states that rows share, or numbers of other ranks
PlannedLaunch = RowFusion | Shared


def launches_of(plan: Plan) -> list[PlannedLaunch]:
    """Return the launches of a plan, in the order of its instructions."""
    groups: list[tuple[int, list[Instruction]]] = []  # domain, or -1 for an instruction that is no row operation
    for step in plan.instructions:
        domain = _domain(plan, step)
        if groups and groups[-1][0] == domain:
            groups[-1][1].append(step)
        else:
            groups.append((domain, [step]))
    readers = readers_of(plan.instructions)
    launches: list[PlannedLaunch] = []
    for domain, steps in groups:
        if domain >= 0:
            fused = [step for step in steps if isinstance(step, RowOp | Append)]
            launches.append(fusion_of(plan, domain, fused, readers))
        else:
            launches += _joined([step for step in steps if not isinstance(step, RowOp | Append)])
    return launches


def fusion_of(plan: Plan, domain: int, steps: Sequence[RowOp | Append], readers: dict[int, set[int]]) -> RowFusion:
    """Return the fusion of some steps; ``readers`` are the ids of the instructions that read each buffer."""
    step_ids = {id(step) for step in steps}
    written = {buffer for step in steps for buffer in step.writes}
    stored = {b for b in written if readers.get(b, set()) - step_ids or plan.buffers[b].place not in (ARENA, SCRATCH)}
    return RowFusion(domain, tuple(steps), frozenset(stored))


def _joined(steps: Sequence[_Single]) -> list[Shared]:
    """Return steps that follow one another, with linears that may be one launch in the place of the first of them.

    A linear may be moved there across the steps between them: they write other buffers than those that it reads.
    """
    joined: list[list[_Single]] = []
    open_groups: dict[object, list[_Single]] = {}
    for step in steps:
        key = _joint_key(step)
        group = open_groups.get(key) if key is not None else None
        if group is not None and len(group) < MAX_WEIGHTS:
            group.append(step)
            continue
        joined.append([step])
        if key is not None:
            open_groups[key] = joined[-1]
    return [_launch_of(group) for group in joined]


def _joint_key(step: Instruction) -> object:
    """Return what linears of one launch have in common; None for what is a launch of its own.

    The kernel reads weights as they are stored. Its results lie one after the other, at multiples of 16 bytes for every
    number of rows, because Triton compiles another kernel for an argument with another alignment.
    """
    if not isinstance(step, Linear) or not step.weight.is_contiguous():
        return None
    weight = step.weight
    if weight.shape[0] * weight.itemsize % 16:
        return None
    return step.source, step.offset, step.num_vectors, weight.dtype, weight.shape[1], step.bias is not None


def _launch_of(group: Sequence[_Single]) -> Shared:
    return group[0] if len(group) == 1 else JointLinear(tuple(step for step in group if isinstance(step, Linear)))


def halves(plan: Plan, fusion: RowFusion, at: int) -> list[RowFusion]:
    """Return a fusion as two, the second of which begins with step ``at``; what passes between them is stored."""
    readers = readers_of(plan.instructions)
    return [fusion_of(plan, fusion.domain, part, readers) for part in (fusion.steps[:at], fusion.steps[at:])]


def readers_of(instructions: Sequence[Instruction]) -> dict[int, set[int]]:
    """Return the ids of the instructions that read each buffer."""
    readers: dict[int, set[int]] = {}
    for step in instructions:
        for buffer in step.reads:
            readers.setdefault(buffer, set()).add(id(step))
    return readers


def _domain(plan: Plan, step: Instruction) -> int:
    if isinstance(step, RowOp):
        return plan.buffers[step.writes[0]].domain
    return ROWS if isinstance(step, Append) else -1
