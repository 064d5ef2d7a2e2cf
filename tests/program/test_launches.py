"""How many launches a layer takes on a GPU, and where a fusion of row operations must be two."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from specdec_fast.kv_cache.cache_rules import CacheRules
from specdec_fast.ops import resolve
from specdec_fast.program import compile_forward
from specdec_fast.program.plan.ir import Append, Attend, Linear, RowOp
from support.models import CONFIGS, tiny_model
from support.programs import CPU, NO_LAYERS, WIDTH, Function, needs_programs

pytest.importorskip("triton")

from specdec_fast.program.triton.executor import kernels_of
from specdec_fast.program.triton.launches import JointLinear, RowFusion, launches_of
from support.device_programs import launched, plan_of

pytestmark = needs_programs
MOST = 9  # launches of a layer


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_layer_takes_few_launches(architecture):
    """From one layer's attention to the next. Attention over long contexts may take a second launch, which merges."""
    launches = kernels_of(plan_of(tiny_model(architecture)))
    attends = [i for i, launch in enumerate(launches) if isinstance(launch, Attend)]
    assert len(attends) == 3
    counts = {after - before for before, after in pairwise(attends)}
    assert len(counts) == 1, "all layers alike"
    assert max(counts) <= MOST


@pytest.mark.parametrize("architecture", CONFIGS)
def test_runs_have_every_row_operation_once_and_in_order(architecture):
    plan = plan_of(tiny_model(architecture))
    launches = launches_of(plan)
    own = [step for launch in launches if isinstance(launch, RowFusion) for step in launch.steps]
    assert own == [step for step in plan.instructions if isinstance(step, RowOp | Append)]
    assert not any(
        isinstance(a, RowFusion) and isinstance(b, RowFusion) and a.domain == b.domain for a, b in pairwise(launches)
    )


def matrices(*sizes, in_features=WIDTH):
    return [torch.linspace(-1, 1, size * in_features).sin().view(size, in_features) for size in sizes]


Q, K, V, GATE, ODD = matrices(16, 8, 8, 40, 7)
(AGAIN,) = matrices(8, in_features=8)


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (lambda x: [F.linear(x, w) for w in (Q, K, V)], [[16, 8, 8]]),
        (lambda x: [F.linear(x, w, w[:, 0].clone()) for w in (Q, K, V)], [[16, 8, 8]]),
        (lambda x: [F.linear(x, w) for w in (Q, K, V, GATE, V)], [[16, 8, 8], [40, 8]]),
        (lambda x: [F.linear(x, Q), F.linear(x, K, K[:, 0].clone()), F.linear(x, V)], [[16, 8], [8]]),
        (lambda x: [F.linear(x, Q), F.linear(x, ODD), F.linear(x, V)], [[16, 8], [7]]),
        (lambda x: [F.linear(x, Q), x @ K.t().contiguous(), F.linear(x, V)], [[16, 8], [8]]),
        (lambda x: [F.linear(F.linear(x, K), AGAIN), F.linear(x, V)], [[8, 8], [8]]),
        (lambda x: [F.linear(x, Q), F.linear(x * 2, K)], [[16], [8]]),
        (lambda x: [F.linear(x[..., :8], AGAIN), F.linear(x[..., 8:16], AGAIN)], [[8], [8]]),
        (lambda x: [F.linear(x.view(1, -1, 3, 8), AGAIN).flatten(2), F.linear(x[..., :8], AGAIN)], [[8], [8]]),
    ],
    ids=[
        "three", "with biases", "more than fit", "a bias for some", "a size that would not be aligned", "transposed",
        "one depends on another", "other rows", "other features", "other vectors",
    ],
)  # fmt: skip
@torch.inference_mode()
def test_linears_of_one_input_are_one_launch(function, sizes):
    model = Function(lambda x, p: torch.cat(function(x), -1))
    plan = compile_forward(model, model, NO_LAYERS, resolve(CPU), CacheRules())
    launches = [each for each in launches_of(plan) if isinstance(each, JointLinear | Linear)]
    steps = [each.steps if isinstance(each, JointLinear) else (each,) for each in launches]
    assert sorted([len(step.weight) for step in group] for group in steps) == sorted(sizes)
    token_ids = torch.tensor([5, 40, 60])
    expected = model(token_ids[None], torch.arange(3)[None])[0]
    torch.testing.assert_close(launched(model)(token_ids), expected)


def overwritten_after_it_is_read(x):
    out = x.new_empty(*x.shape[:2], 8)
    out[..., :4] = x[..., :4]
    product = F.linear(out[..., :4], torch.ones(4, 4))
    out[..., 4:] = product
    before = out * 1
    out[..., :4] = before[..., 4:]
    return torch.cat((before, out), -1)


@pytest.mark.parametrize(
    ("function", "runs"),
    [
        (lambda x, p: torch.cat((-x[..., :9], x[..., 9:]), -1).sum(-1, keepdim=True), 2),
        (lambda x, p: overwritten_after_it_is_read(x), 3),
        (lambda x, p: (x.view(1, -1, 4, 6).sum(-1, keepdim=True) * x.view(1, -1, 4, 6)).flatten(2), 1),
    ],
    ids=["a sum over what two operations wrote", "overwritten", "a sum of each head"],
)
@torch.inference_mode()
def test_runs_that_must_read_memory_become_two(function, runs):
    model, token_ids = Function(function), torch.tensor([5, 40])
    model.embedding.weight.data.round_()  # sums of whole numbers have the same bits in every order
    plan = compile_forward(model, model, NO_LAYERS, resolve(CPU), CacheRules())
    assert sum(isinstance(launch, tuple) for launch in kernels_of(plan)) == runs
    assert torch.equal(launched(model)(token_ids), model(token_ids[None], torch.arange(2)[None])[0].flatten(1))


def test_layers_share_their_kernels():
    """A kernel is compiled once, however many layers launch it."""
    sources = [launch[1].source for launch in kernels_of(plan_of(tiny_model("llama"))) if isinstance(launch, tuple)]
    assert len(sources) == 13
    assert len(set(sources)) == 5
