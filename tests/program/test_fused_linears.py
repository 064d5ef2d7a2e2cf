"""Linears whose kernels compute row operations too: the bits of separate launches, and how few launches remain."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.kv_cache.cache_rules import CacheRules
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import resolve
from specdec_fast.program import compile_forward, executors
from specdec_fast.program.executors import Programs
from specdec_fast.program.plan.ir import Attend
from specdec_fast.runner.ragged_model import RaggedModel
from support.models import CONFIGS, VOCAB_SIZE, tiny_model, truncated_copy
from support.programs import CPU, NO_LAYERS, Function, needs_programs

pytest.importorskip("triton")

from specdec_fast.program.triton import linear_kernel
from specdec_fast.program.triton.executor import TritonProgram
from specdec_fast.program.triton.fused_launches import fused_launches_of
from specdec_fast.program.triton.fused_linear import MOST_ROWS, EitherWay, FusedLinear
from specdec_fast.triton_kernels import linear_tiles
from specdec_fast.triton_kernels import paged_attention as attention_module
from support.device_programs import interpreted, launched, plan_of
from support.grids import grid
from support.triton_attention import SMALL_PIECE

pytestmark = needs_programs
COUNTS = (1, 5, MOST_ROWS, MOST_ROWS + 1, 64, 65)  # forwards of few rows and of more, and all tiles
IDS = torch.arange(200) * 7 % VOCAB_SIZE


def forwards_of(model, counts):
    """Compute a forward of each of these numbers of rows, and one of two texts without the logits of some rows.

    Return all logits, and keys and values of every layer.
    """
    pool, found = PagePool(model.layout, 1024, 16), []
    for owner, count in enumerate(counts):
        pool.add(owner)
        found.append(model.forward(lay_out(pool, [Rows(owner, 0, count)], IDS[:count]), pool))
    pool.add("new")
    both = lay_out(pool, [Rows(0, counts[0], 3), Rows("new", 0, 4)], IDS[:7])
    found.append(model.forward(both, pool, torch.tensor([6, 2])))
    return torch.cat(found), [tensor[:14].clone() for layer in pool.layers for tensor in layer]


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", CONFIGS)
@torch.inference_mode()
def test_models_have_the_bits_of_separate_launches(architecture, dtype, monkeypatch):
    monkeypatch.setattr(linear_tiles, "_ENOUGH_PROGRAMS", 1)  # so small matrices get the tiles of large ones
    model = truncated_copy(tiny_model(architecture), 2).to(dtype)
    for parameter in (p for name, p in model.named_parameters() if name.endswith(".bias")):
        parameter.data.normal_(std=0.2)
    together, entries = forwards_of(interpreted(model, fuses_linears=True), COUNTS)
    apart, expected = forwards_of(interpreted(model), COUNTS)
    assert together.isfinite().all(), "NaN is equal to nothing"
    assert torch.equal(together, apart)
    assert all(map(torch.equal, entries, expected))


@torch.inference_mode()
def test_outputs_that_are_not_rounded_would_be_noticed(monkeypatch):
    gate, up = GATE.half(), UP.half()
    model = Function(lambda x, p: F.silu(F.linear(x, gate)) * F.linear(x, up), torch.float16)
    apart, together = (launched(model, fuses)(IDS[:5]) for fuses in (False, True))
    assert torch.equal(together, apart)
    outputs = linear_kernel._outputs
    unrounded = lambda *args: [line.replace(".to(tl.float16)", "") for line in outputs(*args)]  # noqa: E731
    monkeypatch.setattr(linear_kernel, "_outputs", unrounded)
    assert not torch.equal(launched(model, True)(IDS[:5]), apart)


@pytest.mark.grid
@torch.inference_mode()
def test_two_hundred_rows_have_the_bits_of_separate_launches():
    model = truncated_copy(tiny_model("llama"), 1).half()
    assert torch.equal(*(forwards_of(interpreted(model, fuses_linears=fuses), (200,))[0] for fuses in (False, True)))


@pytest.mark.grid
@torch.inference_mode()
def test_taps_and_their_logits_have_the_bits_of_separate_launches(monkeypatch):
    """A tap is a copy of a residual, which the kernel of a linear computes."""
    found = []
    for fuses in (False, True):
        launching = lambda plan, ops, fuses=fuses: Programs(  # noqa: E731
            None, TritonProgram(plan, resolve(CPU, "triton"), fuses)
        )
        monkeypatch.setattr(executors, "EXECUTORS", {"cpp": ("cpu", launching)})
        model = RaggedModel(truncated_copy(tiny_model("llama"), 2), resolve(CPU))
        model.use_taps((0, 1, "final"))
        pool = PagePool(model.layout, 64, 16)
        pool.add("a")
        hidden = model.empty_hidden_states(20)
        logits = [
            model.forward(lay_out(pool, [Rows("a", start, end - start)], IDS[start:end]), pool, None, hidden[start:end])
            for start, end in ((0, 3), (3, 20))
        ]
        found.append((torch.cat(logits), hidden))
    assert all(map(torch.equal, *found))
    assert torch.equal(found[0][1][:, 0], model.model.model.embed_tokens(IDS[:20]))


def weights_of(*shape):
    return torch.linspace(-1, 1, shape[0] * shape[1]).sin().view(shape)


SIZES = ((40, 24), (40, 24), (80, 24), (24, 40), (8, 24), (24, 24))
GATE, UP, BOTH, DOWN, HEAD, SQUARE = (weights_of(*size) for size in SIZES)
SCALE, BIAS, LONG_BIAS = torch.linspace(0.5, 2, 24), torch.linspace(-1, 1, 24), torch.linspace(-1, 1, 40)


def normed(x):
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * SCALE.to(x.dtype)


CASES = {  # a function of the embedded tokens, and how many runs each of its linears computes at the end and beginning
    "gate and up": (lambda x: F.silu(F.linear(x, GATE)) * F.linear(x, UP), 1, 0),
    "gate and up with biases": (
        lambda x: F.silu(F.linear(x, GATE, LONG_BIAS)) * F.linear(x, UP, LONG_BIAS), 1, 0,
    ),
    "halves": (lambda x: F.gelu((y := F.linear(x, BOTH))[..., :40]) * y[..., 40:], 1, 0),
    "gelu of one": (lambda x: F.gelu(F.linear(x, GATE, LONG_BIAS)), 1, 0),
    "residual": (lambda x: x + F.linear(F.linear(x, GATE), DOWN, BIAS), 1, 0),
    "constants": (lambda x: F.linear(x, GATE) * LONG_BIAS + 2.0, 1, 0),
    "tanh of one": (lambda x: F.gelu(F.linear(x, GATE), approximate="tanh"), 0, 0),
    "tanh of two": (lambda x: F.gelu(F.linear(x, GATE), approximate="tanh") * F.linear(x, UP), 1, 0),
    "a half": (lambda x: F.linear(x, GATE)[..., 20:] * 2, 1, 0),
    "norm": (lambda x: F.linear(normed(F.linear(x, SQUARE)), GATE), 0, 1),
    "layer norm": (lambda x: F.linear(F.layer_norm(F.linear(x, SQUARE), (24,), SCALE, BIAS), GATE, LONG_BIAS), 0, 1),
    "a softmax": (lambda x: F.linear(F.linear(x, SQUARE).softmax(-1), GATE), 0, 1),
    "norm, activation and residual": (
        lambda x: (y := F.linear(x, SQUARE) + x) + F.linear(F.silu(F.linear(normed(y), GATE)), DOWN), 3, 1,
    ),
    "three matrices": (
        lambda x: torch.cat([F.linear(y, w) for y in [normed(F.linear(x, SQUARE))] for w in (GATE, UP, HEAD)], -1),
        0, 1,
    ),
    "the rest is another launch": (lambda x: normed(x + F.linear(x, SQUARE)), 1, 0),
    "outputs that are read twice": (lambda x: (y := F.linear(x, GATE)) + F.linear(F.linear(y, DOWN), UP), 1, 0),
    "a part of the outputs": (lambda x: F.linear(x, GATE)[..., 10:] * 2, 0, 0),
    "heads": (lambda x: F.linear(x, SQUARE).view(1, -1, 4, 6).softmax(-1).flatten(2), 0, 0),
    "a norm that two read": (lambda x: (y := normed(F.linear(x, SQUARE))) + F.linear(y, SQUARE), 1, 0),
    "transposed weights": (lambda x: F.silu(x @ SQUARE.t().contiguous()), 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", grid(list(CASES), keep=list(CASES)[::8]))
@torch.inference_mode()
def test_a_linear_computes_what_is_elementwise(name):
    function, ends, beginnings = CASES[name]
    model, rows = Function(lambda x, p: function(x)), torch.arange(21) * 5 % VOCAB_SIZE
    plan = compile_forward(model, model, NO_LAYERS, resolve(CPU), CacheRules())
    launches = fused_launches_of(plan)
    few = [each.few for each in launches if isinstance(each, EitherWay)]
    fused = [*few, *(each for each in launches if isinstance(each, FusedLinear))]
    assert (sum(each.after is not None for each in fused), len(few)) == (ends, beginnings)
    apart, together = (launched(model, fuses) for fuses in (False, True))
    for count in (5, MOST_ROWS + 1):  # a part of a tile; a whole one and a part of another
        assert torch.equal(together(rows[:count]), apart(rows[:count]))


FEW = {"gpt2": 9, "glm4": 8, "gemma2": 8}  # transposed weights; norms between a linear and the residual


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_layer_of_few_rows_takes_few_launches(architecture):
    """From one attention to the next: queries, keys and values; rotation; attention; output; gate and up; down.

    Separate launches are 9, and 8 if there are more rows. Attention over long contexts may take one more, which merges.
    """
    few = fused_launches_of(plan_of(tiny_model(architecture)))
    many = [each for launch in few for each in (launch.many if isinstance(launch, EitherWay) else [launch])]
    for launches, most in ((few, FEW.get(architecture, 6)), (many, FEW.get(architecture, 8))):
        attends = [i for i, launch in enumerate(launches) if isinstance(launch, Attend)]
        assert {after - before for before, after in pairwise(attends)} == {most}


@pytest.mark.grid
@torch.inference_mode()
def test_attention_merges_its_pieces_in_one_launch(monkeypatch):
    """Contexts of several pieces, in two forwards: the counters of the first are zeros for the second."""
    monkeypatch.setattr(attention_module, "PIECE", SMALL_PIECE)
    model, launched_kernels = truncated_copy(tiny_model("llama"), 2).half(), []
    merging = attention_module.merging_kernel

    class Noted:
        def __getitem__(self, grid):
            launched_kernels.append(grid)
            return merging[grid]

    expected = forwards_of(interpreted(model), (70, 100))
    monkeypatch.setattr(attention_module, "merging_kernel", Noted())
    found = forwards_of(interpreted(model, fuses_linears=True, merges_attention=True), (70, 100))
    assert torch.equal(found[0], expected[0])
    assert all(map(torch.equal, found[1], expected[1]))
    assert len(launched_kernels) == 2 * 3, "two layers, and forwards over two pieces"
