"""Kernels that overlap wait before they read or write what kernels share. A race would show on a GPU, and rarely."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

# Where in the code of each kernel the first wait, the first access to global memory and the first prefetch are.
PLACES = r"""
import re
from bench.aot import TARGETS, compile_variant, variants_of
from specdec_fast.program.triton.executor import kernels_of
from specdec_fast.triton_kernels import linear, paged_attention
from support.device_programs import plan_of, variant_of
from support.models import tiny_model
names = ("linear.bf16_896x896_bias_16x16", "paged_attention.bf16_dim64_group1",
         "paged_attention.bf16_dim128_group4_merge")
listed = dict(variants_of([linear, paged_attention]))
multiplying, *others = (listed[name] for name in names)
plan = plan_of(tiny_model("llama"))
kernel = next(launch[1] for launch in kernels_of(plan) if isinstance(launch, tuple))
for variant in [multiplying, *others, variant_of(plan, kernel, "row kernel")]:
    for target in ("sm_80", "sm_90") if variant is multiplying else ("sm_90",):
        code = compile_variant(variant, TARGETS[target]).asm["ptx"]
        found = [re.search(pattern, code) for pattern in (r"griddepcontrol\.wait", r"(ld|st)\.global|cp\.async|red\.",
                                                          r"prefetch\.global", r"griddepcontrol\.launch_dependents")]
        print(target, variant.kernel.fn.__name__, *(-1 if place is None else place.start() for place in found), sep="|")
"""


@pytest.mark.grid
def test_kernels_wait_before_they_touch_memory(compiler):
    seen = []
    for line in compiler.run(PLACES).splitlines():
        target, kernel, *places = line.split("|")
        wait, access, prefetch, launch = map(int, places)
        seen.append((target, kernel))
        if target == "sm_80":
            assert (wait, prefetch, launch) == (-1, -1, -1), "it has no such instructions"
            continue
        assert 0 < wait < access, kernel
        assert wait < launch, "what an earlier kernel wrote is complete when the next one may start"
        assert (0 < prefetch < wait) == (kernel == "_linear_kernel")
    assert len(seen) == 5
