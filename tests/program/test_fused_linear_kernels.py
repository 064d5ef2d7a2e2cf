"""What the compiler makes of linears that compute row operations: the order of sums, instructions, and no spills.

The interpreter cannot show these: the order of a sum on a GPU is that of its layout.
"""

from __future__ import annotations

import json
import re

import pytest

from support.programs import needs_programs

pytest.importorskip("triton")

pytestmark = needs_programs

COMPILED = r"""
import json, re, sys
from dataclasses import replace
import torch
from bench.aot import TARGETS, compile_variant
from bench.aot_.fused_linears import fused_variants
from bench.common.pairs import PAIRS
from bench.model_step_.recording import record
from specdec_fast.program.triton.fused_launches import fused_launches_of
from specdec_fast.program.triton.fused_linear import EitherWay
from specdec_fast.program.triton.launches import RowFusion, launches_of
from specdec_fast.program.triton.row_kernel import row_kernel
from specdec_fast.triton_kernels.linear import variants
from support.device_programs import variant_of

def reductions(code):
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    found = re.findall(r"\"tt.reduce\".*?\}\) : \(tensor<([\dx]+)xf32, (.*?)>\) ->", code, re.DOTALL)
    return [[[int(size) for size in shape.split("x")], layouts[of_whole(alias)]] for shape, alias in found]

def of_whole(layout):  # a slice without an axis of one piece has the order of the whole
    return re.sub(r"#ttg.slice<\{dim = 1, parent = (#\w+)\}>", r"\1", layout)

def products(code):
    pattern = r"versionMajor = \d+|instrShape = \[[\d, ]*\]|kWidth = \d+|isTransposed = \w+"
    return [len(re.findall(r"\b(?:tt|ttng)\.\w*(?:dot|mma)\b", code)), sorted(set(re.findall(pattern, code)))]

for size in map(int, sys.argv[2].split(",")):
    plan = record(replace(PAIRS["qwen3-8b"].draft, hidden_size=size), 96, torch.bfloat16).plan
    fusion = next(each.few.before for each in fused_launches_of(plan) if isinstance(each, EitherWay))
    own = variant_of(plan, row_kernel(plan, fusion), "row")
    fusions = [each for each in launches_of(plan) if isinstance(each, RowFusion)]
    whole = next(each for each in fusions if each.steps[-1] is fusion.steps[-1])
    separate = variant_of(plan, row_kernel(plan, whole), "separate")
    fused = list(fused_variants(plan, "fused"))
    for target in sys.argv[1].split(","):
        codes = {each.name: compile_variant(each, TARGETS[target]).asm["ttgir"] for each in (own, separate, *fused)}
        found = {name: [reductions(code), products(code)] for name, code in codes.items()}
        print(json.dumps([target, size, found]))
plain = [each for each in variants() if each.name.startswith(("bf16_1024x", "bf16_2048x", "bf16_4096x"))]
for target in sys.argv[1].split(","):
    codes = {each.name: compile_variant(each, TARGETS[target]).asm["ttgir"] for each in plain}
    print(json.dumps([target, 0, {name: [[], products(code)] for name, code in codes.items()}]))
"""


def order_of(shape, layout):
    """Return which bits of a place in a row are numbers of one thread, threads of a warp, and warps, in their order."""
    length = shape[-1]
    if layout.startswith("#ttg.linear"):
        named = dict(re.findall(r"(register|lane|warp) = (\[(?:\[[\d, ]*\](?:, )?)*\])", layout))
        bases = {name: [basis[-1] for basis in json.loads(text)] for name, text in named.items()}
        return {name: [bit for bit in own if bit] for name, own in bases.items()}
    names = {"register": "sizePerThread", "lane": "threadsPerWarp", "warp": "warpsPerCTA"}
    order, bit = {}, 1
    for name, text in names.items():
        count = int(re.search(rf"{text} = \[(?:\d+, )*(\d+)\]", layout)[1])
        order[name] = [bit << i for i in range(count.bit_length() - 1) if bit << i < length]
        bit *= count
    order["register"] += [place for place in (bit << i for i in range(length.bit_length())) if place < length]
    return order


@pytest.mark.grid
@pytest.mark.timeout(3600)
def test_sums_and_products_have_the_order_of_separate_kernels(compiler):
    printed = compiler.run(COMPILED, "sm_80,sm_90,sm_100,gfx942", "512,896,1024,2048")
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
    plain = {
        target: {str(products[1]) for _, products in kernels.values()} for target, size, kernels in found if not size
    }
    for target, size, kernels in (each for each in found if each[1]):
        ((shape, layout),) = kernels.pop("row")[0]
        ((shape, of_whole),) = kernels.pop("separate")[0]  # of the residual and its norm, without fused linears
        expected = order_of(shape, layout)
        assert order_of(shape, of_whole) == expected
        assert sum(map(len, expected.values())) == shape[0].bit_length() - 1, "every place is in one thread"
        with_statistics = {name: own for name, (own, _) in kernels.items() if "_begin" in name}
        assert len(with_statistics) == 4, "gate and up; queries, keys and values; logits of all rows and of some"
        for name, own in with_statistics.items():
            assert [order_of(*each) for each in own] == [expected], (target, size, name)
        for name, (_, (count, instructions)) in kernels.items():
            assert count >= 1
            assert str(instructions) in plain[target], (target, size, name)


def test_another_number_of_warps_is_another_order():
    blocked = "#ttg.blocked<{{sizePerThread = [8], threadsPerWarp = [32], warpsPerCTA = [{}], order = [0]}}>"
    linear = (
        "#ttg.linear<{register = [[0, 1], [0, 2], [0, 4], [2, 0], [0, 512]], "
        "lane = [[0, 8], [0, 16], [0, 32], [0, 64], [0, 128]], warp = [[0, 256], [1, 0]], block = []}>"
    )
    assert order_of([8, 1024], linear) == order_of([1024], blocked.format(2))
    assert order_of([8, 1024], linear) != order_of([1024], blocked.format(4))
