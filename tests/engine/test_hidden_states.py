"""Drafters with taps: the hidden states of every committed position arrive once and in order, with the right bits."""

from __future__ import annotations

import pytest
import torch

import specdec_fast as sd
from specdec_fast.engine.core import EngineCore
from specdec_fast.engine.input import RequestBuilder
from specdec_fast.runner import batch_invariance
from support.models import VOCAB_SIZE, tiny_model
from support.programs import needs_programs
from support.recording_drafter import Recording, hidden_states_of_text
from support.scripted_trees import RandomTrees

TAPS = (2, 0, "final", 3)
PROMPTS = [[(7 * i + j * j) % VOCAB_SIZE for j in range(n)] for i, n in enumerate((1, 2, 7, 3, 19, 1, 30))]
PARAMS = [
    sd.SamplingParams(
        max_new_tokens=20 - i,
        ignore_eos=True,
        logprobs=True,
        temperature=0.9 * (i % 2),
        seed=i,
        num_draft_tokens=0 if i == 3 else None,
        repetition_penalty=1.3 if i == 4 else 1.0,
    )
    for i in range(len(PROMPTS))
]


def model_of(dtype=torch.float32):
    return tiny_model("llama").to(dtype)


def settings_of(executor, **settings):
    return {"max_batch_size": 4, "num_draft_tokens": 3, "enforce_eager": executor == "pytorch", **settings}


def results(outputs):
    return [(output.raise_for_error().token_ids, output.logprobs) for output in outputs]


def expected_of(model, executor):
    return results(sd.Engine(model, None, **settings_of(executor, max_batch_size=1)).generate(PROMPTS, PARAMS))


def nearly(expected):
    """A script that proposes the expected tokens, with a wrong one at every fifth position."""

    def script(sequence, limit):
        start = len(sequence.emitted_ids)
        tokens = expected[sequence.index][0][start : start + limit]
        return [(t + (start + i) % 5 // 4) % VOCAB_SIZE for i, t in enumerate(tokens)][: limit - sequence.index % 2]

    return script


def assert_right(engine, num_released):
    """Every sequence has left, with the hidden states that its text has by itself."""
    drafter = engine.drafter
    assert not drafter.seen
    assert len(drafter.released) >= num_released
    for token_ids, seen in drafter.released:
        assert torch.equal(seen, hidden_states_of_text(engine.target, token_ids))


CASES = {
    "plain": (torch.float32, {}),
    "chunks": (torch.bfloat16, {"max_prefill_tokens": 5}),
    "one_by_one": (torch.float16, {"max_prefill_tokens": 1, "method": "eqspec"}),
    "preempted": (torch.float32, {"page_size": 4, "kv_cache_tokens": 52, "max_batch_size": 8}),
    "auto": (torch.bfloat16, {"num_draft_tokens": "auto", "max_batch_size": 32}),
}


@pytest.mark.parametrize(
    ("executor", "case"),
    [
        *(
            pytest.param("program", case, marks=[needs_programs, *[pytest.mark.grid] * (case in ("plain", "auto"))])
            for case in CASES
        ),
        *(pytest.param("pytorch", case, marks=() if case == "preempted" else pytest.mark.grid) for case in CASES),
    ],
)
def test_every_committed_position_arrives_once_and_in_order(executor, case):
    dtype, settings = CASES[case]
    model = model_of(dtype)
    expected = expected_of(model, executor)
    engine = sd.Engine(model, Recording(TAPS, nearly(expected)), **settings_of(executor, **settings))
    assert results(engine.generate(PROMPTS, PARAMS)) == expected
    assert_right(engine, len(PROMPTS))
    if "kv_cache_tokens" in settings:
        assert engine.last_run.num_preemptions > 0
        assert len(engine.drafter.released) > len(PROMPTS), "released and admitted again"
    if most := settings.get("max_prefill_tokens"):
        assert max(engine.drafter.num_observed) <= most
    texts = {tuple(p + o[0]) for p, o in zip(PROMPTS, expected, strict=True)}
    known = {tuple(tokens) for tokens, _ in engine.drafter.released}
    assert all(any(text[: len(tokens)] == tokens for text in texts) for tokens in known)


class RecordingTrees(RandomTrees):
    """Random trees, from a drafter that records hidden states."""

    def __init__(self, texts):
        super().__init__(texts)
        self.recording = Recording(TAPS, None)
        self.taps, self.released = TAPS, self.recording.released
        for method in ("prepare", "admit", "observe", "commit", "release"):
            setattr(self, method, getattr(self.recording, method))

    @property
    def seen(self):
        return self.recording.seen


@needs_programs
def test_the_rows_of_an_accepted_path_arrive_in_order():
    """A tree's accepted rows need not be neighbours; each has the bits of its position in the text."""
    model = model_of()
    expected = expected_of(model, "program")
    engine = sd.Engine(model, RecordingTrees([tokens for tokens, _ in expected]), **settings_of("program"))
    assert results(engine.generate(PROMPTS, PARAMS)) == expected
    assert_right(engine, len(PROMPTS))
    assert engine.last_run.decoding.num_accepted_tokens > 10


def test_a_step_that_nothing_was_drafted_for_hands_over_too():
    model = model_of()
    drafter = Recording(TAPS, None)  # a proposal would fail
    params = [sd.SamplingParams(max_new_tokens=6, ignore_eos=True, num_draft_tokens=0)] * len(PROMPTS)
    engine = sd.Engine(model, drafter, max_batch_size=3)
    engine.generate(PROMPTS, params)
    assert_right(engine, len(PROMPTS))
    assert sorted(len(seen) for _, seen in drafter.released) == sorted(len(p) + 4 for p in PROMPTS)


@pytest.mark.parametrize("largest", [8, 2048])
def test_whole_prompts_are_handed_over_in_chunks(largest, monkeypatch):
    monkeypatch.setattr(batch_invariance, "_LARGEST_OF_PROGRAM", largest)
    monkeypatch.setattr(batch_invariance, "MAX_PREFILL_ROWS", largest)
    engine = sd.Engine(model_of(), Recording(TAPS, lambda s, limit: []), max_batch_size=8)
    engine.generate(PROMPTS, PARAMS)
    assert max(engine.drafter.num_observed) <= largest
    assert sum(engine.drafter.num_observed) == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert_right(engine, len(PROMPTS))


@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
def test_cancelled_requests_are_released(ahead, monkeypatch):
    """In the middle of a prompt, and between a step's launch and its end."""
    monkeypatch.setattr(EngineCore, "launches_ahead", ahead)
    engine = sd.Engine(model_of(), Recording(TAPS, lambda s, limit: [5] * limit), max_prefill_tokens=9)
    core, builder = engine.core, RequestBuilder(engine.target, None, 3)
    ids = [core.add(builder.build(i, p, q)) for i, (p, q) in enumerate(zip(PROMPTS, PARAMS, strict=True))]
    for cancelled in (2, 0, 4, 1):
        core.step()
        core.cancel(ids[cancelled])
    while core.has_work:
        core.step()
    assert_right(engine, 5)
    assert core.pool.is_vacant


@pytest.mark.parametrize("place", ["prefill", "verify_step", "propose", "admit"])
def test_a_step_without_memory_is_repeated_from_position_0(place, monkeypatch):
    """The drafter releases the sequences, so their prompts are computed once more, in the same pages."""
    model = model_of()
    expected = expected_of(model, "program")
    engine = sd.Engine(model, Recording(TAPS, nearly(expected)), **settings_of("program"))
    owner = engine.drafter if place in ("propose", "admit") else engine.target
    name = "forward" if place == "prefill" else place
    original, failed = getattr(owner, name), []

    def failing(*args):
        result = original(*args)
        if len(failed) < 2:
            failed.append(name)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return result

    monkeypatch.setattr(owner, name, failing)
    assert results(engine.generate(PROMPTS, PARAMS)) == expected
    assert engine.last_run.num_out_of_memory == len(failed) == 2
    assert_right(engine, len(PROMPTS))
    assert engine.core.pool.is_vacant


def test_a_drafter_without_memory_for_the_rows_of_prompts_gets_fewer():
    """Whether they come from a prefill or from the forward of a step."""
    model = model_of()
    expected = expected_of(model, "program")

    class Short(Recording):
        def observe(self, sequences, positions, features):
            if len(features) > 10:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            super().observe(sequences, positions, features)

    engine = sd.Engine(model, Short(TAPS, nearly(expected)), **settings_of("program"))
    assert results(engine.generate(PROMPTS, PARAMS)) == expected
    assert engine.last_run.num_out_of_memory > 0
    assert_right(engine, len(PROMPTS))


def test_a_request_whose_prompt_outlives_the_row_limit_ends_alone(monkeypatch):
    """Each failure computes the prompt once more, in more steps than lift the limit if they counted."""
    monkeypatch.setattr("specdec_fast.engine.row_limit._STEPS", 3)
    engine = sd.Engine(model_of(), Recording(TAPS, lambda s, limit: [5] * limit), max_batch_size=2)
    num_calls = []

    def failing(*args):
        num_calls.append(1)
        assert len(num_calls) < 20, "no progress"
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(engine.target, "verify_step", failing)
    (output,) = engine.generate(PROMPTS[6:], sd.SamplingParams(max_new_tokens=6))
    assert isinstance(output.error, sd.RequestMemoryError)
    assert engine.core.pool.is_vacant


@pytest.mark.parametrize(
    "executor", [pytest.param("program", marks=needs_programs), pytest.param("pytorch", marks=pytest.mark.grid)]
)
def test_a_drafter_that_a_budget_drops_costs_no_hidden_states(executor, monkeypatch):
    model = model_of()
    expected = expected_of(model, executor)
    monkeypatch.setattr(Recording, "step_bytes", lambda *args: 10**12)
    engine = sd.Engine(model, Recording(TAPS, None), memory_bytes=10**8, **settings_of(executor))
    assert engine.drafter.name == "none"
    assert engine.target.empty_hidden_states(4) is None
    assert results(engine.generate(PROMPTS, PARAMS)) == expected


def test_wrong_taps_are_refused_when_the_engine_is_made():
    with pytest.raises(sd.DrafterError, match="contain 4; the target has 3 layers"):
        sd.Engine(model_of(), Recording((4,), None))


def test_a_drafter_that_raises_in_observe_ends_the_requests_of_its_chunk():
    engine = sd.Engine(model_of(), Recording(TAPS, lambda s, limit: []))

    def fail(*args):
        raise RuntimeError("observe broke")

    engine.drafter.observe = fail
    with pytest.raises(RuntimeError, match="observe broke"):
        engine.generate(PROMPTS, PARAMS)
    assert engine.core.pool.is_vacant
    del engine.drafter.observe
    engine.generate(PROMPTS, PARAMS)
    assert_right(engine, len(PROMPTS))
