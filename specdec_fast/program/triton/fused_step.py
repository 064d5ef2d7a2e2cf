"""How a program launches linears that compute row operations too."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from specdec_fast.program.plan.ir import LOGIT_ROWS, Plan
from specdec_fast.program.triton.device_forward import DeviceForward
from specdec_fast.program.triton.fused_linear import MOST_ROWS, EitherWay, FusedLinear
from specdec_fast.program.triton.generated import OPTIONS, compiled
from specdec_fast.program.triton.linear_kernel import linear_kernel
from specdec_fast.triton_kernels.linear import aligned, tiles_of
from specdec_fast.triton_kernels.variant import Launch


def takes_few_rows(either: EitherWay, forward: DeviceForward) -> bool:
    """Return whether a forward's rows are so few that one launch computes them."""
    return _num_rows(either.few, forward) <= MOST_ROWS


def launch_of_rows(fused: FusedLinear, num_rows: int) -> Launch:
    """Return the compile-time choices of a launch: the tiles and warps of the linears alone."""
    sizes = [weight.shape[0] for weight, _, _, _ in fused.matrices()]
    layers = [step.weight.shape[0] for step in fused.steps]
    return tiles_of(fused.dtype, fused.in_features, sizes, num_rows, layers)


def fused_step(plan: Plan, fused: FusedLinear, dtypes: dict[int, torch.dtype]) -> Callable[[DeviceForward], None]:
    """Return a function that launches fused linears; ``dtypes`` are those of buffers that row operations store."""
    gathered = linear_kernel(plan, fused)
    kernel_of_all = linear_kernel(plan, fused, all_rows=True)
    matrices = fused.matrices()
    weights = [weight for weight, _, _, _ in matrices]
    biases = [bias for _, bias, _, _ in matrices if bias is not None]
    sizes = [len(weight) for weight in weights]

    def launch(forward: DeviceForward) -> None:
        num_rows = _num_rows(fused, forward)
        outputs = _outputs(fused, forward, num_rows, dtypes)
        if not num_rows:
            return
        kernel = kernel_of_all if forward.logit_rows is None else gathered
        choices = launch_of_rows(fused, num_rows)
        tiles = choices.constexprs
        rows = [] if fused.before is not None else [aligned(forward.vectors(fused.steps[0]), tiles["ALIGNMENT"])]
        strides = [each.stride(0) for each in rows]
        tensors = [forward.tensor(each) for each in kernel.tensors]
        num_tiles = (
            sum(triton.cdiv(size, tiles["BLOCK_OUT"]) for size in sizes)
            if fused.after is None
            else triton.cdiv(len(sizes) * sizes[0], tiles["BLOCK_OUT"])
        )
        grid = (num_tiles * triton.cdiv(num_rows, tiles["BLOCK_ROWS"]),)
        arguments = (*rows, *weights, *biases, *outputs, *tensors, num_rows, *strides)
        compiled(kernel.source)[grid](*arguments, **choices.options, **OPTIONS)

    return launch


def _num_rows(fused: FusedLinear, forward: DeviceForward) -> int:
    return forward.num_logit_rows if fused.domain == LOGIT_ROWS else forward.num_rows


def _outputs(
    fused: FusedLinear, forward: DeviceForward, num_rows: int, dtypes: dict[int, torch.dtype]
) -> list[torch.Tensor | int]:
    """Make memory for what the kernel stores; return the outputs of its linears and their sizes, if it stores them."""
    if fused.after is not None:
        for buffer in fused.after.stored:
            forward.write(buffer, num_rows, dtypes[buffer])
        return []
    sizes = [step.weight.shape[0] for step in fused.steps]
    device = forward.batch.token_ids.device
    out = torch.empty(num_rows * sum(sizes), dtype=fused.dtype, device=device)
    for step, piece in zip(fused.steps, out.split([num_rows * size for size in sizes]), strict=True):
        forward.memory[step.out] = piece.view(num_rows, step.weight.shape[0])
    return [out, *sizes]
