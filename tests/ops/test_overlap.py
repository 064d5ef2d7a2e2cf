"""Kernels that overlap wait before they read or write what kernels share. A race would show on a GPU, and rarely."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from specdec_fast.triton_kernels.overlap import WAIT_FIRST

# Where in the code of each kernel the first wait, the first access to global memory and the first prefetch are.
PLACES = r"""
import re
import torch
from bench.aot import TARGETS, compile_variant, variants_of
from bench.aot_.fused_linears import fused_variants
from bench.common.pairs import PAIRS
from bench.model_step_.recording import record
from specdec_fast.program.triton.executor import kernels_of
from specdec_fast.triton_kernels import linear, overlap, paged_attention
from support.device_programs import plan_of, variant_of
from support.models import tiny_model
names = ("linear.bf16_896x896_bias_16x16", "paged_attention.bf16_dim64_group1",
         "paged_attention.bf16_dim128_group4_merge", "paged_attention.bf16_dim128_group4_merging")
listed = dict(variants_of([linear, paged_attention]))
chosen = {name: listed[name] for name in names}
plan = plan_of(tiny_model("llama"))
chosen["row kernel"] = variant_of(
    plan, next(launch[1] for launch in kernels_of(plan) if isinstance(launch, tuple)), "row kernel")
fused = [each for each in fused_variants(record(PAIRS["qwen3-8b"].draft, 96, torch.bfloat16).plan, "fused")
         if each.constexprs["BLOCK_ROWS"] == 16]
chosen |= {each.name: each for each in fused}
for order in (overlap.WAIT_FIRST, overlap.TRIGGER_FIRST):
    with overlap.ordered(order):
        for name, variant in chosen.items():
            for target in ("sm_80", "sm_90") if name == names[0] else ("sm_90",):
                code = compile_variant(variant, TARGETS[target]).asm["ptx"]
                found = [re.search(pattern, code) for pattern in (
                    r"griddepcontrol\.wait", r"(ld|st)\.global|cp\.async|red\.|atom\.", r"prefetch\.global",
                    r"griddepcontrol\.launch_dependents")]
                print(order, target, name, *(-1 if place is None else place.start() for place in found), sep="|")
"""


@pytest.mark.grid
def test_kernels_wait_before_they_touch_memory(compiler):
    seen = []
    for line in compiler.run(PLACES).splitlines():
        order, target, kernel, *places = line.split("|")
        wait, access, prefetch, launch = map(int, places)
        seen.append((order, target, kernel))
        if target == "sm_80":
            assert (wait, prefetch, launch) == (-1, -1, -1), "it has no such instructions"
            continue
        assert 0 < wait < access, kernel
        if int(order) == WAIT_FIRST:
            assert wait < launch, "what an earlier kernel wrote is complete when the next one may start"
        else:
            assert 0 < launch < wait, "the next kernel may start before this one waits"
        assert (0 < prefetch < wait) == (kernel.startswith(("linear.", "fused_")))
    assert len(seen) == len(set(seen)) == 2 * 13
