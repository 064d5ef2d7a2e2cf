"""``quantized_linear`` in Triton: bits whatever the number of rows; codes are read once, ahead, into registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from bench.op_cases.quantized_linear import E2M1, WHOLE
from specdec_fast.ops.quantized_linear import rounded_blocks
from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.quantization.packed_weight import FLOAT8, INT8, TABLE, PackedWeight, codes_of, pack, scales_of
from specdec_fast.triton_kernels import quantized_linear as module
from specdec_fast.triton_kernels import quantized_linear_parts as parts
from specdec_fast.triton_kernels.quantized_linear import quantized_linear
from support.grids import grid
from support.noted_launches import Noted

interpreted = pytest.mark.skipif(not INTERPRETING, reason="a GPU's run is bench.gpu; this is about the interpreter")
IN_FEATURES = 300  # ten blocks: more than there are lanes, and the last is not whole
OUT_FEATURES = 20  # a panel and a part of one


def make_weight(
    kind: str, group_size: int = 32, table: list[float] | None = None, has_mins: bool = False, rounds_rows: bool = False
) -> PackedWeight:
    generator = torch.Generator().manual_seed(0)
    num_codes = 256 if table is None else 16
    codes = torch.randint(0, num_codes, (OUT_FEATURES, IN_FEATURES), generator=generator, dtype=torch.uint8)
    if kind == FLOAT8:
        codes = torch.where((codes & 127) == 127, codes - 1, codes)
    shape = (OUT_FEATURES, -(-IN_FEATURES // group_size))
    scales, mins = (torch.randn(shape, generator=generator).half() for _ in range(2))
    values = None if table is None else torch.tensor(table)
    return pack(codes, scales, mins if has_mins else None, values, group_size, kind, rounds_rows)


def make_rows(num_rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, IN_FEATURES, generator=torch.Generator().manual_seed(1)).to(dtype)


def of_levels(weight: PackedWeight) -> PackedWeight:
    """The same with integers as scales, which numbers of 256 inputs are multiplied with."""
    generator = torch.Generator().manual_seed(2)
    shape = (weight.codes.shape[0], -(-IN_FEATURES // 256), 16)
    supers = torch.randn(2, *shape, generator=generator).half()
    whole = {
        name: (getattr(weight, name) * 40).to(torch.int8)
        for name in ("scales", "mins")
        if getattr(weight, name) is not None
    }
    return replace(weight, super_scales=supers[0], super_mins=None if weight.mins is None else supers[1], **whole)


WEIGHTS = {
    "int4": make_weight(TABLE, table=WHOLE, has_mins=True),
    "int8": make_weight(INT8, group_size=64),
    "float8": make_weight(FLOAT8, group_size=128),
    "short": make_weight(INT8, group_size=16),
    "int4_a8": make_weight(TABLE, table=E2M1, rounds_rows=True),
    "int8_a8": make_weight(INT8, has_mins=True, rounds_rows=True),
    "short_a8": make_weight(INT8, group_size=16, rounds_rows=True),
    "levels": of_levels(make_weight(TABLE, table=WHOLE, has_mins=True)),
    "short_levels_a8": of_levels(make_weight(INT8, group_size=16, rounds_rows=True)),
}
each_weight = pytest.mark.parametrize("weight", grid(WEIGHTS, keep=list(WEIGHTS)[::2]))


def rows_of_tile(num_rows: int, dtype: torch.dtype, weight: PackedWeight) -> int:
    form = module.format_of(weight)
    tiles = module.launch_of(form, dtype, weight.in_features, weight.out_features, num_rows).constexprs
    return tiles["BLOCK_ROWS"]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.grid)])
@each_weight
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(weight, dtype):
    counts = (5, 9, 17)
    rows = make_rows(17, dtype)
    bias = torch.linspace(-1, 1, OUT_FEATURES).to(dtype)
    whole = quantized_linear(rows, weight, bias)
    is_narrow = dtype == torch.float32 and not weight.rounds_rows
    assert {rows_of_tile(count, dtype, weight) for count in counts} == ({8, 16} if is_narrow else {8, 16, 64})
    for count in counts[:-1]:
        assert torch.equal(quantized_linear(rows[-count:], weight, bias), whole[-count:])


@interpreted
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["int4", "int8_a8"])
def test_a_row_that_is_not_finite_changes_no_other(name, number):
    weight = WEIGHTS[name]
    rows = make_rows(5, torch.float16)
    expected = quantized_linear(rows, weight)
    rows[2, IN_FEATURES - 1] = number
    found = quantized_linear(rows, weight)
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], expected[others])
    assert not torch.isfinite(found[2]).any()


@interpreted
@pytest.mark.parametrize("name", ["int4", "int8_a8"])
def test_a_rows_bits_do_not_depend_on_the_width_of_tiles(name, monkeypatch):
    """Many outputs get tiles of two panels."""
    rows = make_rows(3, torch.float16)
    narrow = quantized_linear(rows, WEIGHTS[name])
    monkeypatch.setattr(module, "_WIDE", 1)
    launch = module.launch_of(module.format_of(WEIGHTS[name]), rows.dtype, IN_FEATURES, OUT_FEATURES, 3)
    assert launch.constexprs["BLOCK_OUT"] == 32
    assert torch.equal(quantized_linear(rows, WEIGHTS[name]), narrow)


@interpreted
def test_another_order_of_blocks_would_be_noticed():
    weight = make_weight(INT8)
    rows = make_rows(4, torch.float32)[:, :256]
    codes, scales = codes_of(weight)[:, :256], torch.ones(OUT_FEATURES, 8)
    found = quantized_linear(rows, pack(codes, scales, None, None, 32, INT8))
    rolled = quantized_linear(rows.roll(32, 1), pack(codes.roll(32, 1), scales, None, None, 32, INT8))
    torch.testing.assert_close(found, rolled, rtol=1e-4, atol=1e-2)
    assert not torch.equal(found, rolled)


@interpreted
@pytest.mark.parametrize("name", ["int4", "int4_a8"])
def test_bytes_permuted_in_registers_are_the_entries_of_the_table(name, monkeypatch):
    """The interpreter, as devices without the instruction, loads them; the results are the same."""
    rows = make_rows(2, torch.float16)
    loaded = quantized_linear(rows, WEIGHTS[name])
    monkeypatch.setattr(module, "has_permute", lambda: True)
    permute, selectors = parts.permute, []
    monkeypatch.setattr(parts, "permute", lambda *args: selectors.append(args[2]) or permute(*args))
    assert torch.equal(quantized_linear(rows, WEIGHTS[name]), loaded)
    assert selectors


@interpreted
@pytest.mark.parametrize("size", [16, 32])
def test_rows_are_rounded_as_by_the_oracle(size):
    """Also halves, blocks of zeros and of tiny numbers, and blocks that are not finite, bit by bit."""
    rows = torch.randn(4, 80 * size, generator=torch.Generator().manual_seed(0))
    rows[0, : 2 * size] = 0.0
    rows[1, :size] = torch.arange(size) + 0.5  # with a step of 1, all but the first are halves
    rows[1, 0] = 127.0
    rows[2, : 2 * size] *= 2.0**-110
    rows[3, 5], rows[3, size + 5], rows[3, 2 * size + 5] = float("nan"), float("inf"), 3e38
    whole, steps = module._rounded(rows, 80, size)
    expected, expected_steps = rounded_blocks(rows.view(4, 80, size))
    assert torch.equal(whole.float(), expected.flatten(1))
    torch.testing.assert_close(steps, expected_steps, rtol=0, atol=0, equal_nan=True)
    assert steps.isnan().sum() == 2


@interpreted
@pytest.mark.parametrize("name", ["levels", "short_levels_a8"])
def test_scales_of_two_levels_have_the_bits_of_their_products(name):
    weight = WEIGHTS[name]
    rows = make_rows(3, torch.float16)
    scales, mins = scales_of(weight)
    products = pack(codes_of(weight), scales, mins, weight.table, weight.group_size, weight.kind, weight.rounds_rows)
    assert torch.equal(quantized_linear(rows, weight), quantized_linear(rows, products))


@pytest.fixture
def noted(monkeypatch) -> Iterator[Noted]:
    found = Noted()
    monkeypatch.setattr(module, "_quantized_linear_kernel", found)
    return found


@pytest.mark.parametrize("out_features", [4096, 12_288])
def test_weights_are_read_once_and_not_copied(out_features, noted):
    """A tile of weights belongs to one program for up to 64 rows, and an H100 gets at least a program for each core."""
    codes = torch.empty(out_features // 16, 1, 4, 16, dtype=torch.int32)
    scales = torch.empty(out_features // 16, 1, 16)
    weight = PackedWeight(codes, scales, None, torch.empty(16), 32, out_features, 32, TABLE)
    for count in (1, 8, 16, 17, 64, 65):
        quantized_linear(torch.empty(count, 32, dtype=torch.bfloat16), weight)
    few = out_features // (16 if out_features == 4096 else 32)
    assert few >= 132
    assert noted.grids == [few] * 3 + [out_features // 32] * 2 + [2 * out_features // 32]
    assert noted.args[2] is codes
    assert noted.args[3] is scales


def test_rows_and_scales_are_aligned_as_the_kernel_assumes(noted):
    """Rows are loaded in vectors of 16 bytes, scales of 16 bits in pairs."""
    weight = WEIGHTS["int8"]
    scales = torch.empty(weight.scales.numel() + 1, dtype=torch.float16)[1:].view_as(weight.scales)
    for rows in (make_rows(3, torch.float16), make_rows(3, torch.float16)[:, :288][:, 1:]):
        features = rows.shape[1]
        odd = replace(weight, scales=scales, in_features=features, codes=weight.codes[:, : -(-features // 32)])
        quantized_linear(rows, odd)
        numbers, kept = noted.args[0], noted.args[3]
        assert numbers.shape == (3, 32 * odd.codes.shape[1])
        assert numbers.data_ptr() % 16 == 0
        assert numbers.stride(0) % 8 == 0
        assert torch.equal(numbers[:, :features], rows)
        assert not numbers[:, features:].any()
        assert kept.data_ptr() % 4 == 0
        assert kept.shape == scales.shape


LOOPS = r"""
import re, sys
from bench.aot import TARGETS, compile_variant
from specdec_fast.triton_kernels import grouped_quantized_linear, quantized_linear
layout = r"versionMajor = \d+|instrShape = \[[\d, ]*\]|kWidth = \d+"
for variant in (*quantized_linear.variants(), *grouped_quantized_linear.variants()):
    if re.fullmatch(sys.argv[2], variant.name):
        for name in sys.argv[1].split(","):
            code = compile_variant(variant, TARGETS[name]).asm["ttgir"]
            loop = code[code.index("scf.for"):code.index("scf.yield")]
            others = len(re.findall(r"= tt\.load|ttg\.local_alloc", loop))
            print(name, variant.name, others, *sorted(set(re.findall(layout, code))), sep="|")
"""


@pytest.mark.grid
def test_products_are_the_same_instruction_in_all_tiles_and_nothing_is_waited_for(compiler):
    """The interpreter has no instructions. On a GPU the order within a product is that of its instruction.

    On NVIDIA devices nothing in the loop waits for memory: what it needs has been loaded ahead, and codes become values
    in the registers in which they are multiplied. Experts have the instructions of a matrix, and so its bits.
    """
    layouts: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    names = r"bf16_(int4|int8|int4_a8|int8_a8)_\d.*"
    for line in compiler.run(LOOPS, "sm_80,sm_90,sm_100,gfx942", names).splitlines():
        target, name, others, *found = line.split("|")
        layouts.setdefault((target, name.rpartition("_")[0]), set()).add(tuple(found))
        assert target == "gfx942" or int(others) == 0, (target, name)
    assert len(layouts) == 16
    assert {key: found for key, found in layouts.items() if len(found) != 1 or found == {()}} == {}
