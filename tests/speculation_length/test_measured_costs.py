"""What a policy for K learns about the cost of steps."""

from __future__ import annotations

import pytest
import torch

import specdec_fast as sd
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import DrafterContext
from specdec_fast.drafters.dflash.drafter import DFlashDrafter
from specdec_fast.drafters.eagle3.drafter import Eagle3Drafter
from specdec_fast.engine import core as engine_core
from specdec_fast.engine import step as engine_step
from specdec_fast.engine.input import RequestBuilder
from specdec_fast.ops import resolve
from specdec_fast.runner import eager
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.speculation_length import LengthPolicy
from support import dflash, eagle3
from support.models import tiny_model


class Recorded(LengthPolicy):
    """Plain decoding that keeps what it observes."""

    max_draft_tokens = 0

    def __init__(self):
        self.steps = []

    def limits(self, batch):
        return [0] * len(batch)

    def observe(self, step):
        self.steps.append(step)


def test_the_callers_work_between_steps_is_a_step_s_own(monkeypatch):
    """It is counted from the end of the step before, but for a step that prefills.

    A first prompt has its rows in the forward of a step, which is not observed.
    """
    now = [100.0]
    for module in (engine_core, engine_step, eager):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    policy = Recorded()
    engine = sd.Engine(tiny_model("llama"), "ngram", max_batch_size=2)
    engine.core.drafting.length_policy = policy
    build = RequestBuilder(engine.target, None).build
    params = sd.SamplingParams(max_new_tokens=8, ignore_eos=True)
    engine.core.add(build(0, [1, 2, 3], params))
    for seconds in (1.0, 2.0, 4.0):
        engine.core.step()
        now[0] += seconds
    engine.core.add(build(1, [4, 5, 6], params))
    for seconds in (8.0, 16.0):
        engine.core.step()
        now[0] += seconds
    assert [len(step.batch) for step in policy.steps] == [1, 1, 2, 2]
    # The forward is timed by a clock of its own, and what is left of a step is other work.
    seconds = [step.draft_seconds + step.verify_seconds + step.other_seconds for step in policy.steps]
    assert seconds == pytest.approx([1.0, 2.0, 0.0, 8.0])


def drafter_of(kind, folder, draft_tree=None):
    model = tiny_model("llama")
    target = RaggedModel(model, resolve(torch.device("cpu")))
    support, make = {"eagle3": (eagle3, Eagle3Drafter), "dflash": (dflash, DFlashDrafter)}[kind]
    support.write_checkpoint(folder, model)
    return make(DrafterContext(target, EngineConfig(draft_tree=draft_tree)), str(folder))


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_drafter_of_hidden_states_times_its_proposals(tmp_path, kind):
    """It leaves nothing behind, and can be used as before."""
    drafter = drafter_of(kind, tmp_path / "drafter")
    seconds = drafter.forward_seconds([1, 3, 8])
    assert seconds.keys() == {0, 1, 3, 8}
    assert min(seconds[n] for n in (1, 3, 8)) > 0
    assert drafter.pool is None
    assert drafter.num_admitted == drafter.num_kept_rows == 0


def test_trees_are_not_timed_as_chains(tmp_path):
    assert drafter_of("eagle3", tmp_path / "drafter", draft_tree=4).forward_seconds([1]) is None
