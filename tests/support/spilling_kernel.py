"""A kernel that has to spill, so ``bench.aot`` must reject it. Only a subprocess of test_aot.py imports it."""

import triton
import triton.language as tl

from specdec_fast.triton_kernels.variant import Variant


@triton.jit
def _hoard(source, destination, TILE: tl.constexpr):
    places = tl.arange(0, TILE)
    content = tl.load(source + places)  # with one warp, 512 registers a thread
    tl.debug_barrier()
    tl.store(destination + places, content)


def variants():
    pointers = {"source": "*fp32", "destination": "*fp32"}
    yield Variant("within", _hoard, pointers, {"TILE": 1024}, num_warps=1, divisible=tuple(pointers))
    yield Variant("hoards", _hoard, pointers, {"TILE": 16384}, num_warps=1, divisible=tuple(pointers))
    yield Variant("broken", _hoard, {**pointers, "source": "i32"}, {"TILE": 1024}, num_warps=1)
