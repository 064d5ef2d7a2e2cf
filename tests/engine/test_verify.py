"""The fused verification against its parts, and outputs returned while the next step runs."""

from __future__ import annotations

import pytest
import torch

import specdec_fast as sd
from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.drafters import Draft, Drafter
from specdec_fast.engine.core import EngineCore
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import INVALID_TOKEN, resolve
from specdec_fast.ops.registry import all_ops
from specdec_fast.program.executors import TokenChoice
from specdec_fast.request.sequence import Sequence
from specdec_fast.results import StageTimer
from specdec_fast.runner.prefill import prefill
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.runner.verification import Outcome
from support.grids import each_value_once
from support.models import VOCAB_SIZE, tiny_model

CPU = torch.device("cpu")
needs_programs = pytest.mark.skipif(
    all_ops()["linear"].why_unavailable("cpp") is not None, reason="programs run in the C++ extension"
)
TEXTS = [[5, 6, 7, 8, 9], [11], [1] * 17, [30, 2]]
DRAFTED = [[4, 4, 9], [], [1, 1, 1, 1, 1], [3]]
PARAMS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_k": 20, "seed": 5},
    "penalised": {"temperature": 0.9, "repetition_penalty": 1.4, "seed": 5},
}


def sequences_of(params):
    found = [Sequence(i, list(text), len(text), len(text) + 20, params, frozenset()) for i, text in enumerate(TEXTS)]
    for sequence in found:
        sequence.seed = 3 + sequence.index
    return found


def filled_pool(model, sequences):
    pool = PagePool(model.layout, 256, 4, model.row_padding)
    for sequence in sequences:
        pool.add(sequence)
        sequence.target_kv_length = sequence.length - 1
    prefill(model, pool, {s: s.token_ids[:-1] for s in sequences})
    return pool


def draft_of(tokens):
    return torch.tensor([t for own in tokens for t in own], dtype=torch.int64), list(map(len, tokens))


PARENTS = {"chains": None, "trees": [-1, -1, 0, -1, 0, 0, 2, -1, -1]}  # of DRAFTED


@needs_programs
@pytest.mark.parametrize("parents", PARENTS.values(), ids=PARENTS)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_one_call_is_its_parts(monkeypatch, dtype, params, parents):
    """Logits, KV entries and emissions are equal, bit for bit; ids outside the vocabulary are clamped."""
    model = RaggedModel(tiny_model("llama").to(dtype), resolve(CPU))
    trees = None if parents is None else torch.tensor(parents, dtype=torch.int32)
    found = []
    for in_one_call in (True, False):
        monkeypatch.setattr(RaggedModel, "has_fused_step", in_one_call)
        model.use_programs(model.program, None)  # chooses the runner again
        sequences = sequences_of(sd.SamplingParams(max_new_tokens=20, **params))
        pool = filled_pool(model, sequences)
        first = model.verify_step(pool, sequences, *draft_of(DRAFTED), trees)
        # again, with drafts from the first result: some are right now, and one is outside the vocabulary
        right = [
            [*emission[: len(own)], *own[len(emission) :]]
            for emission, own in zip(first.outcome().emissions, DRAFTED, strict=True)
        ]
        second = model.verify_step(pool, sequences, *draft_of([*right[:3], [VOCAB_SIZE + 3]]), trees)
        assert isinstance(first.results, Outcome) is in_one_call
        assert first.forward_seconds > 0
        assert first.accept_seconds > 0
        found.append((first.logits, first.outcome(), second.logits, second.outcome(), pool.tensors[0]))
    ours, parts = found
    assert torch.equal(ours[0], parts[0])
    assert torch.equal(ours[2], parts[2])
    assert torch.equal(ours[4], parts[4])
    assert ours[1] == parts[1]
    assert ours[3] == parts[3]
    assert max(map(len, ours[3].emissions)) > 1, "nothing was accepted"


@needs_programs
@torch.inference_mode()
def test_no_token_is_chosen_where_logits_are_nan():
    model = RaggedModel(tiny_model("llama"), resolve(CPU))
    model.model.lm_head.weight[7] = float("nan")
    sequences = sequences_of(sd.SamplingParams())
    found = model.verify_step(filled_pool(model, sequences), sequences, *draft_of(DRAFTED))
    assert found.outcome().emissions == [[INVALID_TOKEN]] * 4


@needs_programs
@torch.inference_mode()
def test_spans_that_do_not_fit_are_refused():
    """The refusal comes before any read or write outside the tables."""
    model = RaggedModel(tiny_model("llama"), resolve(CPU))
    pool = PagePool(model.layout, 64, 4, model.row_padding)
    pool.add("a")
    spans = pool.spans([Rows("a", 0, 3)])
    none = torch.empty(0, dtype=torch.int64)
    program, (place, *_) = model.program, spans.spans[0]
    with pytest.raises(ValueError, match="1 spans of 3 rows has 1 last tokens and 0 draft tokens"):
        program.verify(spans, [5], none, None)
    with pytest.raises(ValueError, match="1 spans of 3 rows has 2 last tokens and 1 draft tokens"):
        program.verify(spans, [5, 5], none.new_zeros(1), None)
    with pytest.raises(ValueError, match="1 spans of 3 rows has 2 tokens and 1 counts"):
        program.draft(spans, [5, 5], [1], TokenChoice(VOCAB_SIZE, None))
    with pytest.raises(ValueError, match="each must be at least 1"):
        program.draft(spans, [5, 5, 5], [0], TokenChoice(VOCAB_SIZE, None))
    for parents in ([0, 0], [-1, 1], [-2, 0]):
        trees = spans._replace(parents=torch.tensor(parents, dtype=torch.int32))
        with pytest.raises(ValueError, match="expected -1 or an earlier node"):
            program.verify(trees, [5], none.new_zeros(2), None)
    for span in [(place, -1, 1), (place, 1000, 1), (place + 100, 0, 1), (-1, 0, 1)]:
        with pytest.raises(IndexError, match="lie outside tables of"):
            program.verify(spans._replace(spans=[(*span, 0, 0)]), [5], none, None)
    with pytest.raises(IndexError, match="lie outside tables of"):  # what follows the span
        program.draft(spans, [5, 5, 5], [1000], TokenChoice(VOCAB_SIZE, None))
    with pytest.raises(IndexError, match="lies outside a table"):
        program.verify(spans._replace(spans=[(place, 0, 1, 0, 0)]), [VOCAB_SIZE], none, None)


# The next step overlaps with the caller's handling of the outputs


@pytest.fixture(params=[False, True], ids=["no_overlap", "overlap"])
def overlap(request, monkeypatch):
    """Whether the core launches the next step before it returns a step's outputs, as on a GPU."""
    monkeypatch.setattr(EngineCore, "launches_ahead", request.param)
    return request.param


def watched(engine, monkeypatch):
    """Record launches and ends of steps in their order."""
    events = []
    for name in ("_launch", "_finish"):
        original = getattr(engine.core, name)

        def noted(*args, name=name, original=original):
            result = original(*args)
            events.append(name)
            return result

        monkeypatch.setattr(engine.core, name, noted)
    return events


def test_outputs_are_returned_while_the_next_step_runs(pair, monkeypatch, overlap):
    engine = sd.Engine(*pair, max_batch_size=1, num_draft_tokens=2)
    events = watched(engine, monkeypatch)
    for chunk in engine.stream([TEXTS[0]], sd.SamplingParams(max_new_tokens=9, ignore_eos=True)):
        events.append("last chunk" if chunk.finish_reason else "chunk")
    inner = ["_launch", "chunk", "_finish"] if overlap else ["chunk", "_launch", "_finish"]
    num_steps = engine.last_run.num_steps
    assert num_steps > 2
    assert events == ["_launch", "_finish", *inner * (num_steps - 1), "last chunk"]


@each_value_once
@pytest.mark.parametrize("method", ["eqspec", "exspec"])
@pytest.mark.parametrize("num_draft_tokens", [0, 3, "auto"])
def test_overlap_changes_no_token(pair, overlap, method, num_draft_tokens):
    params = [
        sd.SamplingParams(max_new_tokens=11 + i, temperature=0.7 * (i % 2), seed=i, logprobs=i == 2) for i in range(4)
    ]
    params[3] = sd.SamplingParams(max_new_tokens=30, stop="a")
    engine = sd.Engine(*pair, method=method, max_batch_size=2, num_draft_tokens=num_draft_tokens, tokenizer=Letters())
    expected = [
        sd.Engine(*pair, num_draft_tokens=0, tokenizer=Letters()).generate([t], [p])[0]
        for t, p in zip(TEXTS, params, strict=True)
    ]
    outputs = engine.generate(TEXTS, params)
    assert [(o.token_ids, o.text, o.logprobs, o.finish_reason) for o in outputs] == [
        (o.token_ids, o.text, o.logprobs, o.finish_reason) for o in expected
    ]
    chunks = list(engine.stream(TEXTS, params))
    for i, output in enumerate(expected):
        own = [chunk for chunk in chunks if chunk.index == i]
        assert [t for chunk in own for t in chunk.token_ids] == output.token_ids
        assert "".join(chunk.text for chunk in own) == output.text
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + [output.finish_reason]


class Letters:
    """A tokenizer of one letter per id."""

    def decode(self, ids, **options):
        return "".join(chr(97 + i % 26) for i in ids)


def test_closing_a_stream_frees_its_pages(pair, overlap):
    engine = sd.Engine(*pair, max_batch_size=2)
    stream = engine.stream(TEXTS, sd.SamplingParams(max_new_tokens=20, ignore_eos=True))
    next(stream)
    stream.close()
    assert engine.core.pool.num_free_pages == engine.core.pool.num_pages
    assert engine.drafter.pool.num_free_pages == engine.drafter.pool.num_pages
    assert len(engine.generate(TEXTS, sd.SamplingParams(max_new_tokens=3, ignore_eos=True))[3].token_ids) == 3


class Failing(Drafter):
    """Proposes tokens in the two steps after the first tokens, then raises."""

    name = "failing"

    def __init__(self):
        self.num_calls = 0

    def propose(self, sequences, limits):
        self.num_calls += 1
        if self.num_calls > 2:
            raise OSError("gone")
        return Draft(torch.zeros(sum(limits), dtype=torch.int64), limits)


def test_emitted_tokens_are_returned_before_an_error_is_raised(pair, overlap):
    stream = sd.Engine(pair[0], Failing(), num_draft_tokens=1).stream(TEXTS, sd.SamplingParams(ignore_eos=True))
    assert [next(stream).index for _ in range(3 * len(TEXTS))] == [0, 1, 2, 3] * 3
    with pytest.raises(OSError, match="gone"):
        next(stream)


def test_time_is_moved_between_stages():
    timer = StageTimer()
    with timer("verify"):
        pass
    whole = timer.seconds["verify"]
    timer.move(whole / 4, "verify", "accept")
    assert timer.seconds == {"verify": pytest.approx(whole * 3 / 4), "accept": whole / 4}
