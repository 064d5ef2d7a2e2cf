"""Sizes of chunks: the trial rejects every size at which some row is summed in another order."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from specdec_fast.models import row_counts
from specdec_fast.models.row_counts import Kind, chunks, kind_of, revealing, sizes_of
from specdec_fast.torch_threads import in_invariant_call, invariant_call, one_thread
from support.grids import each_value_once

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL = row_counts._COUNTS


def exactly(rows, weight):
    """One order whatever the number of rows: each feature after the other, in fp32."""
    out = torch.zeros(len(rows), len(weight))
    for feature, column in zip(rows.float().T, weight.float().T, strict=True):
        out = out + feature[:, None] * column
    return out.to(rows.dtype)


def in_two_sums(rows, weight):
    half = rows.shape[1] // 2
    first, second = (exactly(rows[:, part], weight[:, part]).float() for part in (slice(half), slice(half, None)))
    return (first + second).to(rows.dtype)


def library(is_other):
    """A linear that adds in two sums where ``is_other`` of the number of rows and the place says so."""

    def linear(rows, weight, bias=None):
        places = torch.tensor([is_other(len(rows), place) for place in range(len(rows))])
        return torch.where(places[:, None], in_two_sums(rows, weight), exactly(rows, weight))

    return linear


LIBRARIES = {
    "always the same": (lambda count, place: False, ALL),
    "few rows": (lambda count, place: count < 4, ALL[2:]),
    "one row": (lambda count, place: count == 1, ALL[1:]),
    "multiples of 16": (lambda count, place: count % 16 > 0 and place % 2 == 0, (16, 32, 48, 64, 128, 256)),
    "another kernel for many rows": (lambda count, place: count > 48, ALL[:9]),
    "rows after the last full block of six": (lambda count, place: place >= count - count % 6, (12, 24, 48)),
    "one place": (lambda count, place: (count, place) == (24, 17), tuple(n for n in ALL if n != 24)),
    "no two places": (lambda count, place: count > 1 and place % 2 > 0, (1,)),
    "few rows, often": (lambda count, place: count % 16 > 0, (1, 2, 4, 8, 12, 24)),
}


@each_value_once
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LIBRARIES)
def test_sizes_are_those_with_one_order(name, dtype, monkeypatch):
    is_other, sizes = LIBRARIES[name]
    monkeypatch.setitem(row_counts.FUNCTIONS, "linear", library(is_other))
    monkeypatch.setattr(row_counts, "_found", {})
    assert sizes_of(kind_of("linear", torch.zeros(24, 48, dtype=dtype), None)) == sizes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), [(16, 40), (64, 40), (353, 600)])
def test_numbers_reveal_another_order_in_nearly_every_output(dtype, in_features, out_features):
    kind = kind_of("linear", torch.zeros(out_features, in_features, dtype=dtype), None)
    rows, weight, _ = revealing(kind, 12)
    differ = exactly(rows, weight) != in_two_sums(rows, weight)
    assert differ.any(dim=1).all(), "in every row"
    assert differ.float().mean() > (0.4 if in_features < 64 else 0.9)


@pytest.mark.parametrize("function", ["linear", "addmm"])
def test_numbers_have_the_weights_shape_strides_and_alignment(function):
    stored = torch.zeros(40 * 56 + 3)[3:].view(40, 56)
    for weight in (stored, stored.T, stored[:, :20]):
        kind = kind_of(function, weight, torch.zeros(1))
        rows, made, bias = revealing(kind, 5)
        assert kind_of(function, made, bias) == kind
        assert row_counts.FUNCTIONS[function](rows, made, bias).shape[0] == 5


@pytest.mark.parametrize("sizes", [(1,), ALL, ALL[2:], (64,), (16, 32, 48)])
def test_chunks_hold_all_rows(sizes):
    for num_rows in (1, 2, 5, 48, 63, 64, 65, 300, 2048):
        found = chunks(sizes, num_rows)
        assert set(found) <= set(sizes)
        assert num_rows <= sum(found) < num_rows + sizes[-1]
    assert chunks(ALL, 256) == (256,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (97, 32), (128, 353)])
def test_rows_of_pytorchs_linear_in_chunks_have_the_same_bits(dtype, shape):
    """Ordinary numbers, in this machine's library: every size against the smallest."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    rows = torch.randn(ALL[-1], shape[1], generator=generator).to(dtype)
    sizes = sizes_of(kind_of("linear", weight, None))
    few = torch.cat([functional.linear(piece.clone(), weight) for piece in rows.split(sizes[0])][: 64 // sizes[0]])
    for size in sizes:
        whole = functional.linear(rows[:size].clone(), weight)
        shared = min(size, len(few))
        assert torch.equal(whole[:shared], few[:shared])


def test_kinds_of_other_threads_are_tried_by_themselves():
    weight = torch.zeros(8, 8)
    kinds = set()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        kinds.add(kind_of("linear", weight, None))
    torch.set_num_threads(1)
    assert len(kinds) == 2
    assert all(isinstance(kind, Kind) for kind in kinds)


@pytest.fixture
def three_threads():
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


def test_only_what_is_computed_apart_has_threads(three_threads):
    with one_thread():
        assert torch.get_num_threads() == 1
        assert invariant_call(torch.get_num_threads) == 3
        assert invariant_call(in_invariant_call)
        with pytest.raises(ZeroDivisionError):
            invariant_call(lambda: 1 / 0)
        assert torch.get_num_threads() == 1
        assert not in_invariant_call()
    assert torch.get_num_threads() == 3


def test_threads_are_given_back_after_an_exception(three_threads):
    with pytest.raises(ZeroDivisionError), one_thread():
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3
