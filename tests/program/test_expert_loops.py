"""Loops over the experts that rows have chosen, as models write them: every row gets its own experts in a program."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from specdec_fast.kv_cache.cache_rules import CacheRules
from specdec_fast.ops import resolve
from specdec_fast.program import NotLowerableError, compile_forward
from specdec_fast.program.plan.ir import GroupedLinear, Linear
from support.grids import grid
from support.programs import CPU, DTYPES, NO_LAYERS, WIDTH, Function, compiled, needs_programs

pytestmark = needs_programs
EXPERTS, CHOICES = 6, 2
_GENERATOR = torch.Generator().manual_seed(3)
_UP, _DOWN = (torch.randn(EXPERTS, WIDTH, WIDTH, generator=_GENERATOR) / 5 for _ in range(2))
_BIAS = torch.randn(EXPERTS, WIDTH, generator=_GENERATOR)
UP, DOWN, BIAS = ({dtype: each.to(dtype) for dtype in (*DTYPES, torch.float64)} for each in (_UP, _DOWN, _BIAS))


def chosen(x):
    """Return weights and places of the best experts of every row, without ties."""
    scores = x[:, :EXPERTS].float() + 1e-4 * torch.arange(EXPERTS)
    values, ids = scores.topk(CHOICES, dim=-1)
    return values.softmax(-1).to(x.dtype), ids


def gated(x, expert):
    up, down = UP[x.dtype][expert], DOWN[x.dtype][expert]
    return F.linear(F.silu(F.linear(x, up)) * x, down)


def with_bias(x, expert):
    return F.linear(x, UP[x.dtype][expert], BIAS[x.dtype][expert]).relu()


def some_without_weights(x, expert):
    return x * 2 if expert in (2, 3) else gated(x, expert)


def with_shared_weights(x, expert):
    """The last three experts have one matrix: no group of more than four lies in memory one after the other."""
    return F.linear(x, UP[x.dtype][min(expert, 3)])


def with_vectors(x, expert):
    """Half of the experts multiply by one vector, half by another."""
    return x * BIAS[x.dtype][0 if expert < 3 else 1]


def as_matrices(x, expert):
    return (x @ UP[x.dtype].view(-1, WIDTH).view(EXPERTS, WIDTH, WIDTH)[expert]).tanh()


def one_kind_each(x, expert):
    """Return rows times a number of the expert: three groups of experts."""
    return x * (1.5, 1.5, -2.0, -2.0, 0.5, 0.5)[expert]


def loop(x, compute, is_in_place=True, spare=0):
    """Add up the experts of every row of ``x`` ``[T, WIDTH]``, expert after expert."""
    weights, ids = chosen(x)
    sums = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=EXPERTS + spare).permute(2, 1, 0)
    for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        choices, rows = torch.where(mask[int(expert)])
        states = compute(x[rows], int(expert)) * weights[rows, choices, None]
        sums = sums.index_add_(0, rows, states) if is_in_place else sums.index_add(0, rows, states)
    return sums


def other_order(x):
    """The same loop with axes in another order, and a number of the choice instead of a column."""
    weights, ids = chosen(x)
    sums, mask = x * 1, F.one_hot(ids, EXPERTS).permute(2, 0, 1)
    for expert in (mask.sum((1, 2)) > 0).nonzero():
        rows, choices = torch.where(mask[expert[0]].squeeze(0))
        if rows.numel() == 0:
            continue
        sums.index_add_(0, rows, gated(x[rows], expert[0]) * weights[rows, choices].unsqueeze(-1))
    return sums


LOOPS = {
    "gated": lambda x, p: loop(x[0], gated)[None],
    "with_bias": lambda x, p: loop(x[0], with_bias)[None],
    "some_without_weights": lambda x, p: loop(x[0], some_without_weights, spare=2)[None],
    "with_shared_weights": lambda x, p: loop(x[0], with_shared_weights)[None],
    "with_vectors": lambda x, p: loop(x[0], with_vectors)[None],
    "as_matrices": lambda x, p: loop(x[0], as_matrices, is_in_place=False)[None],
    "one_kind_each": lambda x, p: loop(x[0], one_kind_each)[None],
    "other_order": lambda x, p: other_order(x[0])[None],
    "two_loops": lambda x, p: loop(loop(x[0], gated), with_bias)[None],
}


def expect_close(model, token_ids, got):
    """At most twice as far from fp64 as PyTorch's own result."""
    positions = torch.arange(len(token_ids))[None]
    theirs = model(token_ids[None], positions)[0]
    truth = copy.deepcopy(model).double()(token_ids[None], positions)[0]
    assert got.dtype == theirs.dtype
    assert (got - truth).norm() <= 2 * (theirs - truth).norm()
    assert (got - truth).norm(dim=-1).max() <= 4 * (theirs - truth).norm(dim=-1).max(), "no row has other experts"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOOPS)
@torch.inference_mode()
def test_every_row_gets_the_experts_that_it_has_chosen(name, dtype):
    model, token_ids = Function(LOOPS[name], dtype), torch.arange(97)
    program = compiled(model)
    got = program(token_ids)
    expect_close(model, token_ids, got)
    assert torch.equal(program(token_ids[40:43]), got[40:43])


@pytest.mark.parametrize("name", grid(list(LOOPS), keep=list(LOOPS)[::3]))
@torch.inference_mode()
def test_kernels_compute_the_experts_of_every_row(name):
    pytest.importorskip("triton")
    from support.device_programs import launched

    model, token_ids = Function(LOOPS[name]), torch.tensor([40, 3, 41, 90])
    expect_close(model, token_ids, launched(model)(token_ids))


def recorded(function):
    model = Function(function)
    return compile_forward(model, model, NO_LAYERS, resolve(CPU), CacheRules()).instructions


def test_weights_of_chosen_experts_alone_are_read():
    """All experts are one grouped product per linear layer; the weights are those of the model."""
    steps = recorded(LOOPS["gated"])
    grouped = [step for step in steps if isinstance(step, GroupedLinear)]
    assert [step for step in steps if isinstance(step, Linear)] == []
    assert [(step.weight.data_ptr(), step.choices) for step in grouped] == [
        (w.data_ptr(), CHOICES) for w in (UP[torch.float32], DOWN[torch.float32])
    ]


def ahead(x):
    _, ids = chosen(x)
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    sums, total = torch.zeros_like(x), 0
    for expert in (mask.sum((-1, -2)) > 0).nonzero():
        _, rows = torch.where(mask[int(expert)])
        sums.index_add_(0, rows, x[rows])
        total = total + sums.square()  # before all experts have been added
    return total


def last_states(x):
    _, ids = chosen(x)
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    sums = torch.zeros_like(x)
    for expert in (mask.sum((-1, -2)) > 0).nonzero():
        _, rows = torch.where(mask[int(expert)])
        states = gated(x[rows], int(expert))
        sums.index_add_(0, rows, states)
    return sums + states


def between_visits(x):
    _, ids = chosen(x)
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    sums, factor = torch.zeros_like(x), x * 1
    for expert in (mask.sum((-1, -2)) > 0).nonzero():
        _, rows = torch.where(mask[int(expert)])
        sums.index_add_(0, rows, factor[rows])
        factor = factor * 2  # depends on which experts other rows have chosen
    return sums


def without_last(x):
    _, ids = chosen(x)
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    sums = torch.zeros_like(x)
    for expert in (mask.sum((-1, -2)) > 0).nonzero()[:-1]:
        _, rows = torch.where(mask[int(expert)])
        sums.index_add_(0, rows, gated(x[rows], int(expert)))
    return sums


def backwards(x):
    _, ids = chosen(x)
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    for expert in (mask.sum((-1, -2)) > 0).nonzero().flip(0):
        torch.where(mask[int(expert)])
    return x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, p: ahead(x[0])[None], "choices of all rows"),
        (lambda x, p: last_states(x[0])[None], "changed in place through another tensor"),
        (lambda x, p: between_visits(x[0])[None], "computes between its visits"),
        (lambda x, p: without_last(x[0])[None], "choices of all rows"),
        (lambda x, p: backwards(x[0])[None], "expert after expert"),
        (lambda x, p: loop(x[0], lambda rows, expert: rows * (expert + 1))[None], "too many different ways"),
        (lambda x, p: x * F.one_hot(p[0], 8), "integers of the batch"),
        (lambda x, p: F.one_hot(x.topk(2)[1], WIDTH).sum(2), "choices of every row"),
        (lambda x, p: F.one_hot(chosen(x[0])[1] * 1, EXPERTS), "integers"),
        (lambda x, p: x * F.one_hot(chosen(x[0])[1], EXPERTS).sum(0), "no number of rows for each expert"),
        (
            lambda x, p: (F.one_hot(chosen(x[0])[1], EXPERTS).sum((0, 1)) > 1).nonzero(),
            "choices of all rows are compared",
        ),
        (lambda x, p: x[0, (x[0, :, 0] > 0).nonzero()[:, 0]], "depends on the rows"),
        (lambda x, p: x[0, torch.where(x[0, :, 0] > 0)[0]], "depends on the rows"),
    ],
)
def test_loops_that_are_not_followed_are_refused(function, message):
    with pytest.raises(NotLowerableError, match=message):
        recorded(function)
