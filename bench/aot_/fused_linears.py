"""The kernels of linears that compute row operations too, for ``bench.aot``: those that a plan's launches request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch

from bench.common.pairs import PAIRS
from bench.model_step_.recording import record
from specdec_fast.program.plan.ir import Plan
from specdec_fast.program.triton.executor import dtypes_of
from specdec_fast.program.triton.fused_launches import fused_launches_of
from specdec_fast.program.triton.fused_linear import MOST_ROWS, EitherWay, FusedLinear
from specdec_fast.program.triton.fused_step import launch_of_rows
from specdec_fast.program.triton.generated import compiled
from specdec_fast.program.triton.linear_kernel import LinearKernel, linear_kernel
from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

_NUM_ROWS = (16, 64, 128, 1 << 20)  # of each tile
_SHAPES = {"0.6b": PAIRS["qwen3-8b"].draft, "8b": PAIRS["qwen3-8b"].target}


def fused_variants(plan: Plan, prefix: str) -> Iterator[Variant]:
    """Yield the distinct compilations of a plan's fused linears, whatever the number of rows; names have a prefix."""
    known: set[tuple[str, tuple[int, int]]] = set()
    for fused, counts in _fused(plan):
        for all_rows in [False] if fused.gather is None else [False, True]:
            kernel = linear_kernel(plan, fused, all_rows)
            for num_rows in counts:
                launch = launch_of_rows(fused, num_rows)
                tile = launch.constexprs["BLOCK_OUT"], launch.constexprs["BLOCK_ROWS"]
                if (kernel.source, tile) not in known:
                    known.add((kernel.source, tile))
                    name = f"{prefix}_{_name(fused, all_rows)}_{tile[0]}x{tile[1]}"
                    yield _variant(plan, fused, kernel, launch, name)


def _fused(plan: Plan) -> Iterator[tuple[FusedLinear, tuple[int, ...]]]:
    for launch in fused_launches_of(plan):
        if isinstance(launch, EitherWay):
            yield launch.few, (MOST_ROWS,)
        for each in launch.many if isinstance(launch, EitherWay) else [launch]:
            if isinstance(each, FusedLinear):
                yield each, _NUM_ROWS


def _name(fused: FusedLinear, all_rows: bool) -> str:
    sizes = "_".join(str(len(weight)) for weight, _, _, _ in fused.matrices())
    parts = {"begin": fused.before, "gather": fused.gather if not all_rows else None, "end": fused.after}
    return f"{fused.in_features}x{sizes}" + "".join(f"_{name}" for name, part in parts.items() if part is not None)


def _variant(plan: Plan, fused: FusedLinear, kernel: LinearKernel, launch: Launch, name: str) -> Variant:
    dtypes, kind = dtypes_of(plan), f"*{TYPE_NAMES[fused.dtype]}"
    numbers = range(len(fused.matrices()))
    signature = {} if fused.before is not None else {"rows": kind}
    signature |= {f"weight_{i}": kind for i in numbers}
    signature |= {f"bias_{i}": kind for i in numbers if fused.steps[0].bias is not None}
    if fused.after is None:
        signature |= {"out": kind, **{f"out_features_{i}": "i32" for i in numbers}}
    aligned = [*signature]
    if fused.after is None and any(len(weight) % 16 for weight, _, _, _ in fused.matrices()):
        aligned = [each for each in aligned if not each.startswith("out_features")]
    for i, tensor in enumerate(kernel.tensors):
        if isinstance(tensor, str):
            signature[f"p{i}"] = "*i64"
            continue
        signature[f"p{i}"] = f"*{TYPE_NAMES[dtypes[tensor] if isinstance(tensor, int) else tensor.dtype]}"
        aligned.append(f"p{i}")
    signature["num_rows"] = "i32"
    if fused.before is None:
        signature["stride_rows_row"] = "i32"
    return replace(launch.variant(name, compiled(kernel.source), signature, tuple(aligned)), fuses=False)


@cache
def _variants() -> tuple[Variant, ...]:
    vocab_size = PAIRS["qwen3-8b"].vocab_size
    plans = {name: record(shape, vocab_size, torch.bfloat16).plan for name, shape in _SHAPES.items()}
    return tuple(variant for name, plan in plans.items() for variant in fused_variants(plan, name))


def variants() -> Iterator[Variant]:
    """Yield the compilations for the shapes of Qwen3-0.6B and Qwen3-8B."""
    yield from _variants()
