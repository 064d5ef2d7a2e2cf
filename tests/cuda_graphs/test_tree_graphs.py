"""Trees of EAGLE-3 as graphs: they are those that are drafted level by level, and a step waits for them once."""

from __future__ import annotations

import pytest

import specdec_fast as sd
from support.eagle3 import write_checkpoint
from support.grids import combinations
from support.repeated import waits

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12], [40, 3, 3, 8]]
STATIC = [[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 0], [0, 0, 0, 0], [3]]
SETTINGS = {
    "greedy": [{}],
    "sampled": [{"temperature": 1.0}],
    "mixed": [{"temperature": 0.8, "top_p": 0.7}, {}, {"temperature": 1.2, "top_k": 2}],
}
# A single node; fewer nodes than rows, some of which are left out; all rows; more rows than a word of a mask has bits.
TREES = {"1": 1, "6": 6, "24": 24, "64": 64, "static": STATIC}


def texts_and_trees(engine, params):
    """Return the outputs of an engine, and every tree of two calls: tokens, parents and scores of each."""
    trees, drafter = [], engine.core.drafting.drafter
    propose = drafter.propose_trees

    def noted(*args):
        draft = propose(*args)
        scores = None if draft.scores is None else draft.scores.tolist()
        parents = None if draft.parents is None else draft.parents.tolist()
        trees.append((draft.token_ids.tolist(), draft.num_draft_tokens, parents, scores))
        return draft

    drafter.propose_trees = noted
    for _ in range(2):
        outputs = [output.raise_for_error().token_ids for output in engine.generate(PROMPTS, params)]
    drafter.propose_trees = propose
    return outputs, trees


def params_of(settings):
    return [
        sd.SamplingParams(max_new_tokens=9 + 2 * i, ignore_eos=True, seed=i, **settings[i % len(settings)])
        for i in range(len(PROMPTS))
    ]


@combinations(tree=TREES, own_ids={"target's ids": None, "own ids": 40}, settings=SETTINGS)
def test_graphs_draft_the_trees_of_single_forwards(
    tmp_path, hugging_face_model, graphs_on_cpu, tree, own_ids, settings
):
    write_checkpoint(tmp_path, hugging_face_model, draft_vocab_size=own_ids)
    found = []
    for eager in (True, False):
        engine = sd.Engine(
            hugging_face_model,
            f"eagle3:{tmp_path}",
            draft_tree=tree,
            num_draft_tokens=4,
            max_batch_size=3,
            enforce_eager=eager,
        )
        found.append(texts_and_trees(engine, params_of(settings)))
        assert (engine.describe()["draft"]["graphs_captured"] > 0) == (not eager)
    ((texts, trees), (other_texts, other_trees)) = found
    assert other_texts == texts
    assert len(other_trees) == len(trees) > 10
    for (tokens, counts, parents, scores), other in zip(trees, other_trees, strict=True):
        assert other[:3] == (tokens, counts, parents)
        assert other[3] == (None if scores is None else pytest.approx(scores, rel=1e-4, abs=1e-4))


def test_rows_that_fill_a_bucket_leave_a_place_without_rows(tmp_path, hugging_face_model, graphs_on_cpu):
    """A graph of four rows and four places drafts for three sequences with four rows together."""
    write_checkpoint(tmp_path, hugging_face_model)
    prompts = [[5], [9], [7, 2]]
    params = sd.SamplingParams(max_new_tokens=7, ignore_eos=True)
    expected = sd.Engine(hugging_face_model, None, enforce_eager=True).generate(prompts, params)
    engine = sd.Engine(
        hugging_face_model, f"eagle3:{tmp_path}", draft_tree=6, num_draft_tokens=4, max_batch_size=4, prefix_cache=False
    )
    graphs = engine.core.drafting.drafter.graphs
    for _ in range(3):
        outputs = engine.generate(prompts, params)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert graphs.why_not is None
    assert any((kind.bucket.num_rows, kind.bucket.one_each) == (4, 4) for kind in graphs._graphs)


@pytest.mark.parametrize("tree", [6, STATIC], ids=["best", "static"])
def test_a_step_with_trees_waits_once(tmp_path, hugging_face_model, graphs_on_cpu, monkeypatch, tree):
    write_checkpoint(tmp_path, hugging_face_model)
    engine = sd.Engine(hugging_face_model, f"eagle3:{tmp_path}", draft_tree=tree, num_draft_tokens=4)
    params = sd.SamplingParams(max_new_tokens=24, ignore_eos=True)
    engine.generate(PROMPTS, params)  # records the graphs
    drafter = engine.core.drafting.drafter
    propose = drafter.propose_trees
    found_in = []

    def watched(sequences, limits, node_limits):
        with waits(monkeypatch) as found:
            draft = propose(sequences, limits, node_limits)
        if max(limits) == 4:
            found_in.append(found)
        return draft

    drafter.propose_trees = watched
    engine.generate(PROMPTS, params)
    assert len(found_in) > 3
    # The host reads what the graph has named: the children of every level, in one transfer.
    assert all(set(found) <= {"numpy", "tolist"} for found in found_in), found_in
