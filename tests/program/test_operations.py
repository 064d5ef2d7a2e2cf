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

pytestmark = needs_programs
FREQUENCIES = torch.linspace(0.01, 2, 5)
WEIGHT, BIAS = torch.linspace(-2, 2, WIDTH), torch.linspace(0.5, 3, WIDTH)
TABLE = torch.randn(VOCAB_SIZE + 2, WIDTH, generator=torch.Generator().manual_seed(1))
COMPARISONS = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)


def widened(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def group_limited(x):
    """The router of DeepSeek-V3: the best experts of the best two of four groups."""
    scores = widened(x).sigmoid()
    choice = scores + 1e-4 * torch.arange(WIDTH)
    groups = choice.view(-1, 4, 6).topk(2, dim=-1)[0].sum(dim=-1).topk(2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(choice[:, :4]).scatter_(1, groups, 1).unsqueeze(-1).expand(-1, 4, 6).reshape(-1, WIDTH)
    weights = scores.gather(1, choice.masked_fill(~mask.bool(), float("-inf")).topk(4, dim=-1)[1])
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights * 2.5


def put_together(x):
    out = x.new_empty(*x.shape[:2], 4, 8)
    out[..., :6] = x.view(1, -1, 4, 6)
    out[..., 6:].copy_(x[:, :, None, :2].expand(-1, -1, 4, -1))
    return out.flatten(2)


def overwritten_after_a_copy(x):
    before = x.clone()
    x[..., :4] = x[..., 4:8]
    return x + before


def turned(p):
    angles = p[..., None].float() * torch.linspace(0.01, 2, WIDTH // 2)
    return torch.polar(torch.full_like(angles, 1.5), angles) * 0.5


def rotated(x, p):
    pairs = torch.view_as_complex(widened(x).float().reshape(*x.shape[:-1], -1, 2)).unsqueeze(2)
    return torch.view_as_real(pairs * turned(p).unsqueeze(2)).flatten(2).type_as(x)


FUNCTIONS = {
    # functions of one number
    "copy": lambda x, p: x.clone(), "neg": lambda x, p: -x, "abs": lambda x, p: x.abs(),
    "square": lambda x, p: x**2, "cube": lambda x, p: x**3, "sqrt": lambda x, p: (x * x).sqrt(),
    "rsqrt": lambda x, p: (x * x + 0.1).rsqrt(), "reciprocal": lambda x, p: x.abs().add(1).reciprocal(),
    "exp": lambda x, p: x.exp(), "sin": lambda x, p: x.sin(), "cos": lambda x, p: x.cos(),
    "sin_of_much": lambda x, p: (widened(x) * 3e4).sin().to(x.dtype), "cos_of_much": lambda x, p: (x * 900).cos(),
    "sigmoid": lambda x, p: x.sigmoid(), "silu": lambda x, p: F.silu(x), "tanh": lambda x, p: x.tanh(),
    "relu": lambda x, p: x.relu(), "gelu": lambda x, p: F.gelu(x),
    "gelu_tanh": lambda x, p: F.gelu(x, approximate="tanh"), "floor": lambda x, p: (x * 3).floor(),
    "log": lambda x, p: torch.cat((x.abs().log(), (1 + x / 1000).log()), -1),
    "log1p": lambda x, p: torch.cat((x.abs().log1p(), (x / 1000).log1p()), -1),
    "expm1": lambda x, p: torch.cat((x.expm1(), (x / 1000).expm1()), -1), "softplus": lambda x, p: F.softplus(x),
    "softplus_steep": lambda x, p: F.softplus(x, beta=2, threshold=3),
    # of two, with constants, scalars and repeated numbers on either side
    "add": lambda x, p: x + WEIGHT, "sub": lambda x, p: WEIGHT - x, "rsub": lambda x, p: 1.5 - x,
    "mul": lambda x, p: 2.5 * x, "div": lambda x, p: x / BIAS, "by_a_number": lambda x, p: x / torch.tensor(3.0),
    "broadcast": lambda x, p: (x.view(1, -1, 4, 6) * x[..., :6].unsqueeze(2)).flatten(2),
    "maximum": lambda x, p: torch.maximum(x, WEIGHT.to(x.dtype)), "clamp": lambda x, p: x.clamp(min=-1.5, max=2),
    "max_of_two": lambda x, p: torch.max(torch.min(x, WEIGHT.to(x.dtype)), torch.tensor(-0.5)),
    "minimum": lambda x, p: torch.minimum(x, x.view(1, -1, 2, 12)[:, :, 0].repeat_interleave(2, -1)),
    "clamp_min": lambda x, p: x.clamp_min(0.5), "clamp_max": lambda x, p: x.clamp_max(0.5),
    # that compare and choose
    "compare": lambda x, p: torch.cat([f(x, WEIGHT).to(x.dtype) for f in COMPARISONS], -1),
    "logic": lambda x, p: (~((x > 0) & (x < 2)) | (x == 0)).float(),
    "where": lambda x, p: torch.where(x > WEIGHT, x, -1.0) + torch.where(x > 1, 2.0, x),
    "masked_fill": lambda x, p: x.masked_fill(~(x > 0).float().bool(), float("-inf")),
    "softmax": lambda x, p: x.softmax(-1), "softmax_wide": lambda x, p: widened(x).softmax(-1),
    "softmax_of_heads": lambda x, p: x.view(1, -1, 4, 6).transpose(1, 2).softmax(-1).transpose(1, 2).flatten(2),
    "topk": lambda x, p: x.view(-1, WIDTH).topk(5, dim=-1)[0][None],
    "places": lambda x, p: (x.float() + 1e-4 * torch.arange(WIDTH)).topk(5).indices.float(),
    "largest": lambda x, p: torch.cat([y.float() for y in x.view(1, -1, 4, 6).max(-1)], -1),
    "argmax": lambda x, p: x.argmax(-1, keepdim=True).float(),
    "gather": lambda x, p: x.square().gather(-1, (x.float() + 1e-4 * torch.arange(WIDTH)).topk(5).indices),
    "numbers_of_a_vector": lambda x, p: WEIGHT.to(x.dtype)[x.view(1, -1, 4, 6).topk(2).indices].flatten(2),
    "scatter": lambda x, p: torch.full_like(x, -1).scatter(-1, x[..., :8].topk(3).indices, 2.5),
    "scatter_rows": lambda x, p: torch.ones_like(x).scatter_(-1, x[..., :8].topk(3).indices, x[..., :3]),
    "group_limited": lambda x, p: group_limited(x[0])[None],
    "in_place": lambda x, p: x.clone().div_(x.abs().sum(-1, keepdim=True)).add_(1).mul_(WEIGHT.to(x.dtype)),
    # over the last axis
    "mean": lambda x, p: x.mean(-1, keepdim=True), "sum": lambda x, p: x.view(1, -1, 4, 6).sum(-1),
    "layer_norm": lambda x, p: F.layer_norm(x, (WIDTH,), WEIGHT.to(x.dtype), BIAS.to(x.dtype)),
    "layer_norm_bare": lambda x, p: F.layer_norm(x, (WIDTH,)),
    "rms_norm": lambda x, p: F.rms_norm(x, (WIDTH,), WEIGHT.to(x.dtype), 1e-6),
    "rms_norm_of_heads": lambda x, p: F.rms_norm(x.view(1, -1, 4, 6), (6,)).flatten(2),
    # the same numbers elsewhere
    "rotate_half": lambda x, p: torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1),
    "rotate_pairs": lambda x, p: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2),
    "repeat": lambda x, p: x[..., :5].repeat_interleave(2, dim=-1),
    "split": lambda x, p: x.split([8, 4, 12], -1)[2] * x.chunk(2, -1)[0],
    "heads": lambda x, p: (x.view(1, -1, 4, 6).transpose(1, 2) * 2).transpose(1, 2).reshape(1, x.shape[1], WIDTH),
    "swapped": lambda x, p: x.view(1, -1, 4, 6).transpose(2, 3).reshape(1, x.shape[1], WIDTH),
    "expand": lambda x, p: (x[:, :, None, :6].expand(1, -1, 3, 6) + 1).flatten(2),
    "unbind": lambda x, p: x.view(1, -1, 3, 8).unbind(2)[1], "select": lambda x, p: x.view(1, -1, 3, 8)[:, :, -1],
    "put_together": lambda x, p: put_together(x),
    # of positions
    "rotary": lambda x, p: (p[..., None].float() * FREQUENCIES).cos().to(x.dtype),
    "rotary_product": lambda x, p: (FREQUENCIES[None, :, None] @ p[:, None, :].float()).transpose(1, 2),
    "learned_positions": lambda x, p: x + F.embedding(p + 2, TABLE.to(x.dtype)),
    "scaled_by_position": lambda x, p: x * (1 + 0.1 * torch.log(1 + torch.floor(p / 16)))[..., None].to(x.dtype),
    "whole_times_halves": lambda x, p: torch.cat((x * (p + 3001)[..., None], x + (p - 5001)[..., None]), -1),
    "compared_positions": lambda x, p: torch.where((p >= 20)[..., None] & (p != 40)[..., None], x, -x),
    "row_of_a_table": lambda x, p: x * TABLE.to(x.dtype)[p],
    # complex numbers
    "rotated": rotated, "polar": lambda x, p: torch.view_as_real(turned(p)).flatten(2).to(x.dtype),
    # linear layers
    "linear": lambda x, p: F.linear(x, TABLE[:11].to(x.dtype), WEIGHT[:11].to(x.dtype)),
    "linear_of_heads": lambda x, p: F.linear(x.view(1, -1, 4, 6), TABLE[:5, :6].contiguous().to(x.dtype)).flatten(2),
    "linear_of_gpt2": lambda x, p: torch.addmm(BIAS.to(x.dtype), x[0], TABLE[:WIDTH].to(x.dtype))[None],
    "linear_as_matmul": lambda x, p: x @ TABLE[:WIDTH, :7].contiguous().to(x.dtype),
    "linear_as_matmul_of_heads": lambda x, p: (x.view(1, -1, 4, 6) @ TABLE[:6].to(x.dtype)).flatten(2),
    "linear_of_a_slice": lambda x, p: F.linear(x[..., 3:9], TABLE[:5, :6].contiguous().to(x.dtype)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
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
    if "softmax" in name:  # a rounding of the exponent's argument counts by how large that is
        cancelling[name] = truth.abs() * (1 + 2 * rows.amax(-1, True))
    unit = torch.finfo(dtype).eps * torch.maximum(truth.abs(), cancelling.get(name, truth.abs()))
    allowed = 2 * torch.maximum((theirs.double() - truth).abs(), unit) + torch.finfo(dtype).smallest_normal
    if "norm" in name or "linear" in name:  # sums of numbers larger than the result
        allowed = allowed.amax(dim=-1, keepdim=True)
    finite = theirs.isfinite()
    assert torch.equal(got[~finite], theirs[~finite])
    assert ((got.double() - truth).abs() <= allowed)[finite].all()


# What rounds each result of one arithmetic operation has the same bits everywhere.
ROUNDED = re.compile(
    "exp|rsqrt|sin|cos|sig|silu|tanh|gelu|soft|mean|sum|norm|linear|rotary$|cube|in_place|group_limited|^log|scaled_by|"
    "polar|rotated"
)


@pytest.mark.parametrize(
    ("name", "dtype"),
    grid(
        [(name, dtype) for name in FUNCTIONS for dtype in (torch.float32, torch.float16)],
        lambda each: (each[1] == torch.float32) == (list(FUNCTIONS).index(each[0]) % 2 == 0),
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


def changed_through_a_view(x):
    head = x[..., :5]
    head.add_(1)
    return x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, p: x.softmax(1), "softmax over anything but the last axis"),
        (lambda x, p: x - x.mean(1, keepdim=True), "anything but the last axis"),
        (lambda x, p: x.flip(1), "flip"),
        (lambda x, p: x[:, :5], "rows are cut out"),
        (lambda x, p: torch.cat((x, x), 1), "appended"),
        (lambda x, p: x.erf_(), "erf_"),
        (lambda x, p: changed_through_a_view(x), "changed in place through another tensor"),
        (lambda x, p: torch.zeros(1, x.shape[1], 5).add_(x[..., :5]), "add_"),
        (lambda x, p: x.topk(3).indices + 1, "add of integers"),
        (lambda x, p: x.int(), "cut to whole ones"),
        (lambda x, p: ~x.topk(3).indices, "logical operation on numbers"),
        (lambda x, p: x.topk(3, largest=False)[0], "smallest"),
        (lambda x, p: x.scatter(-1, x.topk(3).indices, x), "some numbers of a tensor"),
        (lambda x, p: x.view(1, -1, 4, 6) @ x.view(1, -1, 6, 4), "no linear layer"),
        (lambda x, p: overwritten_after_a_copy(x), "overwritten of which there is a copy"),
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
