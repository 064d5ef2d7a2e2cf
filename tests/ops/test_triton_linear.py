"""``linear`` in Triton: bits whatever the number of rows, several matrices in one launch, weights read once."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from support.source_tree import ROOT

pytest.importorskip("triton")

from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.triton_kernels import linear as module
from specdec_fast.triton_kernels.linear import linear, linears

interpreted = pytest.mark.skipif(not INTERPRETING, reason="a GPU's run is bench.gpu; this is about the interpreter")
COUNTS = (1, 3, 8, 16, 48, 64, 65, 200)


def make(num_rows: int, in_features: int, sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, in_features, generator=generator).to(dtype)
    return rows, [torch.randn(size, in_features, generator=generator).to(dtype) for size in sizes]


def tiles_of(num_rows: int, sizes: tuple[int, ...], dtype: torch.dtype, in_features: int = 264) -> dict[str, Any]:
    return module._launch(dtype, in_features, sizes, num_rows).constexprs


@interpreted
@pytest.mark.parametrize(
    ("height", "dtype", "in_features"),
    [
        (64, torch.float16, 264),
        (32, torch.float32, 136),
        pytest.param(16, torch.float16, 264, marks=pytest.mark.grid),
        pytest.param(32, torch.float16, 264, marks=pytest.mark.grid),
        pytest.param(16, torch.float32, 136, marks=pytest.mark.grid),
        pytest.param(64, torch.float16, 261, marks=pytest.mark.grid),
    ],
)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(height, dtype, in_features, monkeypatch):
    monkeypatch.setattr(module, "_ENOUGH_PROGRAMS", 1)  # so small matrices get the tiles of large ones
    size = height + 2  # one tile and a part of another
    rows, (weight,) = make(max(COUNTS), in_features, (size,), dtype)
    bias = torch.linspace(-1, 1, size).to(dtype)
    whole = linear(rows, weight, bias)
    found = [tiles_of(count, (size,), dtype, in_features) for count in COUNTS]
    assert {tiles["BLOCK_OUT"] for tiles in found} == {height}
    assert len({tiles["NUM_BLOCKS"] for tiles in found}) > 1 or in_features % 8
    for count in COUNTS:
        assert torch.equal(linear(rows[:count], weight, bias), whole[:count])
        assert torch.equal(linear(rows[-count:], weight, bias), whole[-count:])


@interpreted
def test_another_order_would_be_noticed(monkeypatch):
    rows, (weight,) = make(16, 1000, (34,), torch.float32)
    whole = linear(rows, weight)
    launch = module._launch

    def other(*args: Any) -> Any:
        found = launch(*args)
        found.constexprs["BLOCK_IN"] //= 2
        return found

    monkeypatch.setattr(module, "_launch", other)
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
    monkeypatch.setattr(module, "_ENOUGH_PROGRAMS", 1)
    rows, weights = make(21, 264, sizes, dtype)
    biases = [weight[:, 0].clone() for weight in weights] if has_bias else None
    found = linears(rows, weights, biases)
    assert [out.shape for out in found] == [(21, size) for size in sizes]
    assert all(out.is_contiguous() for out in found)
    for i, out in enumerate(found):
        assert torch.equal(out, linear(rows, weights[i], None if biases is None else biases[i]))


def test_tiles_of_both_low_heights_take_the_same_steps():
    """Of one matrix and of several; so a launch of several may have higher tiles than one for each."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        joint, alone = (tiles_of(8, sizes, dtype) for sizes in ((2048, 1024, 1024), (1024,)))
        assert (joint["BLOCK_OUT"], alone["BLOCK_OUT"]) == (32, 16)
        assert joint["BLOCK_IN"] == alone["BLOCK_IN"]
        assert {module.has_high_tiles(dtype, size) for size in (1024, 2048, 4096)} == {False}
    assert module.has_high_tiles(torch.bfloat16, 12_288)
    assert not module.has_high_tiles(torch.float32, 12_288)


class Noted:
    """Replaces the kernel, and notes grids and arguments."""

    def __init__(self) -> None:
        self.grids: list[int] = []
        self.args: tuple[Any, ...] = ()

    def __getitem__(self, grid: tuple[int]) -> Any:
        self.grids.append(grid[0])

        def launch(*args: Any, **options: Any) -> None:
            self.args = args

        return launch


@pytest.mark.parametrize("sizes", [(4096,), (4096, 1024, 1024), (12_288, 12_288)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_read_once_and_not_copied(sizes, dtype, monkeypatch):
    """A tile of weights belongs to one program for up to 64 rows, and there is one launch."""
    monkeypatch.setattr(module, "_linear_kernel", noted := Noted())
    weights = [torch.empty(size, 64, dtype=dtype) for size in sizes]
    for count in (1, 16, 17, 48, 64):
        linears(torch.empty(count, 64, dtype=dtype), weights)
    height = tiles_of(1, sizes, dtype, 64)["BLOCK_OUT"]
    assert noted.grids == [sum(-(-size // height) for size in sizes)] * 5
    assert all(given is weight for given, weight in zip(noted.args[1:], weights, strict=False))


INSTRUCTIONS = r"""
import re, sys
from bench.aot import TARGETS, compile_variant
from specdec_fast.triton_kernels.linear import variants
targets, pattern = sys.argv[1].split(","), sys.argv[2]
layout = r"versionMajor = \d+|instrShape = \[[\d, ]*\]|tensor_memory_encoding<[^>]*>|kWidth = \d+"
for variant in variants():
    if re.fullmatch(pattern, variant.name):
        for name in targets:
            code = compile_variant(variant, TARGETS[name]).asm["ttgir"]
            products = len(re.findall(r"\b(?:tt|ttng)\.\w*(?:dot|mma)\b", code))
            tiles = "high" if variant.constexprs["BLOCK_OUT"] == 64 else "low"
            kind = f"{variant.name.partition('_')[0]} {tiles}"
            print(name, kind, products, *sorted(set(re.findall(layout, code))), sep="|")
"""


@pytest.mark.parametrize(
    ("targets", "pattern"),
    [
        ("sm_90", r"bf16_(1024x151936|1024x3072|2048x1024)_[14]"),
        pytest.param("sm_80,sm_90,sm_100,gfx942", r"(bf16|fp16|fp32)_(1024x|2048x|4096x).*", marks=pytest.mark.grid),
    ],
    ids=["slice", "all"],
)
def test_products_are_the_same_instruction_for_any_number_of_rows_and_low_tiles_of_both_heights(targets, pattern):
    """The interpreter has no instructions. On a GPU the order within a product is that of its instruction."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", INSTRUCTIONS, targets, pattern]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for line in done.stdout.splitlines():
        target, kind, products, *layouts = line.split("|")
        assert int(products) >= 1
        found.setdefault((target, kind), set()).add(tuple(layouts))
    assert found
    assert {key: layouts for key, layouts in found.items() if len(layouts) != 1} == {}
    assert all(layouts != {()} for (_, kind), layouts in found.items() if kind.startswith("bf16"))
