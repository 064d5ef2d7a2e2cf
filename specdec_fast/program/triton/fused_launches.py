"""Which row operations the kernels of linears compute.

The *prefix* of the fusion after a linear joins it if it is elementwise in the outputs: the activation of gate, times
up; the sum with a residual. The rest of the fusion stays a launch. A fusion whose only result is the input of the next
linear, such as a norm, joins that one for few rows (``fused_linear.EitherWay``).
"""

from __future__ import annotations

from dataclasses import replace

from specdec_fast.program.plan.ir import ARENA, SCRATCH, Gather, Linear, Plan
from specdec_fast.program.triton.fused_linear import (
    MOST_FEATURES,
    EitherWay,
    FusedLaunch,
    FusedLinear,
    linears_of,
)
from specdec_fast.program.triton.launches import (
    PlannedLaunch,
    RowFusion,
    fusion_of,
    launches_of,
    readers_of,
)
from specdec_fast.program.triton.linear_kernel import linear_kernel
from specdec_fast.program.triton.row_code import NotEmittableError

_Readers = dict[int, set[int]]


def fused_launches_of(plan: Plan) -> list[FusedLaunch]:
    """Return the launches of a plan in which linears compute row operations too."""
    readers = readers_of(plan.instructions)
    return _with_beginnings(plan, _with_ends(plan, launches_of(plan), readers), readers)


def _with_ends(plan: Plan, launches: list[PlannedLaunch], readers: _Readers) -> list[PlannedLaunch | FusedLinear]:
    waiting = launches[::-1]
    result = list[PlannedLaunch | FusedLinear]()
    while waiting:
        launch = waiting.pop()
        fusion = waiting[-1] if waiting else None
        joined = _with_end(plan, linears_of(launch), fusion, readers) if isinstance(fusion, RowFusion) else None
        if joined is None:
            result.append(launch)
            continue
        fused, rest = joined
        waiting[-1:] = [] if rest is None else [rest]
        result.append(fused)
    return result


def _with_end(
    plan: Plan, steps: tuple[Linear, ...], fusion: RowFusion, readers: _Readers
) -> tuple[FusedLinear, RowFusion | None] | None:
    """Return linears with the prefix of the fusion after them, and the rest of it; None if they compute no prefix.

    Of all prefixes it is the one that adds the fewest stored bytes, and of equal ones the longest.
    """
    outputs = {step.out for step in steps}
    if len(steps) not in (1, 2) or len({step.weight.shape for step in steps}) > 1:
        return None
    if not all(plan.buffers[each].domain == fusion.domain and _is_internal(plan, each, readers) for each in outputs):
        return None
    best: tuple[int, FusedLinear, RowFusion | None] | None = None
    for length in range(1, len(fusion.steps) + 1):
        prefix, rest = _split(plan, fusion, length, readers)
        if any(readers[buffer] - {id(step) for step in prefix.steps} for buffer in outputs):
            continue  # the outputs are read later
        added = sum(plan.buffers[buffer].row_bytes for buffer in prefix.stored - fusion.stored)
        if added > sum(plan.buffers[buffer].row_bytes for buffer in outputs) or (best and added > best[0]):
            continue
        fused = _emittable(plan, FusedLinear(steps, fusion.domain, after=prefix))
        if fused is None and len(steps) == 1 and steps[0].weight.shape[0] % 2 == 0:
            fused = _emittable(plan, FusedLinear(steps, fusion.domain, after=prefix, has_halves=True))
        if fused is not None:
            best = added, fused, rest
    return None if best is None else best[1:]


def _is_internal(plan: Plan, buffer: int, readers: _Readers) -> bool:
    """Return whether a buffer is read by instructions alone: it has no logits and no hidden states."""
    return bool(readers.get(buffer)) and plan.buffers[buffer].place in (ARENA, SCRATCH)


def _split(plan: Plan, fusion: RowFusion, length: int, readers: _Readers) -> tuple[RowFusion, RowFusion | None]:
    if length == len(fusion.steps):
        return fusion, None
    prefix = fusion.steps[:length]
    rest = fusion.steps[length:]
    return fusion_of(plan, fusion.domain, prefix, readers), fusion_of(plan, fusion.domain, rest, readers)


def _emittable(plan: Plan, fused: FusedLinear) -> FusedLinear | None:
    try:
        linear_kernel(plan, fused)
    except NotEmittableError:
        return None
    return fused


def _with_beginnings(plan: Plan, launches: list[PlannedLaunch | FusedLinear], readers: _Readers) -> list[FusedLaunch]:
    result: list[FusedLaunch] = []
    for launch in launches:
        before = result[-2:] if result and isinstance(result[-1], Gather) else result[-1:]
        few = _with_beginning(plan, before, launch, readers)
        if few is None:
            result.append(launch)
            continue
        result[-len(before) :] = []
        many = tuple(each for each in before if isinstance(each, RowFusion | Gather))
        result.append(EitherWay(few, (*many, launch)))
    return result


def _with_beginning(
    plan: Plan, before: list[FusedLaunch], launch: PlannedLaunch | FusedLinear, readers: _Readers
) -> FusedLinear | None:
    """Return linears that compute their vectors from what the fusion before reads, and nothing else; None if not."""
    steps = linears_of(launch)
    if not steps or not before or steps[0].weight.shape[1] > MOST_FEATURES:
        return None
    fusion = before[0]
    if not isinstance(fusion, RowFusion):
        return None
    gather = before[1] if len(before) == 2 and isinstance(before[1], Gather) else None
    if len(fusion.stored) != 1 or len(before) != (1 if gather is None else 2):
        return None
    chain = [*fusion.stored] if gather is None else [*fusion.stored, gather.out]
    step_ids = {id(step) for step in steps}
    expected = [step_ids] if gather is None else [{id(gather)}, step_ids]
    if chain[-1] != steps[0].source or not all(_is_internal(plan, each, readers) for each in chain):
        return None
    if any(readers[each] != ids for each, ids in zip(chain, expected, strict=True)):
        return None
    fused = launch if isinstance(launch, FusedLinear) else FusedLinear(steps, plan.buffers[steps[0].out].domain)
    return _emittable(plan, replace(fused, before=fusion, gather=gather))
