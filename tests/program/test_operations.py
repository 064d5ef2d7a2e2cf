"""Single operations as forward programs: their numbers, and what a program cannot express."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from torch.nn import functional as F

from specdec_fast.program import NotLowerableError
from support.grids import grid
from support.models import VOCAB_SIZE
from support.programs import DTYPES, WIDTH, Function, compiled, needs_programs
from support.row_functions import FUNCTIONS

pytestmark = needs_programs


@pytest.mark.parametrize(
    ("name", "dtype"),
    grid(
        [(name, dtype) for name in FUNCTIONS for dtype in DTYPES],
        lambda each: each[1] == DTYPES[list(FUNCTIONS).index(each[0]) % len(DTYPES)],  # all have one dtype, in turn
    ),
    ids=str,
)
@torch.inference_mode()
def test_operations_are_computed_as_pytorch_does(name, dtype):
    model = Function(FUNCTIONS[name], dtype)
    expect_close(name, model, torch.arange(97), compiled(model)(torch.arange(97)))


def expect_close(name, model, token_ids, got):
    """At most twice as far from fp64 as PyTorch's own result, and two units in the last place where that is exact."""
    dtype, positions = model.embedding.weight.dtype, torch.arange(len(token_ids))[None]
    theirs = model(token_ids[None], positions)[0].flatten(1)
    truth = copy.deepcopy(model).double()(token_ids[None], positions)[0].flatten(1).double()
    assert got.shape == theirs.shape
    assert got.dtype == theirs.dtype
    rows = model.embedding.weight[token_ids].double().abs()
    cancelling = {"gelu": rows, "gelu_tanh": rows, "mean": rows.mean(-1, True), "sum": rows.view(-1, 4, 6).sum(-1)}
    cancelling["mean_of_heads"] = rows.view(-1, 4, 6).mean(1)
    cancelling["sum_kept"] = rows.view(-1, 4, 6).sum(1).repeat(1, 2)
    if "softmax" in name:  # a rounding of the exponent's argument counts by how large that is
        cancelling[name] = truth.abs() * (1 + 2 * rows.amax(-1, True))
    unit = torch.finfo(dtype).eps * torch.maximum(truth.abs(), cancelling.get(name, truth.abs()))
    allowed = 2 * torch.maximum((theirs.double() - truth).abs(), unit) + torch.finfo(dtype).smallest_normal
    if re.search("norm|linear|product", name):  # sums of numbers larger than the result
        allowed = allowed.amax(dim=-1, keepdim=True)
    finite = theirs.isfinite()
    assert torch.equal(got[~finite], theirs[~finite])
    assert ((got.double() - truth).abs() <= allowed)[finite].all()


# What rounds each result of one arithmetic operation has the same bits everywhere.
ROUNDED = re.compile(
    "exp|rsqrt|sin|cos|sig|silu|tanh|gelu|soft|mean|sum|norm|linear|rotary$|cube|in_place|group_limited|^log|scaled_by|"
    "polar|rotated|std|var|product"
)


@pytest.mark.parametrize(
    ("name", "dtype"),
    grid(
        [(name, dtype) for name in FUNCTIONS for dtype in (torch.float32, torch.float16)],
        lambda each: list(FUNCTIONS).index(each[0]) % 8 == (0 if each[1] == torch.float32 else 4),
    ),
    ids=str,
)
@torch.inference_mode()
def test_kernels_compute_operations_as_pytorch_does(name, dtype):
    """In Triton's interpreter, a few rows, of which the first has large numbers; each row alone has the same bits."""
    pytest.importorskip("triton")
    from support.device_programs import launched

    model, token_ids = Function(FUNCTIONS[name], dtype), torch.tensor([0, 40, 41])
    run = launched(model)
    got = run(token_ids)
    if ROUNDED.search(name):
        expect_close(name, model, token_ids, got)
    else:
        assert torch.equal(got, model(token_ids[None], torch.arange(3)[None])[0].flatten(1))
    assert torch.equal(run(token_ids[:1]), got[:1])


@pytest.mark.parametrize("is_kernel", [False, True], ids=["cpp", "triton"])
@pytest.mark.parametrize("name", ["log", "log1p", "expm1", "exp"])
@torch.inference_mode()
def test_functions_of_extreme_numbers(name, is_kernel):
    """0, numbers below 0, the smallest and the largest ones, those around the bounds of a formula, and what is none."""
    model, token_ids = Function(lambda x, p: getattr(torch, name)(x)), torch.arange(7)
    huge = float(torch.finfo(torch.float32).max)
    special = [0.0, -0.0, -1.0, -0.5, 1e-45, 1e-39, -1e-39, 1.2e-38, huge, -huge, *map(float, ("inf", "-inf", "nan"))]
    bounds = (1.0, -1.0, 0.70710678, 1.41421356, -18.0, 88.72284)
    near = [bound * (1 + i * 2**-23) for bound in bounds for i in (-1, 0, 1)]
    numbers = [*special, *near, *torch.logspace(-30, 30, 7 * WIDTH - len(special) - len(near)).tolist()]
    model.embedding.weight.data[:7] = torch.tensor(numbers).view(7, WIDTH)
    if is_kernel:
        pytest.importorskip("triton")
        from support.device_programs import launched as compiled_for
    else:
        compiled_for = compiled
    got, rows = compiled_for(model)(token_ids), model.embedding.weight[:7]
    theirs, truth = (getattr(torch, name)(each) for each in (rows, rows.double()))
    finite = theirs.isfinite()
    assert torch.equal(got.isnan(), theirs.isnan())
    assert torch.equal(got[~finite & ~theirs.isnan()], theirs[~finite & ~theirs.isnan()])
    allowed = 2 * torch.finfo(torch.float32).eps * truth.abs() + torch.finfo(torch.float32).smallest_normal
    assert ((got.double() - truth).abs() <= allowed)[finite].all()


def a_repeated_copy_is_changed(x):
    copy = x[..., None].expand(*x.shape, 2).contiguous()
    copy[..., 0] = x * 2
    return copy


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, p: x.softmax(1), "softmax over anything but the last axis"),
        (lambda x, p: x - x.mean(1, keepdim=True), "mean over the rows"),
        (lambda x, p: x - x.norm(dim=1, keepdim=True), "a norm over the rows"),
        (lambda x, p: x.view(1, -1, 4, 6).std((2, 3)), "several axes"),
        (lambda x, p: x.norm(p=3, dim=-1), "a norm of order 3"),
        (lambda x, p: x.flip(1), "flip"),
        (lambda x, p: x.index_select(1, torch.arange(3)), "index_select over anything but the last axis"),
        (lambda x, p: x.index_select(-1, p[0]), "picked at places that are no constant"),
        (lambda x, p: x[:, :5], "rows are cut out"),
        (lambda x, p: torch.cat((x, x), 1), "appended"),
        (lambda x, p: x.erf_(), "erf_"),
        (lambda x, p: torch.zeros(1, x.shape[1], 5).add_(x[..., :5]), "add_"),
        (lambda x, p: x.topk(3).indices + 1, "add of integers"),
        (lambda x, p: x.int(), "cut to whole ones"),
        (lambda x, p: ~x.topk(3).indices, "logical operation on numbers"),
        (lambda x, p: x.topk(3, largest=False)[0], "smallest"),
        (lambda x, p: x.scatter(-1, x.topk(3).indices, x), "some numbers of a tensor"),
        (lambda x, p: x.transpose(1, 2) @ x, "no linear layer"),
        (lambda x, p: x @ x.transpose(1, 2) @ x, "no linear layer"),
        (
            lambda x, p: torch.ones(5, 33) @ x[..., None].expand(*x.shape, 5)[..., :1, :].expand(-1, -1, 33, 5),
            "33 numbers",
        ),
        (lambda x, p: x.repeat(1, 2, 1), "rows are repeated"),
        (lambda x, p: a_repeated_copy_is_changed(x), "overwritten that are not in one buffer"),
        (lambda x, p: x.new_empty(x.shape[1], x.shape[1]), "no one axis counts the rows"),
        (lambda x, p: x * p.max(), "max"),
        (lambda x, p: x.flatten(0, 2), "axis of their own"),
        (lambda x, p: x * x.shape[1], "not computed in the same way"),
        (lambda x, p: x * torch.arange(x.shape[1])[:, None].float(), "shape"),
        (lambda x, p: F.dropout(x, 0.5), "dropout"),
        (lambda x, p: x**1.7, "power"),
        (lambda x, p: x if bool((x > 0).all()) else -x, "all"),
        (lambda x, p: p[..., None] * 2, "integers"),
    ],
)
def test_what_a_program_cannot_express_is_refused(function, message):
    with pytest.raises(NotLowerableError, match=message):
        compiled(Function(function))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, p: torch.where(x > 0, x, torch.full((WIDTH,), math.nan)),
        lambda x, p: x.masked_fill(x < 0, math.nan),
        lambda x, p: x * torch.tensor([1.0, math.nan, -math.inf] * (WIDTH // 3)),
    ],
    ids=["where", "masked_fill", "product"],
)
def test_constants_may_be_nan(function):
    """Two recordings agree in them, though a NaN equals none."""
    model, token_ids = Function(function), torch.arange(5)
    expected = model(token_ids[None], token_ids[None])[0]
    torch.testing.assert_close(compiled(model)(token_ids), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_tokens_outside_the_vocabulary_are_refused(token_id):
    with pytest.raises(IndexError, match=f"token id {token_id} lies outside a table of {VOCAB_SIZE} rows"):
        compiled(Function(lambda x, p: x))(torch.tensor([1, token_id, 2]))
