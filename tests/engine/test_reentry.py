"""Code that the engine calls may not call the engine: a typed error, and the engine can be used afterwards."""

from __future__ import annotations

import pytest

import specdec_fast as sd
from specdec_fast.engine.input import RequestBuilder
from support.scripted_drafter import Scripted

PARAMS = sd.SamplingParams(max_new_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6], [7], [8]]
CALLS = {
    "cancel_all": lambda engine, sequence: engine.core.cancel_all(),
    "cancel": lambda engine, sequence: engine.core.cancel(sequence.request_id),
    "add": lambda engine, sequence: engine.core.add(sequence),
    "step": lambda engine, sequence: engine.core.step(),
    "drop_failed": lambda engine, sequence: engine.core.drop_failed(ValueError()),
    "generate": lambda engine, sequence: engine.generate([[1]]),
    "stream": lambda engine, sequence: next(engine.stream([[1]])),
}


class Calling(Scripted):
    """Calls its engine in one of its methods."""

    def __init__(self, where, call):
        super().__init__(lambda sequence, limit: [3] * limit)
        self.where, self.call, self.engine = where, call, None

    def reached(self, where, sequences):
        if where == self.where:
            self.call(self.engine, sequences[0])

    def propose_trees(self, sequences, limits, node_limits):
        self.reached("propose_trees", sequences)
        return self.propose(sequences, limits)

    def admit(self, sequences):
        self.reached("admit", sequences)

    def commit(self, sequences, result):
        self.reached("commit", sequences)

    def release(self, sequence):
        self.reached("release", [sequence])


def expect_refusal(engine, message):
    with pytest.raises(sd.EngineBusyError, match=message):
        engine.generate(PROMPTS, PARAMS)
    assert not engine.core.has_work
    assert engine.core.pool.is_vacant
    engine.drafter.where = None
    plain = sd.Engine(engine.target.model, None).generate(PROMPTS, PARAMS)
    assert [o.token_ids for o in engine.generate(PROMPTS, PARAMS)] == [o.token_ids for o in plain]


@pytest.mark.parametrize("call", CALLS)
def test_a_drafter_may_not_call_the_engine(pair, call):
    drafter = Calling("propose_trees", CALLS[call])
    drafter.engine = sd.Engine(pair[0], drafter, max_batch_size=2)
    expect_refusal(drafter.engine, "a drafter")


@pytest.mark.parametrize("where", ["admit", "commit", "release"])
def test_nor_in_another_method(pair, where):
    drafter = Calling(where, CALLS["cancel_all"])
    drafter.engine = sd.Engine(pair[0], drafter, max_batch_size=2)
    expect_refusal(drafter.engine, "core.cancel_all was called by code that the engine's core was calling")


def test_nor_when_a_request_is_cancelled(pair):
    drafter = Calling("release", CALLS["cancel_all"])
    engine = drafter.engine = sd.Engine(pair[0], drafter, max_batch_size=2)
    requests = [RequestBuilder(engine.target, None).build(i, prompt, PARAMS) for i, prompt in enumerate(PROMPTS)]
    for request in requests:
        engine.core.add(request)
    with pytest.raises(sd.EngineBusyError):
        engine.core.cancel(requests[0].request_id)
    assert [*engine.core.waiting] == requests[1:]
