"""paged_attention and linear in C++ are compiled once per instruction set: every one that runs here must be right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from specdec_fast.ops import all_ops
from support.grids import each_value_once
from support.op_cases import CASES, DTYPES, changed, each_dtype, make
from support.op_checks import assert_agrees, assert_rows_independent, long_prefill

_C = pytest.importorskip("specdec_fast._C", reason="built without C++")
ATTENTION = all_ops()["paged_attention"]


@pytest.fixture(params=_C.attention_versions())
def version(request) -> Iterator[str]:
    _C.choose_attention_version(request.param)
    yield request.param
    _C.choose_attention_version(_C.attention_versions()[-1])


@each_value_once
@each_dtype
def test_every_version_agrees_with_the_oracle(version, dtype):
    for op, case in CASES:
        if op == ATTENTION.name:
            args = make(op, case, dtype)
            assert_agrees(ATTENTION, ATTENTION.load("cpp")(**args), ATTENTION.load("torch")(**args), args)


@each_dtype
@pytest.mark.parametrize("version", _C.linear_versions())
def test_every_version_of_linear_agrees_with_the_oracle(version, dtype):
    op = all_ops()["linear"]
    _C.choose_linear_version(version)
    try:
        for name, case in CASES:
            if name == op.name:
                args = make(name, case, dtype)
                assert_agrees(op, op.load("cpp")(**args), op.load("torch")(**args), args)
    finally:
        _C.choose_linear_version(_C.linear_versions()[-1])


# One row, and as many as the kernel lays out otherwise; inputs and outputs that fill its steps and blocks, and do not.
@each_value_once("version", "dtype")
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(128, 64), (352, 128), (33, 47), (1000, 100), (7, 16), (64, 5), (2048, 40)]
)
@each_dtype
@pytest.mark.parametrize("version", _C.linear_versions())
def test_rows_of_linear_are_independent_in_every_version(version, dtype, in_features, out_features):
    generator = torch.Generator().manual_seed(in_features)
    rows = torch.randn(97, in_features, generator=generator)
    rows[3], rows[4], rows[5, 0], rows[6, 1] = 0.0, -0.0, float("nan"), float("inf")
    rows[7:20] *= torch.logspace(-45, 4, 13)[:, None]  # some results are subnormal, and some infinite in half precision
    weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((out_features, in_features), (out_features,))
    )
    rows, weight, bias = (tensor.to(dtype) for tensor in (rows, weight, bias))
    linear = all_ops()["linear"].load("cpp")
    _C.choose_linear_version(version)
    try:
        for own_bias in (None, bias):
            alone = torch.cat([linear(row[None], weight, own_bias) for row in rows])
            for count in (2, 3, 4, 5, 6, 7, 24, 97):
                for first in range(0, 97, count):
                    together = linear(rows[first : first + count], weight, own_bias)
                    assert torch.equal(bits(together), bits(alone[first : first + count]))
    finally:
        _C.choose_linear_version(_C.linear_versions()[-1])


# As above; more rows than pass by a chunk of weights together, more inputs than a chunk, wide blocks of one row.
@each_value_once("version", "dtype")
@pytest.mark.parametrize(("in_features", "out_features"), [(300, 530), (33, 47), (7, 16), (64, 5)])
@each_dtype
@pytest.mark.parametrize("version", _C.linear_transposed_versions())
def test_transposed_weights_in_every_version(version, dtype, in_features, out_features):
    generator = torch.Generator().manual_seed(in_features)
    rows = torch.randn(103, in_features, generator=generator).to(dtype)
    rows[5, 0], rows[6, 1] = float("nan"), float("inf")
    weight = torch.randn(1, in_features, out_features, generator=generator).to(dtype)
    bias = torch.randn(1, out_features, generator=generator).to(dtype)
    grouped_linear = all_ops()["grouped_linear"].load("cpp")

    def linear(rows):
        return grouped_linear(rows[:, None], torch.zeros(len(rows), 1, dtype=torch.int64), weight.mT, bias)[:, 0]

    _C.choose_linear_transposed_version(version)
    try:
        alone = torch.cat([linear(row[None]) for row in rows])
        for count in (2, 5, 6, 24, 103):
            for first in range(0, 103, count):
                together = linear(rows[first : first + count])
                assert torch.equal(bits(together), bits(alone[first : first + count]))
    finally:
        _C.choose_linear_transposed_version(_C.linear_transposed_versions()[-1])
    # PyTorch with AMX lets a NaN reach the rows beside it, so it is given finite rows only.
    finite = rows.isfinite().all(dim=1)
    exact, theirs = rows.double() @ weight[0].double() + bias[0].double(), rows[finite] @ weight[0] + bias[0]
    assert not alone[~finite].isfinite().any()
    assert alone[finite].isfinite().all()
    assert (alone.double() - exact)[finite].norm() <= 2 * (theirs.double() - exact[finite]).norm()


def bits(tensor):
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@each_value_once
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 100, 128, 256])  # full, half and odd blocks of every version
def test_every_version_serves_every_head_size(version, head_dim):
    generator = torch.Generator().manual_seed(head_dim)
    args = long_prefill(torch.float32)
    kv = torch.randn(2, 40, 8, 2, head_dim, generator=generator)
    args |= {"query": torch.randn(273, 4, head_dim, generator=generator), "kv": (kv[0], kv[1])}
    assert_agrees(ATTENTION, ATTENTION.load("cpp")(**args), ATTENTION.load("torch")(**args), args)


# Windows and chunks that end before a task's last rows begin to see, within a tile, and beyond one.
RULES = {"all": {}, "window5": {"sliding_window": 5}, "window70": {"sliding_window": 70}}
RULES |= {"chunk5": {"attention_chunk": 5}, "chunk70": {"attention_chunk": 70}, "chunk128": {"attention_chunk": 128}}


@each_value_once("version", "dtype")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_rows_are_independent_in_every_version(version, dtype, rule):
    args = changed(long_prefill(dtype), "params", lambda params: replace(params, **rule))
    assert_rows_independent(ATTENTION.load("cpp"), args, chunk=5)
    assert_agrees(ATTENTION, ATTENTION.load("cpp")(**args), ATTENTION.load("torch")(**args), args)


def prompts_with_heads_of(head_dim, dtype):
    args, generator = long_prefill(dtype), torch.Generator().manual_seed(head_dim)
    kv = torch.randn(2, 40, 8, 2, head_dim, generator=generator).to(dtype)
    query = torch.randn(273, 4, head_dim, generator=generator).to(dtype)
    return args | {"query": query, "kv": (kv[0], kv[1])}


# Heads in whole vectors of every version: its kernel reads the keys and values of few rows where they are stored.
@each_value_once
@pytest.mark.parametrize("head_dim", [32, 160])  # less than a chunk of a score's sum, and two and a half
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_few_rows_have_the_bits_of_a_prompt_in_every_version(version, dtype, head_dim):
    args = prompts_with_heads_of(head_dim, dtype)
    assert_rows_independent(ATTENTION.load("cpp"), args, chunk=1)
    assert_rows_independent(ATTENTION.load("cpp"), args, chunk=3)


# The kernel for few rows looks for such values only where a sum is not finite.
@each_value_once
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_values_that_are_not_finite_reach_only_rows_that_see_them_in_every_version(version, dtype, broken):
    attention, args = ATTENTION.load("cpp"), prompts_with_heads_of(160, dtype)
    before = attention(**args)
    args["kv"][1][24, 5, 1, 159] = broken  # position 189 of the first sequence
    after = attention(**args)
    assert torch.equal(bits(after[:189]), bits(before[:189]))
    assert torch.equal(bits(after[:, :2]), bits(before[:, :2]))  # the other KV head
    assert after[189:203, 2:].isnan().all()
    assert_rows_independent(attention, args, chunk=3)


def test_unknown_version_is_refused():
    with pytest.raises(ValueError, match="no version 'mmx'"):
        _C.choose_attention_version("mmx")
    with pytest.raises(ValueError, match="no version 'mmx'"):
        _C.choose_linear_version("mmx")
    with pytest.raises(ValueError, match="no version 'mmx'"):
        _C.choose_linear_transposed_version("mmx")
