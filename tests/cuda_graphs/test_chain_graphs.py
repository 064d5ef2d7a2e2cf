"""Chains of drafters over hidden states as graphs: the drafts are those of single forwards, and nothing waits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

import specdec_fast as sd
from specdec_fast.ops.registry import all_ops
from support.eagle3 import write_checkpoint
from support.grids import grid
from support.models import VOCAB_SIZE
from support.mtp import Case
from support.repeated import waits

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12], [40, 3, 3, 8]]
PARAMS = [
    sd.SamplingParams(max_new_tokens=11),
    sd.SamplingParams(max_new_tokens=9, temperature=0.8, seed=3),
    sd.SamplingParams(max_new_tokens=10, temperature=1.1, top_p=0.9, seed=4),
    sd.SamplingParams(max_new_tokens=2),
    sd.SamplingParams(max_new_tokens=14),
]
GREEDY = [replace(p, temperature=0.0) for p in PARAMS]
KINDS = {
    "eagle3": {},
    "own ids": {"draft_vocab_size": VOCAB_SIZE // 2},
    "two layers": {"num_layers": 2, "qk_norm": True},
    "mtp": None,
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def models(request, tmp_path, hugging_face_model):
    """A target, and a drafter over its hidden states."""
    if request.param is None:
        case = Case("qwen3")
        case.write(tmp_path, "qwen")
        return case.target, f"mtp:{tmp_path}"
    write_checkpoint(tmp_path, hugging_face_model, **request.param)
    return hugging_face_model, f"eagle3:{tmp_path}"


one_model = pytest.mark.parametrize("models", grid(KINDS, keep=["own ids"]), indirect=True)
few_models = pytest.mark.parametrize("models", grid(KINDS, keep=["mtp"]), indirect=True)


def recorded(engine):
    """Let an engine note the draft tokens of its steps."""
    drafts, drafter = [], engine.core.drafting.drafter
    propose = drafter.propose

    def noted(sequences, limits):
        draft = propose(sequences, limits)
        drafts.append([own.tolist() for own in draft.token_ids.split(draft.num_draft_tokens)])
        return draft

    drafter.propose = noted
    return drafts


@few_models
@pytest.mark.parametrize(
    ("params", "method"), grid(product(["greedy", "mixed"], ["eqspec", "exspec"]), keep=[("mixed", "exspec")])
)
def test_graphs_draft_what_single_forwards_draft(models, params, method, graphs_on_cpu):
    found, chosen = [], {"greedy": GREEDY, "mixed": PARAMS}[params]
    for eager in (True, False):
        engine = sd.Engine(*models, method=method, max_batch_size=3, num_draft_tokens=3, enforce_eager=eager)
        drafts = recorded(engine)
        for _ in range(2):
            drafts.clear()
            outputs = [output.raise_for_error().token_ids for output in engine.generate(PROMPTS, chosen)]
            found.append((outputs, list(drafts)))
        described = engine.describe()["draft"]
        assert described["graphs"] == (not eager)
        assert (described["graphs_captured"] > 0) == (not eager)
    assert found[1:] == found[:1] * 3


@pytest.mark.grid
def test_a_long_context_is_drafted_by_the_graphs_of_a_short_one(models, graphs_on_cpu):
    """The second call has positions behind those for which the tables were made when graphs were recorded."""
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]]
    engine = sd.Engine(*models, num_draft_tokens=3, kv_cache_tokens=2048)
    for max_new_tokens in (20, 20, 600, 20):
        params = sd.SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        outputs = [output.raise_for_error().token_ids for output in engine.generate(prompts, params)]
        expected = sd.Engine(models[0], None, enforce_eager=True).generate(prompts, params)
        assert outputs == [output.token_ids for output in expected]


@one_model
def test_penalised_sequences_are_drafted_without_a_graph(models, graphs_on_cpu, monkeypatch):
    engine = sd.Engine(*models, num_draft_tokens=3)
    params = sd.SamplingParams(max_new_tokens=9, repetition_penalty=1.3)
    for _ in range(3):
        engine.generate(PROMPTS, params)
    assert engine.describe()["draft"]["graphs_captured"] == 0


@one_model
def test_a_step_of_a_drafter_does_not_wait_to_be_launched(models, monkeypatch, graphs_on_cpu):
    if all_ops()["linear"].why_unavailable("cpp") is not None:
        pytest.skip("PyTorch's ops wait")
    engine = sd.Engine(*models, max_batch_size=3, num_draft_tokens=3)
    launch, found_in = engine.core._launch, []

    def watched(*args):
        with waits(monkeypatch) as found:
            step = launch(*args)
        found_in.append(found)
        return step

    monkeypatch.setattr(engine.core, "_launch", watched)
    for output in engine.generate(PROMPTS, PARAMS, progress=False):
        output.raise_for_error()
    assert len(found_in) > 5
    assert all(not found for found in found_in), found_in


def test_what_cannot_be_recorded_is_drafted_without_a_graph(tmp_path, hugging_face_model, graphs_on_cpu):
    write_checkpoint(tmp_path, hugging_face_model)
    expected = [o.token_ids for o in sd.Engine(hugging_face_model, None, enforce_eager=True).generate(PROMPTS, GREEDY)]
    engine = sd.Engine(hugging_face_model, f"eagle3:{tmp_path}", num_draft_tokens=3)

    def refused(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    engine.core.drafting.drafter.graphs._capture = refused
    for _ in range(2):
        assert [output.raise_for_error().token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected
    described = engine.describe()["draft"]
    assert (described["graphs"], described["graphs_captured"]) == (False, 0)
    assert "not permitted" in described["why_no_graphs"]


@one_model
def test_moved_weights_are_read(models, graphs_on_cpu):
    """The graphs of a drafter may read the target's weights. Addresses are compared when a call begins."""
    engine = sd.Engine(*models, num_draft_tokens=3)
    for _ in range(2):
        engine.generate(PROMPTS, GREEDY)
    drafter = engine.core.drafting.drafter
    assert drafter.graphs.num_captured > 0
    moved = [weight.clone() for weight in drafter.weights()]
    drafter.weights = lambda: moved
    drafter.prepare(0, 16)
    assert drafter.graphs.num_captured == 0
