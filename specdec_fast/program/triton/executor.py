"""Forward programs on a GPU: one Triton kernel per fusion of row operations, and the ops for everything else.

The kernels compute what the C++ executor computes, from the same instructions. Linears, attention and recurrent layers
run on the ops that the engine chose, which are those of Triton; linears of one input are launched together. Buffers are
allocated when they are written and freed after their last use, because the ops allocate their results too; inside a
CUDA graph the graph's own memory serves them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import AttentionParams, RaggedBatch
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.program.plan.ir import (
    LOGIT_ROWS,
    LOGITS,
    Attend,
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
from specdec_fast.program.record.row_views import NotLowerableError
from specdec_fast.program.triton.device_forward import DeviceForward
from specdec_fast.program.triton.generated import OPTIONS, compiled
from specdec_fast.program.triton.launches import JointLinear, PlannedLaunch, RowFusion, Shared, halves, launches_of
from specdec_fast.program.triton.recurrent_steps import recurrent_step
from specdec_fast.program.triton.row_code import NotEmittableError
from specdec_fast.program.triton.row_kernel import RowKernel, row_kernel
from specdec_fast.ranks.operations import ranks_of
from specdec_fast.triton_kernels.linear import linears
from specdec_fast.triton_kernels.overlap import overlaps
from specdec_fast.triton_kernels.variant import Launch

Prepared = tuple[RowFusion, RowKernel] | Shared


def kernels_of(plan: Plan) -> list[Prepared]:
    """Return the launches of a plan, with the kernels of its fusions.

    A fusion that must read what it has written becomes two.
    """
    waiting: list[PlannedLaunch] = launches_of(plan)[::-1]
    prepared: list[Prepared] = []
    while waiting:
        launch = waiting.pop()
        if not isinstance(launch, RowFusion):
            prepared.append(launch)
            continue
        try:
            prepared.append((launch, row_kernel(plan, launch)))
        except NotEmittableError as error:
            if error.step <= 0:
                raise NotLowerableError(str(error)) from None
            waiting += halves(plan, launch, error.step)[::-1]
    return prepared


def launch_of(kernel: RowKernel) -> Launch:
    """Return the compile-time choices of a launch."""
    return Launch({"OVERLAPS": overlaps()}, kernel.num_warps)


class TritonProgram:
    """A model's forward as few launches. It keeps the plan's constants, such as weights, and reads them in place.

    ``ops`` compute linears, attention and recurrent layers.
    """

    def __init__(self, plan: Plan, ops: Ops) -> None:
        self._plan = plan
        self._ops = ops.without_checks
        self._dtypes = dtypes_of(plan)
        launches = kernels_of(plan)
        self._logits = next(b for b, placed in enumerate(plan.buffers) if placed.place == LOGITS and b in self._dtypes)
        last = {buffer: i for i, launch in enumerate(launches) for buffer in _reads(launch)}
        self._steps = [
            (self._step(launch), [b for b, at in last.items() if at == i]) for i, launch in enumerate(launches)
        ]

    @torch.inference_mode()
    def __call__(
        self,
        batch: RaggedBatch,
        pool: PagePool,
        logit_rows: Tensor | None = None,
        hidden_states: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        forward = DeviceForward(self._plan, batch, pool, logit_rows, hidden_states, inputs)
        device = batch.token_ids.device
        with (
            torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        ):  # Triton launches on the current one
            for step, unused in self._steps:
                step(forward)
                for buffer in unused:
                    forward.memory.pop(buffer, None)
        return forward.memory[self._logits]

    def _step(self, launch: Prepared) -> Callable[[DeviceForward], None]:
        if isinstance(launch, tuple):
            return self._row_fusion(*launch)
        if isinstance(launch, Recurrent):
            return recurrent_step(launch, self._ops)
        make: dict[type, Callable[[Any], Callable[[DeviceForward], None]]] = {
            Linear: self._linear,
            JointLinear: self._joint_linear,
            PackedLinear: self._packed_linear,
            GroupedLinear: self._grouped_linear,
            GroupedPackedLinear: self._grouped_packed_linear,
            Attend: self._attend,
            Gather: self._gather,
            Exchange: self._exchange,
        }
        return make[type(launch)](launch)

    def _row_fusion(self, fusion: RowFusion, kernel: RowKernel) -> Callable[[DeviceForward], None]:
        function = compiled(kernel.source)
        is_logits = fusion.domain == LOGIT_ROWS
        options = launch_of(kernel).options | OPTIONS

        def launch(forward: DeviceForward) -> None:
            num_rows = forward.num_logit_rows if is_logits else forward.num_rows
            for buffer in fusion.stored:
                forward.write(buffer, num_rows, self._dtypes[buffer])
            tensors = [forward.tensor(each) for each in kernel.tensors]
            if num_rows:
                function[num_rows, kernel.num_tiles](*tensors, **options)

        return launch

    def _linear(self, step: Linear) -> Callable[[DeviceForward], None]:
        weight = step.weight
        bias = step.bias

        def launch(forward: DeviceForward) -> None:
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
    def _joint_linear(joint: JointLinear) -> Callable[[DeviceForward], None]:
        weights = [step.weight for step in joint.steps]
        biases = [step.bias for step in joint.steps if step.bias is not None] or None  # all have one, or none

        def launch(forward: DeviceForward) -> None:
            results = linears(forward.vectors(joint.steps[0]), weights, biases)
            for step, result in zip(joint.steps, results, strict=True):
                forward.memory[step.out] = result.view(forward.count(step), step.num_vectors * step.weight.shape[0])

        return launch

    def _packed_linear(self, step: PackedLinear) -> Callable[[DeviceForward], None]:
        in_features = step.weight.in_features

        def launch(forward: DeviceForward) -> None:
            rows = forward.memory[step.source]
            wide = rows[:, step.offset : step.offset + step.num_vectors * in_features].reshape(-1, in_features)
            out = self._ops.quantized_linear(wide, step.weight, step.bias)
            forward.memory[step.out] = out.view(len(rows), -1)

        return launch

    def _grouped_linear(self, step: GroupedLinear) -> Callable[[DeviceForward], None]:
        in_features = step.weight.shape[2]

        def launch(forward: DeviceForward) -> None:
            wide, ids = _experts_inputs(forward, step, in_features)
            forward.memory[step.out] = self._ops.grouped_linear(wide, ids, step.weight, step.bias).flatten(1)

        return launch

    def _grouped_packed_linear(self, step: GroupedPackedLinear) -> Callable[[DeviceForward], None]:
        def launch(forward: DeviceForward) -> None:
            wide, ids = _experts_inputs(forward, step, step.weight.in_features)
            forward.memory[step.out] = self._ops.grouped_quantized_linear(wide, ids, step.weight, step.bias).flatten(1)

        return launch

    def _attend(self, step: Attend) -> Callable[[DeviceForward], None]:
        params = AttentionParams(step.scale, step.sliding_window, step.softcap, step.sinks, step.attention_chunk)
        heads = step.query
        head_dim = self._plan.kv_shapes[step.layer].key_head_dim

        def launch(forward: DeviceForward) -> None:
            rows = forward.memory[heads.buffer]
            shape = (len(rows), step.num_heads, head_dim)
            strides = (rows.stride(0), heads.stride, 1)
            query = rows.as_strided(shape, strides, rows.storage_offset() + heads.offset)
            kv = forward.pool.layers[step.layer]
            forward.memory[step.out] = self._ops.paged_attention(query, kv, forward.batch, params).flatten(1)

        return launch

    @staticmethod
    def _gather(step: Gather) -> Callable[[DeviceForward], None]:
        def launch(forward: DeviceForward) -> None:
            rows = forward.memory[step.source]
            chosen = forward.logit_rows
            forward.memory[step.out] = rows if chosen is None else rows[chosen]

        return launch

    @staticmethod
    def _exchange(step: Exchange) -> Callable[[DeviceForward], None]:
        ranks = ranks_of(step.ranks)
        widths = list(step.widths)

        def launch(forward: DeviceForward) -> None:
            rows = forward.memory[step.source]
            forward.memory[step.out] = ranks.concatenate(rows, widths) if widths else ranks.sum(rows)

        return launch


def dtypes_of(plan: Plan) -> dict[int, torch.dtype]:
    """Return the dtype of every buffer that an instruction writes."""
    dtypes: dict[int, torch.dtype] = {}
    for step in plan.instructions:
        dtypes.update({buffer: _dtype_of_result(plan, step, dtypes) for buffer in step.writes})
    return dtypes


def _dtype_of_result(plan: Plan, step: Instruction, dtypes: dict[int, torch.dtype]) -> torch.dtype:
    """Return the dtype of what an instruction computes; ``dtypes`` are those of the buffers before it.

    A model of 16 bits computes some rows in fp32, such as those of Mamba's scan.
    """
    if isinstance(step, RowOp):
        return step.out.dtype
    if isinstance(step, Linear | GroupedLinear):
        return step.weight.dtype
    if isinstance(step, PackedLinear | GroupedPackedLinear | Recurrent | Exchange):
        return step.dtype
    return dtypes.get(step.source, plan.dtype) if isinstance(step, Gather) else plan.dtype


def _experts_inputs(
    forward: DeviceForward, step: GroupedLinear | GroupedPackedLinear, in_features: int
) -> tuple[Tensor, Tensor]:
    """Return the inputs of experts ``[T, num_vectors, in_features]``, and the ids of the chosen ones."""
    rows = forward.memory[step.source]
    chosen = forward.memory[step.experts]
    wide = rows[:, step.offset : step.offset + step.num_vectors * in_features].unflatten(1, (-1, in_features))
    return wide, chosen[:, step.experts_offset : step.experts_offset + step.choices].long()


def _reads(launch: Prepared) -> set[int]:
    if isinstance(launch, tuple):
        return {buffer for step in launch[0].steps for buffer in step.reads}
    return set(launch.reads)
