"""When the graphs of a model are dropped, and models that have none."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from specdec_fast.ops import resolve
from specdec_fast.runner.graphs.graphs import described
from specdec_fast.runner.ragged_model import RaggedModel
from support.graphs import CPU, LIMITS, Everything, batches, eagerly, opened_pool
from support.models import tiny_model


def moved(parameter):
    parameter.data = parameter.data.clone()


def exchanged(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq / 2


def exchanged_module(model):
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def hooked(model):
    model.model.layers[0].register_forward_hook(lambda *args: None)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (lambda model: moved(model.lm_head.weight), 0),
        (exchanged, 0),
        (exchanged_module, 0),
        (hooked, 0),
        (lambda model: model.lm_head.weight.data.mul_(2), 1),  # a graph reads the memory that was changed
        (lambda model: None, 1),
    ],
    ids=["moved", "exchanged", "exchanged_module", "hooked", "in_place", "unchanged"],
)
def test_graphs_are_given_up_if_weights_are_moved(change, kept, graphs_on_cpu):
    made = RaggedModel(tiny_model("qwen3"), resolve(CPU))
    made.use_graphs(LIMITS)
    made.graphs.asked = Everything()
    pool = opened_pool(made)
    made.forward(next(batches(pool, [[3, 2]])), pool)
    assert made.graphs.num_captured == 1
    change(made.model)
    made.expect_same_weights()
    assert made.graphs.num_captured == kept
    assert (made.graphs.why_not is not None) == (change is hooked)


def test_exchanged_weights_are_freed_by_the_next_call(graphs_on_cpu):
    """Until then the old tensors are kept, to compare the model with them."""
    made = RaggedModel(tiny_model("qwen3"), resolve(CPU))
    made.use_graphs(LIMITS)
    layer = made.model.model.layers[0].mlp.up_proj
    old = weakref.ref(layer.weight)
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    made.expect_same_weights()
    gc.collect()
    assert old() is None


def test_what_cannot_be_recorded_runs_eagerly_with_a_reason(model):
    def refuses(run):
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    model.graphs._capture = refuses
    pool, eager_pool = opened_pool(model), opened_pool(model)
    for _ in range(2):
        batch, eager = (next(batches(p, [[3, 1]])) for p in (pool, eager_pool))
        assert torch.equal(model.forward(batch, pool), eagerly(model, eager, eager_pool))
    description = described(model.graphs)
    assert description["why_no_graphs"] == "RuntimeError: operation not permitted when stream is capturing"
    assert description["graphs"] is False


@pytest.mark.parametrize(
    ("register", "named"),
    [
        (lambda model: model.model.layers[1].register_forward_hook(lambda *args: None), "a LlamaDecoderLayer has"),
        (lambda model: register_module_forward_hook(lambda *args: None), "a Module has"),
        (lambda model: register_module_forward_pre_hook(lambda *args: None), "a Module has"),
    ],
    ids=["one", "global", "global_pre"],
)
def test_a_model_with_hooks_runs_eagerly(register, named, graphs_on_cpu):
    """A graph would not call them."""
    made = RaggedModel(tiny_model("llama"), resolve(CPU))
    handle = register(made.model)
    try:
        made.use_graphs(LIMITS)
        assert f"{named} forward hooks" in described(made.graphs)["why_no_graphs"]
        pool = opened_pool(made)
        assert made.graphs.forward(next(batches(pool, [[1]])), pool, None) is None
    finally:
        handle.remove()
