"""``linear`` in Triton: bits whatever the number of rows, several matrices in one launch, weights read once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.triton_kernels import linear as module
from specdec_fast.triton_kernels import linear_tiles
from specdec_fast.triton_kernels.linear import linear, linears
from specdec_fast.triton_kernels.linear_descriptors import multiply
from support.noted_launches import Noted

interpreted = pytest.mark.skipif(not INTERPRETING, reason="a GPU's run is bench.gpu; this is about the interpreter")
COUNTS = (1, 3, 8, 16, 48, 64, 65, 200)


def make(num_rows: int, in_features: int, sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, in_features, generator=generator).to(dtype)
    return rows, [torch.randn(size, in_features, generator=generator).to(dtype) for size in sizes]


def tile_of(num_rows: int, sizes: tuple[int, ...], dtype: torch.dtype, in_features: int) -> tuple[int, int]:
    tiles = linear_tiles.launch_of(dtype, in_features, sizes, num_rows).constexprs
    return tiles["BLOCK_OUT"], tiles["BLOCK_ROWS"]


@interpreted
@pytest.mark.parametrize(
    ("dtype", "in_features", "tiles"),
    [
        (torch.float16, 264, {(64, 16), (64, 64), (64, 128), (128, 128)}),
        pytest.param(torch.float32, 136, {(32, 16), (32, 64)}, marks=pytest.mark.grid),
        pytest.param(torch.float16, 261, {(64, 16)}, marks=pytest.mark.grid),
        pytest.param(torch.float32, 137, {(32, 16)}, marks=pytest.mark.grid),
    ],
)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(dtype, in_features, tiles, monkeypatch):
    monkeypatch.setattr(linear_tiles, "_ENOUGH_PROGRAMS", 1)  # so small matrices get the tiles of large ones
    size = 66  # some tiles and a part of another
    rows, (weight,) = make(max(COUNTS), in_features, (size,), dtype)
    bias = torch.linspace(-1, 1, size).to(dtype)
    whole = linear(rows, weight, bias)
    assert {tile_of(count, (size,), dtype, in_features) for count in COUNTS} == tiles
    for count in COUNTS:
        assert torch.equal(linear(rows[:count], weight, bias), whole[:count])
        assert torch.equal(linear(rows[-count:], weight, bias), whole[-count:])


@interpreted
@pytest.mark.parametrize(
    ("dtype", "tiles"),
    [
        (torch.float16, {(64, 16), (32, 16), (16, 16), (64, 64), (32, 64), (16, 64), (64, 128), (128, 128)}),
        (torch.float32, {(32, 16), (16, 16), (32, 64), (16, 64)}),
    ],
)
def test_a_rows_bits_do_not_depend_on_the_height_of_tiles(dtype, tiles, monkeypatch):
    """Many outputs get higher tiles than few."""
    rows, (weight,) = make(130, 136, (70,), dtype)
    found = set()
    whole = linear(rows, weight)
    for enough in (1, 4, 1000):
        monkeypatch.setattr(linear_tiles, "_ENOUGH_PROGRAMS", enough)
        for count in (12, 40, 130):
            found.add(tile_of(count, (70,), dtype, 136))
            assert torch.equal(linear(rows[:count], weight), whole[:count])
    assert found == tiles


@interpreted
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_rows_bits_do_not_depend_on_the_tiles_of_hopper(has_bias, monkeypatch):
    """Some are computed by descriptors, one matrix in a launch."""
    rows, (weight,) = make(270, 136, (130,), torch.float16)
    bias = weight[:, 0].clone() if has_bias else None
    whole = linear(rows, weight, bias)
    monkeypatch.setattr(linear_tiles, "is_hopper", lambda: True)
    described: list[Any] = []
    monkeypatch.setattr(module, "multiply", lambda *args: described.append(args[0]) or multiply(*args))
    own = next(tile for tile in linear_tiles._LARGE if not tile.has_descriptors)
    for tile in linear_tiles._LARGE:
        # a tile without descriptors, so that several matrices have one, too; it is slow
        monkeypatch.setattr(linear_tiles, "_LARGE", (tile, own._replace(speed=1e-3)))
        assert torch.equal(linear(rows, weight, bias), whole)
    found = {(each.constexprs["BLOCK_OUT"], each.constexprs["BLOCK_ROWS"]) for each in described}
    assert found == {(128, 256), (128, 192), (128, 128)}


@interpreted
def test_matrices_that_descriptors_compute_faster_have_launches_of_their_own(monkeypatch):
    rows, weights = make(200, 136, (130, 70), torch.float16)
    whole = linears(rows, weights)
    monkeypatch.setattr(linear_tiles, "is_hopper", lambda: True)
    for described_speed, alone in ((1.0, True), (1e-3, False)):
        tiles = (linear_tiles.Tile(128, 128, 8, described_speed, True), linear_tiles.Tile(64, 64, 4, 0.1, False))
        monkeypatch.setattr(linear_tiles, "_LARGE", tiles)
        assert linear_tiles.are_faster_alone(torch.float16, 136, (130, 70), 200) == alone
        assert all(map(torch.equal, linears(rows, weights), whole))


@pytest.mark.parametrize(
    ("in_features", "size", "num_rows", "tile"),
    [  # the best ones that an H200 showed, in few waves
        (4096, 24_576, 192, (128, 192)),
        (4096, 12_288, 1024, (128, 256)),
        (4096, 4096, 192, None),
        (4096, 4096, 512, (128, 128)),
        (4096, 4096, 1024, (128, 256)),
        (3072, 1024, 256, None),
        (4096, 4096, 64, None),
    ],
)
def test_tiles_of_many_rows_fill_a_hopper(in_features, size, num_rows, tile, monkeypatch):
    """None: ``linear``'s own kernel is faster."""
    monkeypatch.setattr(linear_tiles, "is_hopper", lambda: True)
    launch = linear_tiles.described_launch(torch.bfloat16, in_features, size, num_rows)
    assert (launch and (launch.constexprs["BLOCK_OUT"], launch.constexprs["BLOCK_ROWS"])) == tile
    own = linear_tiles.launch_of(torch.bfloat16, in_features, (size,), num_rows)
    assert own.constexprs["BLOCK_ROWS"] == 64
    assert linear_tiles.described_launch(torch.float32, in_features, size, num_rows) is None


@interpreted
def test_choices_change_no_bit():
    rows, (weight,) = make(20, 264, (70,), torch.float16)
    expected = linear(rows, weight)
    for changes in ({"most_stages": 3}, {"has_low_tiles": False}):
        before = linear_tiles.launch_of(torch.float16, 264, (70,), 20)
        with linear_tiles.chosen(**changes):
            assert linear_tiles.launch_of(torch.float16, 264, (70,), 20) != before or "most_stages" in changes
            assert torch.equal(linear(rows, weight), expected)
        assert linear_tiles.launch_of(torch.float16, 264, (70,), 20) == before


@interpreted
def test_sums_in_fp32_are_sums_of_short_sums():
    """A sum of 8192 products one by one would have more than four times the error."""
    rows, (weight,) = make(3, 8192, (16,), torch.float32)
    exact = rows.double() @ weight.double().T
    one_by_one = torch.zeros(3, 16)
    for feature in range(8192):
        one_by_one += rows[:, feature, None] * weight[None, :, feature]
    error, other = ((found.double() - exact).norm() for found in (linear(rows, weight), one_by_one))
    assert 4 * error < other


@interpreted
def test_another_order_would_be_noticed(monkeypatch):
    rows, (weight,) = make(16, 1000, (34,), torch.float32)
    whole = linear(rows, weight)
    launch = module.launch_of

    def other(*args: Any) -> Any:
        found = launch(*args)
        found.constexprs["BLOCK_IN"] //= 2
        return found

    monkeypatch.setattr(module, "launch_of", other)
    assert not torch.equal(linear(rows, weight), whole)


@interpreted
@pytest.mark.parametrize(
    ("sizes", "has_bias", "dtype"),
    [
        ((20, 16, 33), True, torch.float32),
        ((16, 32), False, torch.float16),
        ((7, 30, 1), True, torch.float16),
        ((66, 64), True, torch.float16),
    ],
    ids=str,
)
def test_several_matrices_have_the_bits_of_a_launch_for_each(sizes, has_bias, dtype, monkeypatch):
    """Alone, some have tiles of another height."""
    monkeypatch.setattr(linear_tiles, "_ENOUGH_PROGRAMS", 1)
    rows, weights = make(21, 264, sizes, dtype)
    biases = [weight[:, 0].clone() for weight in weights] if has_bias else None
    found = linears(rows, weights, biases)
    assert [out.shape for out in found] == [(21, size) for size in sizes]
    assert all(out.is_contiguous() for out in found)
    for i, out in enumerate(found):
        assert torch.equal(out, linear(rows, weights[i], None if biases is None else biases[i]))


@pytest.mark.parametrize("sizes", [(4096,), (4096, 1024, 1024), (12_288, 12_288)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_read_once_and_not_copied(sizes, dtype, monkeypatch):
    """A tile of weights belongs to one program for up to 64 rows, and there is one launch."""
    monkeypatch.setattr(module, "_linear_kernel", noted := Noted())
    weights = [torch.empty(size, 64, dtype=dtype) for size in sizes]
    for count in (1, 16, 17, 48, 64):
        linears(torch.empty(count, 64, dtype=dtype), weights)
    heights = [tile_of(count, sizes, dtype, 64)[0] for count in (1, 16, 17, 48, 64)]
    assert noted.grids == [sum(-(-size // height) for size in sizes) for height in heights]
    assert all(given is weight for given, weight in zip(noted.args[1:], weights, strict=False))


INSTRUCTIONS = r"""
import re, sys
from bench.aot import TARGETS, compile_variant
from specdec_fast.triton_kernels.linear import variants
targets, pattern = sys.argv[1].split(","), sys.argv[2]
layout = r"versionMajor = \d+|instrShape = \[[\d, ]*\]|kWidth = \d+"
for variant in variants():
    if re.fullmatch(pattern, variant.name):
        for name in targets:
            code = compile_variant(variant, TARGETS[name]).asm["ttgir"]
            products = len(re.findall(r"\b(?:tt|ttng)\.\w*(?:dot|mma)\b", code))
            print(name, variant.name.partition("_")[0], products, *sorted(set(re.findall(layout, code))), sep="|")
"""


@pytest.mark.grid
def test_products_are_the_same_instruction_in_all_tiles(compiler):
    """The interpreter has no instructions. On a GPU the order within a product is that of its instruction.

    Hopper and later have instructions of many sizes, of which ``bench.gpu`` compares the bits.
    """
    found: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for line in compiler.run(INSTRUCTIONS, "sm_80,gfx942", r"(bf16|fp16|fp32)_(1024x|2048x|4096x).*").splitlines():
        target, kind, products, *layouts = line.split("|")
        assert int(products) >= 1
        found.setdefault((target, kind), set()).add(tuple(layouts))
    assert found
    assert {key: layouts for key, layouts in found.items() if len(layouts) != 1} == {}
    assert all(layouts != {()} for (_, kind), layouts in found.items() if kind != "fp32")
