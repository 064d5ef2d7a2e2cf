"""A program drafts the trees of an EAGLE-3 drafter in one call: they are those that PyTorch drafts level by level."""

from __future__ import annotations

import pytest
import torch

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.runner.row_module import RowModule
from support.eagle3 import write_checkpoint
from support.grids import combinations, each_value_once, grid
from support.programs import needs_programs

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9], [3, 1, 4, 1, 5]]
STATIC = [[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 0], [3]]
SETTINGS = {
    "greedy": [{}],
    "sampled": [{"temperature": 1.0}],
    "filtered": [
        {"temperature": 0.8, "top_p": 0.7},
        {"temperature": 1.2, "top_k": 2},
        {"temperature": 1.0, "min_p": 0.2},
    ],
    # After the first rank, the masses of all others are as small as the rounding of its own, or underflow.
    "peaked": [
        {"temperature": 0.01, "top_p": 0.9},
        {"temperature": 0.002, "top_p": 0.9},
        {"temperature": 0.01, "top_k": 50, "top_p": 0.9},
        {"temperature": 0.05, "min_p": 0.1},
    ],
    "mixed": [{"temperature": 0.7, "top_k": 5}, {}],
}


def drafts_of(model, folder, params, in_one_call=True, **settings):
    """Return the outputs of an engine, and every draft of trees."""
    engine, drafts = sd.Engine(model, folder, num_draft_tokens=4, max_batch_size=3, **settings), []
    propose = engine.core.drafting.drafter.propose_trees

    def recorded(*args):
        drafts.append(propose(*args))
        return drafts[-1]

    engine.core.drafting.drafter.propose_trees = recorded
    engine.core.drafting.drafter.drafts_in_one_call &= in_one_call
    outputs = engine.generate(PROMPTS, [sd.SamplingParams(max_new_tokens=n + 9, **p) for n, p in enumerate(params)])
    return [output.raise_for_error().token_ids for output in outputs], drafts


@needs_programs
@combinations(
    tree={"1": 1, "3": 3, "24": 24, "static": STATIC}, own_ids={"target's ids": None, "own ids": 40}, settings=SETTINGS
)
def test_a_program_drafts_the_trees_of_pytorch(tmp_path, model, tree, own_ids, settings):
    write_checkpoint(tmp_path, model, draft_vocab_size=own_ids)
    params = [settings[i % len(settings)] | {"seed": i} for i in range(len(PROMPTS))]
    found, drafts = drafts_of(model, str(tmp_path), params, draft_tree=tree)
    expected, expected_drafts = drafts_of(model, str(tmp_path), params, in_one_call=False, draft_tree=tree)
    assert found == expected
    assert len(drafts) == len(expected_drafts)
    for own, other in zip(drafts, expected_drafts, strict=True):
        assert own.num_draft_tokens == other.num_draft_tokens
        assert own.token_ids.tolist() == other.token_ids.tolist()
        if other.parents is not None and len(other.parents):
            assert own.parents.tolist() == other.parents.tolist()
            assert (own.scores is None) == (other.scores is None)
            if other.scores is not None:
                torch.testing.assert_close(own.scores, other.scores, rtol=1e-5, atol=1e-5)


@needs_programs
@pytest.mark.parametrize("settings", grid(SETTINGS, keep=list(SETTINGS)[::2]))
def test_a_vocabulary_of_many_blocks_is_ranked_alike(settings):
    pair = demo_pair()
    params = [settings[i % len(settings)] | {"seed": i} for i in range(len(PROMPTS))]
    models = str(pair / "target"), f"eagle3:{pair / 'eagle3'}", params
    found, drafts = drafts_of(*models, draft_tree=16, dtype=torch.float32)
    expected, expected_drafts = drafts_of(*models, in_one_call=False, draft_tree=16, dtype=torch.float32)
    assert found == expected
    assert [draft.token_ids.tolist() for draft in drafts] == [draft.token_ids.tolist() for draft in expected_drafts]


@each_value_once
@needs_programs
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["program", "PyTorch"])
@pytest.mark.parametrize("temperatures", [[0.0], [1.0], [0.0, 1.0]], ids=str)
def test_rows_without_numbers_get_no_children(tmp_path, model, temperatures, enforce_eager):
    write_checkpoint(tmp_path, model)
    params = [{"temperature": temperatures[i % len(temperatures)], "seed": i} for i in range(len(PROMPTS))]
    expected, _ = drafts_of(model, str(tmp_path), params, draft_tree=6)
    engine = sd.Engine(model, str(tmp_path), num_draft_tokens=4, draft_tree=6, enforce_eager=enforce_eager)
    assert (engine.core.drafting.drafter.rows.program is None) == enforce_eager
    with torch.inference_mode():
        for weight in engine.core.drafting.drafter.weights():  # the program reads them in place
            if weight.is_floating_point():
                weight.fill_(float("nan"))
    outputs = engine.generate(PROMPTS, [sd.SamplingParams(max_new_tokens=n + 9, **p) for n, p in enumerate(params)])
    assert [output.raise_for_error().token_ids for output in outputs] == expected
    assert engine.last_run.decoding.num_draft_tokens == 0


@needs_programs
def test_a_repetition_penalty_is_ranked_by_pytorch(monkeypatch, tmp_path, model):
    write_checkpoint(tmp_path, model)
    params = [{"repetition_penalty": 1.3}] * len(PROMPTS)
    calls = []
    monkeypatch.setattr(RowModule, "draft_trees", lambda self, *args: calls.append(args))
    _, drafts = drafts_of(model, str(tmp_path), params, draft_tree=6)
    assert not calls
    assert any(sum(draft.num_draft_tokens) for draft in drafts)
