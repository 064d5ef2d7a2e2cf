"""quantized_linear in C++: every instruction set is right; a row has the same bits in every batch, on any threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.op_cases import OP_CASES
from bench.op_cases.quantized_linear import E2M1, WHOLE
from specdec_fast.ops import all_ops
from specdec_fast.quantization.packed_weight import FLOAT8, INT8, TABLE, pack, scales_of, stacked, with_super_scales
from specdec_fast.quantization.rounding import ROUNDINGS, rounded
from support.grids import each_value_once
from support.op_cases import each_dtype
from support.op_checks import assert_agrees, same_bits

_C = pytest.importorskip("specdec_fast._C", reason="built without C++")
OP = all_ops()["quantized_linear"]


@pytest.fixture(params=_C.quantized_linear_versions())
def version(request):
    _C.choose_quantized_linear_version(request.param)
    yield request.param
    _C.choose_quantized_linear_version(_C.quantized_linear_versions()[-1])


def weight_of(kind, in_features, out_features, rounds_rows, has_mins):
    generator = torch.Generator().manual_seed(in_features)
    codes = torch.randint(0, 16 if kind == TABLE else 120, (out_features, in_features), generator=generator).byte()
    scales = torch.randn(out_features, -(-in_features // 32), generator=generator).half()
    table = torch.tensor(E2M1 if rounds_rows else WHOLE) if kind == TABLE else None
    return pack(codes, scales, scales / 2 if has_mins else None, table, 32, kind, rounds_rows)


@each_value_once
@each_dtype
def test_every_version_agrees_with_the_oracle(version, dtype):
    for case in OP_CASES[OP.name].cases:
        args = case.make(torch.Generator().manual_seed(1), dtype, torch.device("cpu"))
        assert_agrees(OP, OP.load("cpp")(**args), OP.load("torch")(**args), args)


@pytest.mark.parametrize("name", ["int8", "int4", "int8-a8"])
def test_small_weights_are_not_flushed_to_zero(version, name):
    """Their scales are subnormal in fp16; with tiles, threads take subnormal numbers for zeros meanwhile."""
    weight = rounded(torch.randn(40, 96, generator=torch.Generator().manual_seed(8)) * 1e-4, ROUNDINGS[name])
    rows = torch.randn(20, 96, generator=torch.Generator().manual_seed(9)).bfloat16()
    expected = OP.load("torch")(rows, weight, None).float()
    for count in (1, 20):
        found = OP.load("cpp")(rows[:count], weight).float()
        assert float((found - expected[:count]).norm() / expected[:count].norm()) < 1e-2


@each_value_once("version", "kind")
@pytest.mark.parametrize("kind", [INT8, FLOAT8, TABLE, f"{INT8}-a8", f"{TABLE}-a8"])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 64), (100, 47), (2100, 100), (7, 1)])
@pytest.mark.parametrize("has_mins", [False, True])
@each_dtype
def test_bits_of_a_row_are_its_own(version, kind, in_features, out_features, has_mins, dtype):
    weight = weight_of(kind.removesuffix("-a8"), in_features, out_features, kind.endswith("-a8"), has_mins)
    rows = torch.randn(60, in_features, generator=torch.Generator().manual_seed(2))
    rows[1] = 0
    rows[3, 0] = float("nan")
    rows[4, in_features - 1] = float("inf")
    rows[5:20] *= torch.logspace(-45, 4, 15)[:, None]
    rows = rows.to(dtype)
    multiply = OP.load("cpp")
    alone = torch.cat([multiply(row[None], weight) for row in rows])
    for count in (2, 3, 5, 6, 7, 49, 60):
        for first in range(0, 60, count):
            assert same_bits(multiply(rows[first : first + count], weight), alone[first : first + count])
    assert alone[3].isnan().all()
    assert not alone[6].isnan().any()


@pytest.mark.parametrize("name", ROUNDINGS)
def test_threads_and_long_prompts_change_no_bit(name):
    """More rows than are prepared at a time, and outputs that threads divide unevenly, or too few for each of them."""
    weight = rounded(torch.randn(150, 256, generator=torch.Generator().manual_seed(3)), ROUNDINGS[name])
    rows = torch.randn(400, 256, generator=torch.Generator().manual_seed(4)).bfloat16()
    multiply = OP.load("cpp")
    expected = torch.cat([multiply(row[None], weight) for row in rows[::7]])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert same_bits(multiply(rows, weight)[::7].clone(), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["int8-a8", "int4-a8"])
def test_tiles_have_the_bits_of_other_instructions(name):
    """Sums of rounded rows are exact, so all versions with the same vectors agree bit for bit."""
    versions = [version for version in _C.quantized_linear_versions() if version in ("avx512-vnni", "amx")]
    weight = rounded(torch.randn(70, 300, generator=torch.Generator().manual_seed(6)), ROUNDINGS[name])
    rows = torch.randn(100, 300, generator=torch.Generator().manual_seed(7))
    found = []
    try:
        for version in versions:
            _C.choose_quantized_linear_version(version)
            found.append(OP.load("cpp")(rows, weight))
    finally:
        _C.choose_quantized_linear_version(_C.quantized_linear_versions()[-1])
    assert all(same_bits(each, found[0]) for each in found)


def test_rounded_rows_have_exact_sums(version):
    """Whole numbers below 128 whose largest is 127 are not changed by rounding, so results are exact in fp32."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(-126, 127, (9, 96), generator=generator).float()
    rows[:, ::32] = 127.0
    for kind in (INT8, TABLE):
        weight = weight_of(kind, 96, 40, True, False)
        weight = replace(weight, scales=torch.ones_like(weight.scales))
        args = {"rows": rows, "weight": weight, "bias": None}
        assert torch.equal(OP.load("cpp")(**args), OP.load("torch")(**args))


def test_every_row_is_rounded_as_the_oracle_rounds_it(version):
    """Of one block with scale 1, the result is an integer times the step: a number rounded otherwise changes it."""
    rows = torch.randint(-2000, 2000, (20_000, 32), generator=torch.Generator().manual_seed(6)).float()
    weight = weight_of(INT8, 32, 16, True, False)
    weight = replace(weight, scales=torch.ones_like(weight.scales))
    args = {"rows": rows, "weight": weight, "bias": None}
    assert torch.equal(OP.load("cpp")(**args), OP.load("torch")(**args))


def of_two_levels(kind, in_features, group_size, has_mins, rounds_rows):
    """A weight whose scales have two levels, and the same with the products of both levels in fp32."""
    generator = torch.Generator().manual_seed(in_features)
    codes = torch.randint(0, 16, (40, in_features), generator=generator).byte()
    shape = (2, 40, -(-in_features // group_size))
    scales, mins = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    super_scales, super_mins = torch.randn(2, 40, -(-in_features // 256), generator=generator).half()
    super_scales[3, 0] = 2.0**-24  # subnormal, as are those of small weights
    table = torch.tensor(WHOLE) if kind == TABLE else None
    one_level = pack(codes, scales, mins if has_mins else None, table, group_size, kind, rounds_rows)
    two = with_super_scales(one_level, super_scales, super_mins if has_mins else None)
    products = scales_of(two)
    return two, pack(codes, *products, table, group_size, kind, rounds_rows)


@each_value_once("version")
@pytest.mark.parametrize("rounds_rows", [False, True])
@pytest.mark.parametrize(
    ("kind", "in_features", "group_size", "has_mins"),
    [(TABLE, 2560, 32, True), (INT8, 300, 16, False), (INT8, 520, 32, True), (TABLE, 512, 256, False)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_of_two_levels_have_the_bits_of_their_products(
    version, kind, in_features, group_size, has_mins, rounds_rows, dtype
):
    two, one = of_two_levels(kind, in_features, group_size, has_mins, rounds_rows)
    rows = torch.randn(30, in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
    for count in (1, 30):
        found = OP.load("cpp")(rows[:count], two)
        assert same_bits(found, OP.load("cpp")(rows[:count], one))
        assert found[:, 3].any()
    assert torch.equal(OP.load("torch")(rows[:2], two), OP.load("torch")(rows[:2], one))
    experts = [stacked([own, own, own]) for own in (two, one)]
    ids = torch.tensor([[0, 2], [1, 1]])
    grouped = all_ops()["grouped_quantized_linear"].load("cpp")
    assert same_bits(*(grouped(rows[:2, None], ids, each) for each in experts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"super_scales": None}, "scales is torch.int8; expected"),
        ({"super_mins": None}, "super_mins belong to mins and super_scales"),
        ({"super_scales": torch.ones(3, 1, 16).half()}, r"super_scales has shape \[3, 1, 16\]; expected \[3, 2, 16\]"),
        ({"super_mins": torch.ones(3, 2, 16)}, "super_mins is torch.float32; expected float16"),
        ({"scales": torch.ones(3, 9, 16)}, "scales is torch.float32; expected int8"),
    ],
)
def test_levels_that_do_not_fit_are_refused(change, message):
    two, _ = of_two_levels(TABLE, 288, 32, True, False)
    with pytest.raises(ValueError, match=message):
        OP.load("cpp")(torch.zeros(1, 288), replace(two, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.zeros(1, 1, 8, 16, dtype=torch.int32)}, "codes has shape"),
        ({"scales": torch.ones(2, 3, 16)}, r"scales has shape \[2, 3, 16\]; expected \[2, 2, 16\]"),
        ({"scales": torch.ones(2, 2, 16, dtype=torch.float64)}, "scales is torch.float64"),
        ({"mins": torch.ones(2, 2, 16)}, "mins is torch.float32; expected float16"),
        ({"table": torch.ones(16)}, "a table of values belongs to kind 'table' alone"),
        ({"kind": "int3"}, "kind is 'int3'; expected one of"),
        ({"group_size": 24}, "group_size is 24; expected a multiple of 32"),
        ({"in_features": 65}, r"rows has shape \[1, 64\]; expected \[any, 65\]"),
        ({"kind": FLOAT8, "rounds_rows": True}, "rows are rounded for whole numbers only"),
        ({"out_features": 0}, "no inputs or no outputs"),
        (
            {
                "kind": TABLE,
                "codes": torch.zeros(2, 2, 4, 16, dtype=torch.int32),
                "table": torch.rand(16),
                "rounds_rows": True,
            },
            "rows are rounded for whole numbers up to 127 only",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    weight = replace(weight_of(INT8, 64, 20, False, False), **change)
    with pytest.raises(ValueError, match=message):
        OP.load("cpp")(torch.zeros(1, 64), weight)
