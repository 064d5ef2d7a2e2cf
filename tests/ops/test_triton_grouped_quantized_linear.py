"""``grouped_quantized_linear`` in Triton: products are those of ``quantized_linear``, and each is computed once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from bench.op_cases.quantized_linear import AWQ_A8, MXFP4, Q4_K, Q6_K, Format, drawn_weight
from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.quantization.packed_weight import FLOAT8, INT8, PackedWeight, expert_of, stacked
from specdec_fast.triton_kernels import grouped_quantized_linear as module
from specdec_fast.triton_kernels.grouped_quantized_linear import grouped_quantized_linear
from specdec_fast.triton_kernels.quantized_linear import quantized_linear
from support.grids import grid
from support.noted_launches import Noted

interpreted = pytest.mark.skipif(not INTERPRETING, reason="a GPU's run is bench.gpu; this is about the interpreter")
IN_FEATURES = 298  # ten blocks, the last of them not whole; two super-scales
OUT_FEATURES = 20  # a panel and a part of one
NUM_EXPERTS = 5
MISSING = 3  # an expert that no row chooses


def make_weight(form: Format) -> PackedWeight:
    generator = torch.Generator().manual_seed(0)
    return stacked([drawn_weight(IN_FEATURES, OUT_FEATURES, form, generator) for _ in range(NUM_EXPERTS)])


WEIGHTS = {
    "mxfp4": make_weight(MXFP4),
    "awq": make_weight(replace(AWQ_A8, rounds_rows=False)),
    "awq_a8": make_weight(AWQ_A8),
    "int8": make_weight(Format(INT8, 64)),
    "int8_a8": make_weight(Format(INT8, 32, rounds_rows=True)),
    "float8": make_weight(Format(FLOAT8, 128)),
    "short": make_weight(Format(INT8, 16)),
    "q4_k": make_weight(Q4_K),
    "q6_k_a8": make_weight(replace(Q6_K, rounds_rows=True)),
}
each_weight = pytest.mark.parametrize("weight", grid(WEIGHTS, keep=["q4_k"]))


def make_args(num_rows: int, dtype: torch.dtype, num_vectors: int = 1) -> dict[str, Any]:
    """Two experts for every row, of which the first has most."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(num_rows, NUM_EXPERTS, generator=generator)
    scores[:, 0] += 0.5
    scores[:, MISSING] = -1
    return {
        "rows": torch.randn(num_rows, num_vectors, IN_FEATURES, generator=generator).to(dtype),
        "expert_ids": scores.topk(2).indices,
        "bias": torch.randn(NUM_EXPERTS, OUT_FEATURES, generator=generator).to(dtype),
    }


def products_alone(weight: PackedWeight, rows: Tensor, expert_ids: Tensor, bias: Tensor) -> Tensor:
    """Compute each expert's rows by ``quantized_linear``."""
    lines = rows.expand(-1, expert_ids.shape[1], -1)
    out = torch.full((*expert_ids.shape, OUT_FEATURES), torch.nan, dtype=rows.dtype)
    for expert in expert_ids.unique().tolist():
        chosen = expert_ids == expert
        out[chosen] = quantized_linear(lines[chosen], expert_of(weight, expert), bias[expert])
    return out


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.grid)])
@each_weight
def test_products_have_the_bits_of_quantized_linear_whatever_the_other_rows(weight, dtype):
    """One row, few rows, and so many that groups begin at listed places, in tiles of another height."""
    args = make_args(33, dtype)
    whole = grouped_quantized_linear(**args, weight=weight)
    assert torch.equal(whole, products_alone(weight, **args))
    for few in (slice(7, 8), slice(24, 33)):
        part = args | {name: args[name][few] for name in ("rows", "expert_ids")}
        assert torch.equal(grouped_quantized_linear(**part, weight=weight), whole[few])


@interpreted
@pytest.mark.parametrize("name", grid(["mxfp4", "int8_a8"], keep=["mxfp4"]))
def test_a_vector_for_each_choice(name):
    args = make_args(9, torch.float16, num_vectors=2)
    assert torch.equal(grouped_quantized_linear(**args, weight=WEIGHTS[name]), products_alone(WEIGHTS[name], **args))


@interpreted
@pytest.mark.parametrize("name", grid(["mxfp4", "int8_a8"], keep=["int8_a8"]))
def test_a_row_that_is_not_finite_changes_no_other(name):
    args = make_args(6, torch.float16)
    expected = grouped_quantized_linear(**args, weight=WEIGHTS[name])
    args["rows"][2] = torch.nan
    found = grouped_quantized_linear(**args, weight=WEIGHTS[name])
    assert found[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], expected[others])


@interpreted
@pytest.mark.parametrize("num_rows", [1, 6, 33], ids=["one", "few", "listed"])
def test_a_group_is_computed_once(num_rows, monkeypatch):
    """The products of an expert within eight (or more) sorted ones; the programs of other places return."""
    args = make_args(num_rows, torch.float16)
    launch = module._launch(
        module.format_of(WEIGHTS["int8"]), torch.float16, (IN_FEATURES, OUT_FEATURES), 2 * num_rows, NUM_EXPERTS
    )
    tiles = launch.constexprs
    sorted_ids = args["expert_ids"].flatten().sort().values.tolist()
    groups = {(place // tiles["BLOCK_ROWS"], expert) for place, expert in enumerate(sorted_ids)}
    total, computed = module.total_of_tile, []
    place = total.arg_names.index("is_row")
    monkeypatch.setattr(module, "total_of_tile", lambda *args: computed.append(args[place]) or total(*args))
    grouped_quantized_linear(**args, weight=WEIGHTS["int8"])
    num_tiles = -(-OUT_FEATURES // tiles["BLOCK_OUT"])
    assert len(computed) == len(groups) * num_tiles
    assert sum(int(is_row.handle.data.sum()) for is_row in computed) == len(sorted_ids) * num_tiles


@pytest.fixture
def noted(monkeypatch) -> Noted:
    found = Noted()
    monkeypatch.setattr(module, "_grouped_quantized_linear_kernel", found)
    return found


@pytest.mark.parametrize(
    ("num_rows", "places"),
    [(1, 8), (6, 6 * 8), (48, 48 * 8 // 8 + 128), (2048, 2048 * 8 // 64 + 128)],
    ids=["one", "few", "verification", "prompt"],
)
def test_programs_are_as_many_as_groups_can_be(num_rows, places, noted):
    """Few rows have one for each product; many have one for each 8 (or 64) and each expert. No weight is copied."""
    codes = torch.empty(128, 96, 1, 4, 16, dtype=torch.int32)
    weight = PackedWeight(codes, torch.empty(128, 96, 1, 16), None, torch.empty(16), 32, 1536, 32, "table")
    ids = torch.rand(num_rows, 128, generator=torch.Generator().manual_seed(0)).topk(8).indices
    grouped_quantized_linear(torch.empty(num_rows, 1, 32, dtype=torch.bfloat16), ids, weight)
    assert noted.grids == [1536 // 32 * places]
    assert noted.args[5] is codes
    assert noted.args[6] is weight.scales
