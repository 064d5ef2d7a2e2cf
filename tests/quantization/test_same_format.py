"""Weights of one format: what each stands for stays, whatever the others need."""

from __future__ import annotations

import pytest
import torch

from specdec_fast.quantization.packed_weight import FLOAT8, INT8, TABLE, dequantized, pack, stacked
from specdec_fast.quantization.same_format import by_output, in_one_format
from support.checkpoint_codes import integers, numbers

OUT = 20


def weight(kind=TABLE, middle=8, scale_dtype=torch.float16, has_mins=False, out_features=OUT, group_size=32, seed=0):
    codes = integers(0, 16, out_features, 64, seed=seed).to(torch.uint8)
    scales = numbers(out_features, 64 // group_size, seed=seed).to(scale_dtype)
    mins = scales * 0.5 if has_mins else None
    table = torch.arange(16) - middle if kind == TABLE else None
    return pack(codes, scales, mins, table, group_size, kind)


@pytest.mark.parametrize(
    ("others", "kind", "scale_dtype", "has_mins"),
    [
        ([{}], TABLE, torch.float16, False),
        ([{"middle": 5}], TABLE, torch.float32, True),  # another table means minima
        ([{"has_mins": True}], TABLE, torch.float16, True),
        ([{"scale_dtype": torch.float32}], TABLE, torch.float32, False),
        ([{"scale_dtype": torch.bfloat16}], TABLE, torch.float32, False),
        ([{"kind": INT8}], INT8, torch.float16, False),
        ([{"kind": INT8, "scale_dtype": torch.float32}, {"middle": 3}], INT8, torch.float32, False),
        ([{"middle": 5, "scale_dtype": torch.float32}], INT8, torch.float32, False),  # fp32 cannot represent minima
        ([{"middle": 5, "has_mins": True}], INT8, torch.float16, True),
    ],
)
def test_values_stay(others, kind, scale_dtype, has_mins):
    weights = [weight(), *(weight(**each, seed=i + 1) for i, each in enumerate(others))]
    found = in_one_format(weights)
    for before, after in zip(weights, found, strict=True):
        assert torch.equal(dequantized(after), dequantized(before))
        assert (after.kind, after.scales.dtype, after.mins is not None) == (kind, scale_dtype, has_mins)
        assert after.table is None or torch.equal(after.table, found[0].table)
    assert stacked(found).codes.shape == (len(weights), *found[0].codes.shape)


def test_what_nothing_represents_is_refused():
    with pytest.raises(ValueError, match="groups of 32 and 64 inputs cannot be held together"):
        in_one_format([weight(), weight(group_size=64)])
    with pytest.raises(ValueError, match="codes of the kinds float8_e4m3 and int8 cannot be held together"):
        in_one_format([weight(FLOAT8), weight(INT8)])
    halves = pack(
        torch.zeros(OUT, 64, dtype=torch.uint8), numbers(OUT, 2).half(), None, torch.arange(16) / 2, 32, TABLE
    )
    with pytest.raises(ValueError, match="of the kinds table and int8 cannot be held together, with a table of fracti"):
        in_one_format([halves, weight(INT8)])


@pytest.mark.parametrize("out_features", [16, 32, 20])
@pytest.mark.parametrize("has_mins", [True, False])
def test_outputs_of_several_weights(out_features, has_mins):
    """Also where the outputs of one end within a panel."""
    weights = [weight(has_mins=has_mins, out_features=out_features, seed=seed) for seed in range(3)]
    joined = by_output(weights)
    assert joined.out_features == 3 * out_features
    assert torch.equal(dequantized(joined), torch.cat([dequantized(each) for each in weights]))
