"""``paged_attention`` in Triton: what is launched, and what the compiler makes of it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from bench.op_cases.paged_attention import PagedShape
from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.triton_kernels import paged_attention as module
from support.triton_attention import attention, launches, make

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="a GPU's run is bench.gpu; this is about the interpreter")


def test_nothing_of_the_batch_is_compiled_in(monkeypatch):
    wide = make(PagedShape((40, 9, 3), (6, 1, 3), sliding_window=30), torch.float16)
    sliding = make(PagedShape((700,), (33,), sliding_window=5), torch.float16)
    with launches(monkeypatch) as noted:
        for args in (wide, sliding):
            attention(**args)
    assert len({str(options) for name, _, options in noted if name == "_attention_kernel"}) == 1
    sizes = {"stride_query_row", "stride_query_head", "max_pages", "max_tiles", "num_splits", "path_width", "window"}
    assert sizes <= set(module._UNSPECIALISED), "an argument that is specialised by its value makes another kernel"
    assert {"block_table", "cu_seqlens_q", "seqused_k", "paths"} <= set(module._UNSPECIALISED)


@pytest.mark.parametrize(
    "shape",
    [
        PagedShape((600,), (3,), heads=4, kv_heads=1, head_dim=128),
        PagedShape((40,), (2,), heads=8, kv_heads=1, head_dim=64, tree=True),
        PagedShape((600,), (2,), heads=8, kv_heads=1, head_dim=64, sinks=True),
        PagedShape((40,), (2,), heads=2, kv_heads=2, head_dim=192, value_dim=128),
    ],
    ids=["split", "tree", "sinks", "narrow_values"],
)
def test_launches_are_those_compiled_ahead_of_time(shape, monkeypatch):
    known = [(v.kernel, v.constexprs, v.num_warps, v.num_stages, v.max_registers) for v in module.variants()]
    kernels = {name: getattr(module, name) for name in ("_attention_kernel", "_merge_kernel")}
    with launches(monkeypatch) as noted:
        attention(**make(shape, torch.float16))
    assert noted
    for name, _, options in noted:
        asked = [options.pop(key, None) for key in ("num_warps", "num_stages", "maxnreg")]
        assert (kernels[name], options, *asked) in known


LAYOUTS = r"""
import re, sys
from bench.aot import TARGETS, compile_variant
from specdec_fast.triton_kernels.paged_attention import variants
targets, *names = sys.argv[1:]
chosen = [variant for variant in variants() if variant.name in names]
for name in targets.split(","):
    for variant in chosen:
        code = compile_variant(variant, TARGETS[name]).asm["ttgir"]
        layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
        made = variant if name == "sm_90" else variant.elsewhere
        block_m, block_n = made.constexprs["BLOCK_M"], made.constexprs["BLOCK_N"]
        tile = rf"\}}\) : \(tensor<{block_m}x{block_n}xf32, (#\w+)>\)"
        product = r"= (?:tt.dot|ttng.warp_group_dot) .*-> tensor<\d+x(\w+, #\w+)>"
        of_row = lambda layout: re.sub(r"warpsPerCTA=\[\d+,1\]", "warps along rows", layout).replace(" ", "")
        summed = [of_row(layouts[alias].replace(" ", "")) for alias in re.findall(tile, code)]
        products = [found.split(", ") for found in re.findall(product, code)]
        print(name, *summed, *(f"{shape}{of_row(layouts[alias].replace(' ', ''))}" for shape, alias in products))
"""


@pytest.mark.grid
def test_sums_over_a_tile_have_one_order(compiler):
    """Whether a tile is partly hidden, in a tree or not, of 64 or 128 rows, the compiler adds up its weights in the
    same layout: every row's weights lie in the registers of four threads of one warp, and warps divide rows alone.

    The interpreter cannot show that; the order of a sum on a GPU is that of its layout.
    """
    names = [f"fp16_dim128_group4{kind}" for kind in ("", "_tree", "_tall", "_page64", "_page64_tall")]
    lines = [line.split() for line in compiler.run(LAYOUTS, "sm_80,sm_90", *names).splitlines()]
    assert len(lines) == 2 * len(names)
    for target in ("sm_80", "sm_90"):
        chain, *others = (layouts for name, *layouts in lines if name == target)
        assert others == [chain] * len(others), "a row has the bits of plain decoding"
        layouts = chain
        assert len(layouts) == 8, "a maximum, a sum and two products, of tiles that all rows see and of others"
        assert len(set(layouts[:4])) == 1
        assert target != "sm_90" or "warpsalongrows" in layouts[0], "there no row is divided among warps"
        assert layouts[4:6] == layouts[6:]
