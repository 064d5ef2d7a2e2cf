"""Forward programs on a GPU: one Triton kernel per run of row operations, and the ops for everything else.

The kernels compute what the C++ executor computes, from the same instructions. Linears and attention run on the ops
that the engine chose, which are those of Triton; linears of one input are launched together. Buffers are allocated when
they are written and freed after their last use, because the ops allocate their results too; inside a CUDA graph the
graph's own memory serves them.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from hashlib import sha256
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.batch.ragged_batch import AttentionParams, RaggedBatch
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.program.ir import LOGIT_ROWS, LOGITS, TAPS, Attend, Gather, GroupedLinear, Linear, Plan, RowOp
from specdec_fast.program.launches import JointLinear, Launch, RowRun, Shared, halves, launches_of
from specdec_fast.program.row_kernel import RowKernel, row_kernel
from specdec_fast.program.row_values import NotEmittableError
from specdec_fast.program.row_views import NotLowerableError
from specdec_fast.triton_kernels import row_functions
from specdec_fast.triton_kernels.linear import linears
from specdec_fast.triton_kernels.overlap import overlaps, wait
from specdec_fast.triton_kernels.variant import Launch as KernelLaunch

# A product and a sum are rounded one after the other, as the instructions say.
OPTIONS = {"enable_fp_fusion": False}

Prepared = tuple[RowRun, RowKernel] | Shared


def kernels_of(plan: Plan) -> list[Prepared]:
    """Return the launches of a plan, with the kernels of its runs.

    Raises:
        NotLowerableError: an instruction has no counterpart in Triton.

    """
    waiting: list[Launch] = launches_of(plan)[::-1]
    found: list[Prepared] = []
    while waiting:
        launch = waiting.pop()
        if not isinstance(launch, RowRun):
            found.append(launch)
            continue
        try:
            found.append((launch, row_kernel(plan, launch)))
        except NotEmittableError as error:
            if error.step <= 0:
                raise NotLowerableError(str(error)) from None
            waiting += halves(plan, launch, error.step)[::-1]
    return found


@cache
def compiled(source: str) -> Any:
    """Return the kernel of a module; equal sources, as those of a model's layers, are compiled once."""
    name = f"<row kernel {sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # Triton reads it
    functions = {each: getattr(row_functions, each) for each in dir(row_functions) if each.endswith("_of")}
    namespace: dict[str, Any] = {"triton": triton, "tl": tl, "wait": wait, "__name__": name, **functions}
    exec(compile(source, name, "exec"), namespace)
    return namespace["row_kernel"]


def launch_of(kernel: RowKernel) -> KernelLaunch:
    """Return the compile-time choices of a launch."""
    return KernelLaunch({"OVERLAPS": overlaps()}, kernel.num_warps)


class TritonProgram:
    """A model's forward as few launches.

    Args:
        plan: the plan of the program. The program keeps its constants alive, including the model's weights, and reads
            them in place.
        ops: compute linears and attention.

    """

    def __init__(self, plan: Plan, ops: Ops) -> None:
        if plan.input_bytes:
            raise NotLowerableError("on a GPU no program takes more of a row than its token")
        self._plan, self._ops = plan, ops if ops.unchecked is None else ops.unchecked
        self._dtypes = dtypes_of(plan)
        launches = kernels_of(plan)
        self._logits = next(b for b, placed in enumerate(plan.buffers) if placed.place == LOGITS and b in self._dtypes)
        last = {buffer: i for i, launch in enumerate(launches) for buffer in _reads(launch)}
        self._steps = [
            (self._step(launch), [b for b, at in last.items() if at == i]) for i, launch in enumerate(launches)
        ]

    @torch.inference_mode()
    def __call__(
        self, batch: RaggedBatch, pool: PagePool, logit_rows: Tensor | None = None, hidden_states: Tensor | None = None
    ) -> Tensor:
        """Compute a batch's rows; arguments and result are those of ``HFModel.forward``."""
        forward = _Forward(self._plan, batch, pool, logit_rows, hidden_states)
        device = batch.token_ids.device
        with (
            torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        ):  # Triton launches on the current one
            for step, unused in self._steps:
                step(forward)
                for buffer in unused:
                    forward.memory.pop(buffer, None)
        return forward.memory[self._logits]

    def _step(self, launch: Prepared) -> Callable[[_Forward], None]:
        if isinstance(launch, tuple):
            return self._row_run(*launch)
        if isinstance(launch, Linear):
            return self._linear(launch)
        if isinstance(launch, JointLinear):
            return self._joint_linear(launch)
        if isinstance(launch, GroupedLinear):
            return self._grouped_linear(launch)
        if isinstance(launch, Attend):
            return self._attend(launch)
        assert isinstance(launch, Gather)
        return self._gather(launch)

    def _row_run(self, run: RowRun, kernel: RowKernel) -> Callable[[_Forward], None]:
        function, is_logits = compiled(kernel.source), run.domain == LOGIT_ROWS
        options = launch_of(kernel).options | OPTIONS

        def launch(forward: _Forward) -> None:
            num_rows = forward.num_logit_rows if is_logits else forward.num_rows
            for buffer in run.stored:
                forward.write(buffer, num_rows, self._dtypes[buffer])
            tensors = [forward.tensor(each) for each in kernel.tensors]
            if num_rows:
                function[num_rows, kernel.num_tiles](*tensors, **options)

        return launch

    def _linear(self, step: Linear) -> Callable[[_Forward], None]:
        weight, bias = step.weight, step.bias

        def launch(forward: _Forward) -> None:
            wide = forward.vectors(step)
            if weight.is_contiguous():
                result = self._ops.linear(wide, weight, bias)
            else:  # as the only expert: the op ``linear`` reads no transposed weights
                only = torch.zeros(len(wide), 1, dtype=torch.int64, device=wide.device)
                result = self._ops.grouped_linear(
                    wide[:, None], only, weight[None], None if bias is None else bias[None]
                )
            forward.memory[step.out] = result.view(forward.count(step), step.num_vectors * weight.shape[0])

        return launch

    @staticmethod
    def _joint_linear(joint: JointLinear) -> Callable[[_Forward], None]:
        weights = [step.weight for step in joint.steps]
        biases = [step.bias for step in joint.steps if step.bias is not None] or None  # all have one, or none

        def launch(forward: _Forward) -> None:
            results = linears(forward.vectors(joint.steps[0]), weights, biases)
            for step, result in zip(joint.steps, results, strict=True):
                forward.memory[step.out] = result.view(forward.count(step), step.num_vectors * step.weight.shape[0])

        return launch

    def _grouped_linear(self, step: GroupedLinear) -> Callable[[_Forward], None]:
        in_features = step.weight.shape[2]

        def launch(forward: _Forward) -> None:
            rows, chosen = forward.memory[step.source], forward.memory[step.experts]
            wide = rows[:, step.offset : step.offset + step.num_vectors * in_features].unflatten(1, (-1, in_features))
            ids = chosen[:, step.experts_offset : step.experts_offset + step.choices].long()
            forward.memory[step.out] = self._ops.grouped_linear(wide, ids, step.weight, step.bias).flatten(1)

        return launch

    def _attend(self, step: Attend) -> Callable[[_Forward], None]:
        params = AttentionParams(step.scale, step.sliding_window, step.softcap, step.sinks)
        heads, head_dim = step.query, self._plan.kv_shapes[step.layer].key_head_dim

        def launch(forward: _Forward) -> None:
            rows = forward.memory[heads.buffer]
            shape, strides = (len(rows), step.num_heads, head_dim), (rows.stride(0), heads.stride, 1)
            query = rows.as_strided(shape, strides, rows.storage_offset() + heads.offset)
            result = self._ops.paged_attention(query, forward.pool.layers[step.layer], forward.batch, params)
            forward.memory[step.out] = result.flatten(1)

        return launch

    @staticmethod
    def _gather(step: Gather) -> Callable[[_Forward], None]:
        def launch(forward: _Forward) -> None:
            rows, chosen = forward.memory[step.source], forward.logit_rows
            forward.memory[step.out] = rows if chosen is None else rows[chosen]

        return launch


class _Forward:
    """One forward: its batch, and the buffers that are in use."""

    def __init__(
        self, plan: Plan, batch: RaggedBatch, pool: PagePool, logit_rows: Tensor | None, hidden_states: Tensor | None
    ) -> None:
        self._plan, self.batch, self.pool, self.logit_rows = plan, batch, pool, logit_rows
        self._hidden_states = hidden_states
        self.num_rows = batch.token_ids.shape[0]
        self.num_logit_rows = self.num_rows if logit_rows is None else logit_rows.shape[0]
        self.memory: dict[int, Tensor] = {}

    def write(self, buffer: int, num_rows: int, dtype: torch.dtype) -> None:
        """Make memory for a buffer, unless an earlier launch has written another part of it."""
        placed = self._plan.buffers[buffer]
        if buffer in self.memory:
            return
        device = self.batch.token_ids.device
        if placed.place != TAPS:
            self.memory[buffer] = torch.empty(num_rows, placed.row_bytes // dtype.itemsize, dtype=dtype, device=device)
            return
        if self._hidden_states is None:
            self._hidden_states = torch.empty(num_rows, placed.row_bytes, dtype=torch.uint8, device=device)
        taps = self._hidden_states.flatten(1).view(dtype)
        self.memory[buffer] = taps[:, placed.offset // dtype.itemsize :]

    def vectors(self, step: Linear) -> Tensor:
        """Return the input of a linear, ``[T * num_vectors, in_features]``."""
        in_features, rows = step.weight.shape[1], self.memory[step.source]
        return rows[:, step.offset : step.offset + step.num_vectors * in_features].reshape(-1, in_features)

    def count(self, step: Linear) -> int:
        """Return the number of rows of a linear."""
        return len(self.memory[step.source])

    def tensor(self, source: int | Tensor | str) -> Tensor:
        """Return what a kernel calls by ``RowKernel.tensors``."""
        if isinstance(source, Tensor):
            return source
        if isinstance(source, int):
            return self.memory[source]
        kind, _, layer = source.partition(" ")
        rows = self.logit_rows
        if layer:
            keys, values = self.pool.layers[int(layer)]
            return keys if kind == "keys" else values
        if kind == "logit_rows":
            return torch.arange(self.num_rows, device=self.batch.token_ids.device) if rows is None else rows
        tensor: Tensor = getattr(self.batch, kind)
        return tensor


def dtypes_of(plan: Plan) -> dict[int, torch.dtype]:
    """Return the dtype of every buffer that row operations store; other launches bring their own tensors."""
    found: dict[int, torch.dtype] = {}
    for step in plan.instructions:
        if isinstance(step, RowOp):
            found[step.writes[0]] = step.out.dtype
        else:
            found.update(dict.fromkeys(step.writes, plan.dtype))
    return found


def _reads(launch: Prepared) -> set[int]:
    if isinstance(launch, tuple):
        return {buffer for step in launch[0].steps for buffer in step.reads}
    return set(launch.reads)
