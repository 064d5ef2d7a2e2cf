"""A scheduler that breaks its contract: a typed error, and never a step that does nothing for ever."""

from __future__ import annotations

import pytest

import specdec_fast as sd
from specdec_fast.schedulers import SCHEDULERS
from specdec_fast.schedulers.exspec import ExspecScheduler
from support.models import tiny_model

PROMPTS = [[5, 6], [7], [8]]
PARAMS = sd.SamplingParams(max_new_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama")


def engine_with(target, monkeypatch, **methods):
    """Return an engine of two sequences a step whose scheduler has other methods; they may be called 20 times."""

    def counted(method):
        calls = []

        def limited(*args):
            calls.append(args)
            assert len(calls) <= 20, "the engine asks again and again"
            return method(*args)

        return limited

    own = {name: counted(method) if callable(method) else method for name, method in methods.items()}
    monkeypatch.setitem(SCHEDULERS, "own", type("Own", (ExspecScheduler,), own))
    return sd.Engine(target, None, method="own", max_batch_size=2)


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda self, resident: [], r"Own chose 0 sequences.*expected 1 to 2 \(max_batch_size\) of the 3 resident"),
        (lambda self, resident: resident, r"Own chose 3 sequences.*expected 1 to 2"),
        (lambda self, resident: [7], "Own chose 1 sequences, 1 of them not resident"),
        (lambda self, resident: [resident[0], resident[0]], "Own chose a sequence twice"),
        (lambda self, resident: None, "Own chose a NoneType; expected a list"),
        (lambda self, resident: (each for each in resident), "Own chose a generator; expected a list"),
        (lambda self, resident: resident.clear() or [], "Own chose 0 sequences.* of the 3 resident"),
    ],
    ids=["none", "too many", "foreign", "twice", "None", "generator", "clears its list"],
)
def test_a_selection_is_held_to_the_contract(target, monkeypatch, choose, message):
    engine = engine_with(target, monkeypatch, select=choose)
    with pytest.raises(sd.SchedulerError, match=message):
        engine.generate(PROMPTS, PARAMS)
    assert not engine.core.has_work
    assert engine.core.pool.is_vacant


@pytest.mark.parametrize("places", [0, -1, None, 1.5])
def test_an_empty_engine_admits_a_sequence(target, monkeypatch, places):
    engine = engine_with(target, monkeypatch, num_to_admit=lambda self, num_resident: places)
    with pytest.raises(sd.SchedulerError, match=f"num_to_admit of Own: {places} with 0 resident sequences; expected"):
        engine.generate(PROMPTS, PARAMS)
    assert not engine.core.has_work


@pytest.mark.parametrize("most", [0, -1, None, 1.5])
@pytest.mark.parametrize("call", ["generate", "as_completed"])
def test_some_sequence_may_be_resident(target, monkeypatch, most, call):
    engine = engine_with(target, monkeypatch, max_resident=most)
    with pytest.raises(sd.SchedulerError, match=f"max_resident of Own: {most}; expected an integer >= 1"):
        list(getattr(engine, call)(PROMPTS, PARAMS))


def test_a_refused_plan_ends_no_later_call(target, monkeypatch):
    engine = engine_with(target, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(engine.core.scheduler, "select", lambda resident: [])
        with pytest.raises(sd.SchedulerError):
            engine.generate(PROMPTS, PARAMS)
    assert [len(output.token_ids) for output in engine.generate(PROMPTS, PARAMS)] == [4, 4, 4]
