"""Custom drafters: a useless or a broken one never makes an output wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import specdec_fast as sd
from support.demo import MAX_NEW_TOKENS
from support.grids import grid
from support.scripted_drafter import Scripted

PARAMS = sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS)


@pytest.mark.parametrize(
    "script",
    grid(
        {
            "always the same": lambda s, limit: [7] * limit,
            "no words": lambda s, limit: [10**6] * limit,
            "negative": lambda s, limit: [-5] * limit,
            "only for some": lambda s, limit: [3] * (limit if s.index % 2 else 0),
            "the prompt again": lambda s, limit: s.token_ids[:limit],
        },
        keep=["no words", "only for some"],
    ),
)
def test_useless_drafts_change_nothing(target, prompt_ids, expected, script):
    engine = sd.Engine(target, Scripted(script), max_batch_size=4)
    assert [o.token_ids for o in engine.generate(prompt_ids[::2], PARAMS)] == expected[::2]


def test_perfect_drafts_are_all_accepted(target, prompt_ids, expected):
    """A drafter that replays the expected output gets K + 1 tokens per step after the first token."""

    def replay(sequence, limit):
        done = sequence.length - sequence.prompt_length
        return expected[sequence.index][done : done + limit]

    engine = sd.Engine(target, Scripted(replay), num_draft_tokens=4)
    outputs = engine.generate(prompt_ids, PARAMS)
    assert [o.token_ids for o in outputs] == expected
    assert [o.stats.num_steps for o in outputs] == [1 + -(-(len(tokens) - 1) // 5) for tokens in expected]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (sd.Draft(torch.zeros(9, dtype=torch.int64), [9]), r"proposed \[9\].*at most \[5\]"),
        (sd.Draft(torch.zeros(2, dtype=torch.int64), [1, 1]), r"proposed \[1, 1\].*at most \[5\]"),
        (sd.Draft(torch.zeros(3, dtype=torch.int64), [2]), r"shape \[3\]; expected \[2\]"),
        (sd.Draft(torch.zeros(2), [2]), "token_ids are torch.float32; expected a tensor of int64"),
        (sd.Draft([1, 2], [2]), "token_ids are list"),
        (sd.Draft(torch.zeros(2, dtype=torch.int64, device="meta"), [2]), "strided on meta; expected a dense tensor"),
        (sd.Draft(torch.zeros(2, dtype=torch.int64).to_sparse(), [2]), "sparse_coo on cpu; expected a dense tensor"),
        (sd.Draft(torch.zeros(2, dtype=torch.int64), [2.0]), r"num_draft_tokens are \[2.0\]"),
        (sd.Draft(torch.zeros(1, dtype=torch.int64), [True]), r"num_draft_tokens are \[True\]"),
        (sd.Draft(torch.zeros(2, dtype=torch.int64), None), "num_draft_tokens are None"),
        (None, "proposed a NoneType; expected a Draft"),
        ((torch.zeros(2, dtype=torch.int64), [2]), "proposed a tuple; expected a Draft"),
    ],
    ids=[
        "more than asked for",
        "more sequences",
        "counts that do not add up",
        "floats",
        "a list",
        "no memory",
        "sparse",
        "float counts",
        "a flag as count",
        "no counts",
        "nothing",
        "a tuple",
    ],
)
def test_broken_contract_is_an_error(target, prompt_ids, expected, draft, message):
    drafter = Scripted(None)
    drafter.propose = lambda sequences, limits: draft
    engine = sd.Engine(target, drafter)
    with pytest.raises(sd.DrafterError, match=message):
        engine.generate(prompt_ids[:1], PARAMS)
    assert engine.core.pool.num_free_pages == engine.core.pool.num_pages


@pytest.mark.parametrize(("name", "dtype"), [("parents", torch.int32), ("scores", torch.float32)])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor.to("meta"), "strided on meta; expected a dense tensor"),
        (lambda tensor: tensor.to_sparse(), "sparse_coo on cpu; expected a dense tensor"),
        (lambda tensor: tensor.double(), r"torch.float64 \[2\]; expected a tensor of"),
        (lambda tensor: tensor[:1], r"\[1\]; expected a tensor of"),
        (lambda tensor: tensor.tolist(), "list; expected a tensor of"),
    ],
    ids=["no memory", "sparse", "dtype", "too few", "a list"],
)
def test_parents_and_scores_that_cannot_be_read(name, dtype, change, message):
    tensor = torch.full((2,), -1, dtype=dtype)
    draft = sd.Draft(torch.arange(2), [2], **{name: tensor})
    assert draft.check([5]) == [1 if name == "parents" else 2]
    with pytest.raises(sd.DrafterError, match=f"a drafter's {name} are .*{message}"):
        replace(draft, **{name: change(tensor)}).check([5])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensor_is_no_draft():
    nested = torch.nested.nested_tensor([torch.zeros(2, dtype=torch.int64)])
    with pytest.raises(sd.DrafterError, match="token_ids are nested; expected a dense tensor"):
        sd.Draft(nested, [2]).check([5])


def test_engine_survives_an_exception_of_its_drafter(target, prompt_ids, expected):
    def fail_on_the_third_step(sequence, limit):
        if sequence.stats.num_steps == 2:
            raise RuntimeError("drafter broke")
        return []

    engine = sd.Engine(target, Scripted(fail_on_the_third_step), max_batch_size=2)
    with pytest.raises(RuntimeError, match="drafter broke") as raised:
        engine.generate(prompt_ids, PARAMS)
    assert raised.value.__context__ is None, "a traceback shows the drafter's error alone"
    assert engine.core.pool.num_free_pages == engine.core.pool.num_pages
    engine.drafter.script = lambda s, limit: []
    assert [o.token_ids for o in engine.generate(prompt_ids, PARAMS)] == expected


@pytest.mark.parametrize("call", ["generate", "stream", "as_completed"])
def test_a_stop_iteration_of_a_drafter_does_not_end_a_generator(target, call):
    engine = sd.Engine(target, Scripted(lambda s, limit: next(iter([]))))
    with pytest.raises(sd.StepError, match="the step that served this request failed: StopIteration") as raised:
        list(getattr(engine, call)([[5, 6]], PARAMS))
    assert isinstance(raised.value.__cause__, StopIteration)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_program_passes(target, prompt_ids, expected, error):
    def interrupt(sequence, limit):
        raise error

    engine = sd.Engine(target, Scripted(interrupt), max_batch_size=2)
    with pytest.raises(error):
        engine.generate(prompt_ids, PARAMS)
    engine.drafter.script = lambda s, limit: []
    assert [o.token_ids for o in engine.generate(prompt_ids[:3], PARAMS)] == expected[:3]


def test_a_drafter_may_change_its_lists(target, prompt_ids, expected):
    """The lists of sequences that it receives are its own, and so is the list of counts that it returns."""

    class Clearing(Scripted):
        num_admitted = 0
        draft = None

        def admit(self, sequences):
            self.num_admitted += len(sequences)
            sequences.clear()

        def propose(self, sequences, limits):
            self.draft = super().propose(sequences, limits)
            sequences.clear()
            return self.draft

        def commit(self, sequences, result):
            sequences.clear()
            result.accepted_rows.clear()
            self.draft.num_draft_tokens.clear()

    drafter = Clearing(lambda s, limit: [3] * limit)
    outputs = sd.Engine(target, drafter, max_batch_size=4).generate(prompt_ids, PARAMS)
    assert [o.token_ids for o in outputs] == expected
    assert drafter.num_admitted == len(prompt_ids)


def test_a_drafter_cannot_change_limits_or_tokens(target, prompt_ids, expected):
    """A drafter that raises its own limit, or edits the sequence in place, is an error; no output is wrong."""
    drafter = Scripted(None)

    def raise_limits(sequences, limits):
        limits[:] = [9] * len(limits)
        return sd.Draft(torch.zeros(9 * len(limits), dtype=torch.int64), list(limits))

    def edit(sequences, limits):
        sequences[0].token_ids.append(3)
        return sd.Draft(torch.zeros(0, dtype=torch.int64), [0] * len(limits))

    def replace_last(sequences, limits):
        sequences[0].token_ids[-1] = 3
        return sd.Draft(torch.zeros(0, dtype=torch.int64), [0] * len(limits))

    def clear(sequences, limits):
        sequences[0].token_ids.clear()
        return sd.Draft(torch.zeros(0, dtype=torch.int64), [0] * len(limits))

    engine = sd.Engine(target, drafter)
    changed = "changed the token_ids"
    for broken, message in ((raise_limits, "at most"), (edit, changed), (replace_last, changed), (clear, changed)):
        drafter.propose = broken
        with pytest.raises(sd.DrafterError, match=message):
            engine.generate(prompt_ids[:1], PARAMS)


@pytest.mark.parametrize(
    "seconds",
    [5, {}, {0: 0.0}, {1: "x"}, {1: float("nan")}, {1: -1.0}, {1: float("inf")}, {"a": 1.0}, {-1: 1.0}],
    ids=str,
)
def test_seconds_that_are_none_are_refused(target, seconds):
    drafter = Scripted(lambda s, limit: [])
    drafter.forward_seconds = lambda row_counts: seconds
    with pytest.raises(sd.DrafterError, match=r"forward_seconds are .*; expected None, or seconds by number"):
        sd.Engine(target, drafter, num_draft_tokens="auto")


@pytest.mark.parametrize(
    ("name", "value"),
    [("weights", None), ("weights", [1]), ("weights", [torch.eye(2).to_sparse()]), ("step_bytes", None),
     ("step_bytes", -1), ("step_bytes", 1.5), ("step_bytes", 10**400), ("bytes_per_token", "x"),
     ("bytes_per_token", -1), ("bytes_per_sequence", None), ("bytes_per_sequence", -1)],
    ids=lambda value: str(value)[:12],
)  # fmt: skip
def test_memory_that_cannot_be_counted_is_refused(target, monkeypatch, name, value):
    monkeypatch.setattr("gc.collect", lambda: 0)  # a plan collects what loading left: most of the time
    attribute = property(lambda self: value) if name == "bytes_per_token" else lambda self, *counts: value
    drafter = type("Own", (Scripted,), {name: attribute})(lambda s, limit: [])
    with pytest.raises(sd.DrafterError, match=rf"{name} (is .*; expected a number of bytes|cannot be counted)"):
        sd.Engine(target, drafter, memory_bytes=10**9)


def test_engine_survives_an_exception_on_release(target, prompt_ids, expected):
    drafter = Scripted(lambda s, limit: [])
    engine = sd.Engine(target, drafter, max_batch_size=2)

    def fail(sequence):
        raise RuntimeError("release broke")

    drafter.release = fail
    with pytest.raises(RuntimeError, match="release broke"):
        engine.generate(prompt_ids, PARAMS)
    assert engine.core.pool.num_free_pages == engine.core.pool.num_pages
    del drafter.release
    assert [o.token_ids for o in engine.generate(prompt_ids, PARAMS)] == expected


def test_drafter_is_not_called_if_all_limits_are_zero(target, prompt_ids, expected):
    """Otherwise every drafter would have to know that ``torch.tensor([])`` is a float tensor."""

    def propose(sequences, limits):
        assert any(limits)
        proposals = [[3] * limit for limit in limits]
        return sd.Draft(torch.tensor([t for p in proposals for t in p]), [len(p) for p in proposals])

    drafter = Scripted(None)
    drafter.propose = propose
    outputs = sd.Engine(target, drafter, max_batch_size=1).generate(prompt_ids, PARAMS)
    assert [o.token_ids for o in outputs] == expected
