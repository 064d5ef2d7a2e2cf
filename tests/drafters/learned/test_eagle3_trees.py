"""Trees of the EAGLE-3 drafter in an engine: when they are drafted, and what a sequence keeps between steps."""

from __future__ import annotations

import pytest

import specdec_fast as sd
from support.eagle3 import write_checkpoint

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
PARAMS = sd.SamplingParams(max_new_tokens=20)


@pytest.fixture(scope="module")
def expected(model):
    return [output.token_ids for output in sd.Engine(model, None).generate(PROMPTS, PARAMS)]


@pytest.fixture
def folder(tmp_path, model):
    write_checkpoint(tmp_path, model, draft_vocab_size=40)
    return str(tmp_path)


def shapes_of(engine):
    """Let an engine record every draft: the most nodes of the step's trees, and the parents, None for a chain."""
    shapes, propose = [], engine.core.drafting.drafter.propose_trees

    def recorded(sequences, limits, node_limits):
        draft = propose(sequences, limits, node_limits)
        counts = draft.num_draft_tokens
        own = [None] * len(counts) if draft.parents is None else [p.tolist() for p in draft.parents.split(counts)]
        shapes.extend((max(node_limits), shape) for shape, count in zip(own, counts, strict=True) if count)
        return draft

    engine.core.drafting.drafter.propose_trees = recorded
    return shapes


@pytest.mark.parametrize("tree", [[[0], [1], [0, 0]], 3], ids=["static", "dynamic"])
@pytest.mark.parametrize("budget", [{}, {"memory_bytes": 64 << 20}], ids=["", "budget"])
def test_a_tree_of_fewer_nodes_than_a_chain_is_drafted(folder, model, expected, tree, budget):
    engine = sd.Engine(model, folder, num_draft_tokens=5, draft_tree=tree, **budget)
    shapes = shapes_of(engine)
    assert [output.token_ids for output in engine.generate(PROMPTS, PARAMS)] == expected
    trees = [shape for most, shape in shapes if most >= 3]  # with a budget, the last steps of a request allow fewer
    assert len(trees) > len(PROMPTS)
    assert all(shape is not None and len(shape) <= 3 for shape in trees)
    if tree != 3:
        assert [-1, 0, -1] in trees


def test_chains_are_drafted_where_a_budget_has_no_room_for_all_nodes(folder, model, expected):
    settings = {"num_draft_tokens": 5, "draft_tree": 6, "kv_cache_tokens": 256, "max_prefill_tokens": 1}
    whole = sd.Engine(model, folder, memory_bytes=64 << 20, **settings)
    assert whole.memory_plan.max_nodes == 6
    needed = sum(whole.memory_plan.terms.values())
    for less in (0, 1):
        engine = sd.Engine(model, folder, memory_bytes=needed - less, **settings)
        shapes = shapes_of(engine)
        assert [output.token_ids for output in engine.generate(PROMPTS, PARAMS)] == expected
    assert shapes
    assert {shape for _, shape in shapes} == {None}


def test_a_rank_beyond_the_last_id_is_refused(folder, model):
    sd.Engine(model, folder, draft_tree=[[0], [39]])
    with pytest.raises(sd.ConfigError, match=r"draft_tree has the node \[40\], but the checkpoint has 40 ids"):
        sd.Engine(model, folder, draft_tree=[[0], [40]])
