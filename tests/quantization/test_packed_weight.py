"""Packing: codes come back, formats keep their numbers, rounding is to nearest, and bad weights are refused."""

from __future__ import annotations

import pytest
import torch

from specdec_fast.quantization.packed_weight import (
    FLOAT8,
    INT8,
    TABLE,
    block_size_of,
    codes_of,
    dequantized,
    pack,
    part_of,
    scales_of,
    with_super_scales,
)
from specdec_fast.quantization.rounding import ROUNDINGS, rounded

SHAPES = [(16, 32), (70, 100), (1, 7), (33, 16)]


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group_size", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", [INT8, FLOAT8, TABLE])
def test_codes_and_scales_come_back(shape, group_size, kind):
    generator = torch.Generator().manual_seed(0)
    bits = 16 if kind == TABLE else 256
    codes = torch.randint(0, bits, shape, generator=generator, dtype=torch.uint8)
    scales = numbers(shape[0], -(-shape[1] // group_size)).half()
    table = numbers(16) if kind == TABLE else None
    weight = pack(codes, scales, scales * 2, table, group_size, kind)
    assert torch.equal(codes_of(weight), codes)
    assert all(map(torch.equal, scales_of(weight), (scales, scales * 2)))


@pytest.mark.parametrize("kind", [INT8, TABLE])
def test_a_part_has_the_weights_of_its_outputs_and_inputs(kind):
    codes = torch.randint(0, 16, (70, 100), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    table = numbers(16) if kind == TABLE else None
    weight = pack(codes, numbers(70, 4), numbers(70, 4, seed=1), table, 32, kind)
    for outputs, inputs in (
        (slice(5, 40), slice(0, 100)),
        (slice(0, 70), slice(64, 100)),
        (slice(3, 4), slice(40, 60)),
    ):
        part = part_of(weight, outputs, inputs)
        assert torch.equal(dequantized(part), dequantized(weight)[outputs, inputs])
    for inputs in (slice(0, 48), slice(48, 100), slice(16, 64)):
        with pytest.raises(ValueError, match="not whole groups of 32"):
            part_of(weight, slice(0, 70), inputs)
    with pytest.raises(ValueError, match="fewer of them than parts"):
        part_of(weight, slice(70, 70), slice(0, 100))
    eight = pack(codes, numbers(70, 4).to(torch.int8), None, None, 32, INT8)
    with pytest.raises(ValueError, match="two levels"):
        part_of(with_super_scales(eight, numbers(70, 1).half(), None), slice(0, 70), slice(0, 100))


def test_the_layout_is_that_of_the_documentation():
    """Word w of lane o, and the byte or half of byte that belongs to an input."""
    codes = torch.arange(40 * 64, dtype=torch.int64).view(40, 64)
    ones = torch.ones(40, 2)
    eight = pack((codes % 251).to(torch.uint8), ones, None, None, 32, INT8).codes.view(torch.uint8).view(3, 2, 8, 16, 4)
    four = pack((codes % 13).to(torch.uint8), ones, None, numbers(16), 32, TABLE).codes
    four = four.view(torch.uint8).view(3, 2, 4, 16, 4)
    for output, feature in ((0, 0), (17, 33), (39, 63), (20, 5), (16, 38)):
        panel, lane = divmod(output, 16)
        block, place = divmod(feature, 32)
        assert eight[panel, block, place // 4, lane, place % 4] == codes[output, feature] % 251
        byte = int(four[panel, block, place // 8, lane, place % 4])
        assert byte >> (4 * (place % 8 // 4)) & 15 == codes[output, feature] % 13


def test_values_of_every_kind():
    codes = torch.tensor([[0x00, 0x38, 0xB8, 0x7E, 0x01]], dtype=torch.uint8)
    scales = torch.full((1, 1), 0.5)
    assert dequantized(pack(codes, scales, None, None, 32, FLOAT8)).tolist() == [[0.0, 0.5, -0.5, 224.0, 2.0**-10]]
    assert dequantized(pack(codes, scales, None, None, 32, INT8)).tolist() == [[0.0, 28.0, -36.0, 63.0, 0.5]]
    four = pack(codes & 15, scales, scales, torch.arange(16.0) * 3, 32, TABLE)
    assert dequantized(four).tolist() == [[0.5, 12.5, 12.5, 21.5, 2.0]]


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_is_to_nearest(name, shape):
    """Half a step is the most, but for the end of the range that has no code: 4 bits reach from -8 to 7 steps."""
    rounding = ROUNDINGS[name]
    weight = numbers(*shape)
    weight[0] = 0
    packed = rounded(weight, rounding)
    assert packed.nbytes == rounding.bytes_of(*shape)
    assert packed.rounds_rows == name.endswith("-a8")
    steps = scales_of(packed)[0].double().abs().repeat_interleave(32, dim=1)[:, : shape[1]]
    distance = (dequantized(packed) - weight).abs()
    values = dequantized(packed) / steps.clamp_min(1e-30)
    at_end = values.abs() >= (6.5 if rounding.bits == 4 else 126.5)
    assert (distance <= steps * torch.where(at_end, 1.02, 0.5001)).all()
    assert not dequantized(packed)[0].any()


def test_rounding_uses_the_whole_range():
    largest = codes_of(rounded(numbers(64, 256), ROUNDINGS["int4"]))
    assert set(largest.unique().tolist()) == set(range(16))
    values = codes_of(rounded(numbers(64, 256), ROUNDINGS["int8"])).view(torch.int8)
    assert (int(values.min()), int(values.max())) == (-127, 127)


@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_numbers_without_a_scale_are_refused(name, value):
    weight = numbers(8, 64)
    weight[3, 40] = value
    with pytest.raises(ValueError, match=r"not finite|too large for fp16 scales"):
        rounded(weight, ROUNDINGS[name])


def test_sizes_that_do_not_fit_are_refused():
    codes = torch.zeros(4, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"scales has shape \[4, 3\]; expected \[4, 2\]"):
        pack(codes, torch.ones(4, 3), None, None, 32, INT8)
    with pytest.raises(ValueError, match=r"mins has shape \[2, 4\]; expected \[4, 2\]"):
        pack(codes, torch.ones(4, 2), torch.ones(2, 4), None, 32, INT8)
    with pytest.raises(ValueError, match="group_size is 24; expected a positive multiple of 16"):
        block_size_of(24)
