"""Ops that some backends lack: engines run as before; an error names the op, and comes only where it is used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

import specdec_fast as sd
from specdec_fast.equivalence.compare import transformers_greedy
from specdec_fast.ops import AUTO, Op, all_ops, availability, registry, resolve
from specdec_fast.ops.checks import FLOATS, expect_tensor
from support.demo import MAX_NEW_TOKENS

CPU = torch.device("cpu")
PARAMS = sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
needs_cpp = pytest.mark.skipif(
    all_ops()["linear"].why_unavailable("cpp") is not None, reason="programs run in the C++ extension"
)


def halve(rows: Tensor) -> Tensor:
    return rows / 2


HALVE = Op(
    name="halve",
    implementations={"torch": f"{__name__}:halve"},
    check=lambda rows: expect_tensor("rows", rows, (None, None), FLOATS, rows.device),
)


@pytest.fixture
def with_halve(monkeypatch):
    monkeypatch.setitem(all_ops(), "halve", HALVE)


@needs_cpp
@pytest.mark.parametrize("backend", [AUTO, "cpp"])
def test_engine_keeps_its_program_beside_an_op_in_pytorch_alone(with_halve, target, prompt_ids, expected, backend):
    engine = sd.Engine(target, "ngram", backend=backend, max_batch_size=4)
    description = engine.describe()
    assert (description["forward_program"], description["why_no_program"]) == (True, None)
    assert [output.token_ids for output in engine.generate(prompt_ids, PARAMS)] == expected


def test_engine_in_pytorch_runs_beside_an_op_in_pytorch_alone(with_halve, target, prompt_ids, expected):
    outputs = sd.generate(target, None, prompt_ids[:1], sd.SamplingParams(max_new_tokens=4), backend="torch")
    assert outputs[0].token_ids == expected[0][:4]


def test_registered_op_is_served_with_its_check(with_halve):
    ops = resolve(CPU)
    assert ops.chosen["halve"] == "torch"
    assert torch.equal(ops.halve(torch.ones(2, 2)), torch.full((2, 2), 0.5))
    with pytest.raises(ValueError, match="rows"):
        ops.halve(torch.ones(2))
    assert torch.equal(ops.unchecked.halve(torch.ones(2)), torch.full((2,), 0.5))
    assert ("halve", "torch", None) in availability()


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_named_backend_names_an_op_that_it_lacks_when_the_op_is_used(with_halve, backend):
    if reason := all_ops()["linear"].why_unavailable(backend):
        pytest.skip(reason)
    ops = resolve(CPU, backend)
    assert set(ops.chosen.values()) == {backend}
    for each in (ops, ops.unchecked):
        with pytest.raises(sd.BackendError, match=rf"backend '{backend}' has no implementation of halve \(there"):
            each.halve(torch.ones(2, 2))


def test_op_that_nothing_here_can_run_is_named_when_it_is_used(monkeypatch):
    monkeypatch.setitem(all_ops(), "halve", replace(HALVE, implementations={"flash": "nowhere:nothing"}))
    ops = resolve(CPU)
    assert "halve" not in ops.chosen
    with pytest.raises(sd.BackendError, match=r"no implementation of halve runs on cpu here \(there are: flash\)"):
        ops.halve(torch.ones(2, 2))


def test_replaced_function_leaves_the_others():
    ops = resolve(CPU, "torch")
    changed = ops.replaced(linear=halve)
    assert changed.linear is halve
    assert (ops.linear, changed.verify_chain) == (ops.functions["linear"], ops.verify_chain)


@pytest.fixture
def without_grouped_linear_in_cpp(monkeypatch):
    op = all_ops()["grouped_linear"]
    alone = replace(op, implementations={"torch": op.implementations["torch"]})
    monkeypatch.setitem(all_ops(), "grouped_linear", alone)


def mixtral():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.MixtralConfig(vocab_size=64, num_hidden_layers=2, num_local_experts=4, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@needs_cpp
@pytest.mark.parametrize("backend", [AUTO, "cpp"])
def test_program_needs_the_ops_that_its_plan_uses(without_grouped_linear_in_cpp, target, backend):
    assert sd.Engine(target, None, backend=backend).describe()["forward_program"]


@needs_cpp
def test_program_is_refused_where_another_backend_serves_an_op_of_its_plan(without_grouped_linear_in_cpp):
    model = mixtral()
    engine = sd.Engine(model, None)
    assert engine.describe()["why_no_program"] == "programs run on cpp, here torch serves grouped_linear"
    (output,) = engine.generate([[5, 6, 7]], sd.SamplingParams(max_new_tokens=6))
    assert output.token_ids == transformers_greedy(model, [5, 6, 7], 6)


@needs_cpp
def test_model_that_needs_an_op_its_named_backend_lacks_is_refused(without_grouped_linear_in_cpp):
    with pytest.raises(sd.BackendError, match="backend 'cpp' has no implementation of grouped_linear"):
        sd.Engine(mixtral(), None, backend="cpp")


def test_the_hint_for_triton_names_the_extra(monkeypatch):
    """The distribution is on no index, so the hint is for an installation from the source tree."""
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    assert registry._triton_problem() == "Triton is not installed; pip install '.[triton]'"
