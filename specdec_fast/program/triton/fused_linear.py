"""A launch that multiplies rows with matrices and computes row operations before and after that."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_fast.program.plan.ir import Gather, Linear
from specdec_fast.program.triton.launches import JointLinear, PlannedLaunch, RowFusion, Shared


@dataclass(frozen=True, eq=False)
class FusedLinear:
    """Linears of the same vectors, one vector per row, and the fusions that their kernel computes."""

    steps: tuple[Linear, ...]  # the linears
    domain: int  # of the rows that it computes
    before: RowFusion | None = None  # computes the vectors, which then are not stored. None: they are in memory.
    gather: Gather | None = None  # takes the rows between before and the linears; None: they are all rows
    # computes numbers from the outputs, which then are not stored. None: the outputs are stored.
    after: RowFusion | None = None
    has_halves: bool = False  # whether after combines both halves of the outputs of one linear

    @property
    def reads(self) -> list[int]:
        """The buffers that it reads, by their indices."""
        fusions = [fusion for fusion in (self.before, self.after) if fusion is not None]
        of_fusions = [buffer for fusion in fusions for step in fusion.steps for buffer in step.reads]
        return [*self.steps[0].reads, *([] if self.gather is None else self.gather.reads), *of_fusions]

    @property
    def dtype(self) -> torch.dtype:
        """Of vectors, matrices and outputs."""
        return self.steps[0].weight.dtype

    @property
    def in_features(self) -> int:
        """Numbers of a vector."""
        return self.steps[0].weight.shape[1]

    def matrices(self) -> list[tuple[Tensor, Tensor | None, int, int]]:
        """Return weights and bias of each matrix that the kernel reads, and buffer and offset of its outputs."""
        if not self.has_halves:
            return [(step.weight, step.bias, step.out, 0) for step in self.steps]
        (step,) = self.steps
        half = step.weight.shape[0] // 2
        biases = (None, None) if step.bias is None else step.bias.split(half)
        weights = step.weight.split(half)
        return [(weights[i], biases[i], step.out, i * half) for i in range(2)]


@dataclass(frozen=True, eq=False)
class EitherWay:
    """The same numbers in one launch for few rows, and in several for more."""

    few: FusedLinear  # the launch for at most MOST_ROWS rows
    many: tuple[PlannedLaunch | FusedLinear, ...]  # the launches for more rows


# Every program of a linear computes the statistics of all its rows again, which are loads of the whole row and a sum
# before the first product. Up to 16 rows a program has all rows. Such a program has four warps: up to 2,048 numbers,
# they add a row in the same order as the row's own kernel.
MOST_ROWS = 16
MOST_FEATURES = 2048

FusedLaunch = RowFusion | Shared | FusedLinear | EitherWay


def linears_of(launch: PlannedLaunch | FusedLinear) -> tuple[Linear, ...]:
    """Return the linears of a launch whose kernel may compute row operations; none if it may not.

    The kernel reads weights as they are stored, and one vector of each row.
    """
    steps = launch.steps if isinstance(launch, JointLinear | FusedLinear) else (launch,)
    linears = tuple(step for step in steps if isinstance(step, Linear))
    fits = all(step.weight.is_contiguous() and step.num_vectors == 1 for step in linears)
    return linears if linears and fits else ()
