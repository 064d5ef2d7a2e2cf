"""Which engines of the tests take what an earlier one has recorded."""

from __future__ import annotations

import pytest

from specdec_fast.models import ragged_model
from specdec_fast.models.ragged_model import RaggedModel
from specdec_fast.ops import resolve
from support import shared_plans
from support.models import tiny_model
from support.programs import CPU, needs_programs

pytestmark = needs_programs


@pytest.fixture
def num_recorded(monkeypatch):
    """Return a function: how many forwards have been recorded for engines."""
    recorded, record = [], shared_plans.compile_forward
    monkeypatch.setattr(shared_plans, "compile_forward", lambda *args: recorded.append(args) or record(*args))
    assert ragged_model.compile_forward is shared_plans._recorded_once
    return lambda: len(recorded)


def test_a_model_that_has_not_changed_is_recorded_once(num_recorded):
    model = tiny_model("llama")
    for _ in range(2):
        assert RaggedModel(model, resolve(CPU)).has_program
    assert num_recorded() == 1


def test_another_model_and_a_changed_one_are_recorded_anew(num_recorded):
    model, other = tiny_model("llama"), tiny_model("llama")
    for each in (model, other):
        RaggedModel(each, resolve(CPU))
    assert num_recorded() == 2
    model.model.norm = type(model.model.norm)(model.config.hidden_size).eval()
    RaggedModel(model, resolve(CPU))
    assert num_recorded() == 3


def test_taps_are_recorded(num_recorded):
    model = RaggedModel(tiny_model("llama"), resolve(CPU))
    model.use_taps((0,))
    model.use_taps((0, "final"))
    assert num_recorded() == 3
