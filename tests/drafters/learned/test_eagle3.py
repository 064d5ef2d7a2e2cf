"""The EAGLE-3 drafter proposes what the formulas say, whatever the batch, the chunks and rejections."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import specdec_fast as sd
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import DrafterContext
from specdec_fast.drafters.eagle3.drafter import Eagle3Drafter
from specdec_fast.drafters.eagle3.tree import WIDTH
from specdec_fast.drafters.shared.ranked import TokenRanker
from specdec_fast.ops.registry import all_ops
from specdec_fast.trees.growing import GrowingTree
from specdec_fast.trees.parents import ROOT
from specdec_fast.trees.static import StaticTree
from support.eagle3 import dense_chain, write_checkpoint
from support.grids import each_value_once, grid
from support.models import VOCAB_SIZE
from support.simulated_engine import SimulatedEngine
from support.trees import trees_of

TAPS = (0, 1, 2)
HAS_PROGRAMS = all_ops()["linear"].why_unavailable("cpp") is None
eagerly_too = pytest.mark.parametrize("enforce_eager", [False, True], ids=["program", "pytorch"])
PARAMS = [sd.SamplingParams(), sd.SamplingParams(temperature=1.0), sd.SamplingParams(temperature=0.7, top_k=9)]
OPTIONS = {
    "plain": {},
    "subset": {"draft_vocab_size": 40, "norm_before_residual": True},
    "v31": {"fc_norm": True, "norm_output": True, "qk_norm": True},
    "deep": {"num_layers": 2, "norm_before_fc": True, "bias": True},
}


def make(tmp_path, target, model, options, seed=0, enforce_eager=False, draft_tree=None):
    weights = write_checkpoint(tmp_path / "drafter", model, taps=TAPS, **options)
    config = EngineConfig(enforce_eager=enforce_eager, draft_tree=draft_tree)
    drafter = Eagle3Drafter(DrafterContext(target, config), str(tmp_path / "drafter"))
    assert drafter.taps == TAPS
    assert drafter.describe()["forward_program"] == (HAS_PROGRAMS and not enforce_eager), drafter.describe()
    return SimulatedEngine(model, drafter, partial(dense_chain, weights, options), seed)


@each_value_once
@eagerly_too
@pytest.mark.parametrize("options", grid(OPTIONS, keep=["subset", "deep"]))
def test_proposals_are_those_of_the_formulas(tmp_path, target, model, options, enforce_eager):
    engine = make(tmp_path, target, model, options, enforce_eager=enforce_eager)
    sequences = engine.new_sequences((1, 2, 21, 9), PARAMS)
    for _ in range(6):
        engine.step(sequences, 5)
        engine.step(sequences[::2], 3)
        engine.step(sequences[1:2], 3)
    assert engine.num_proposed > 60


@pytest.mark.skipif(not HAS_PROGRAMS, reason="programs run in the C++ extension")
def test_one_call_projects_and_drafts(tmp_path, target, model, monkeypatch):
    engine = make(tmp_path, target, model, {"fc_norm": True, "draft_vocab_size": 40})
    sequences = engine.new_sequences((9, 3), PARAMS[:1])
    engine.step(sequences, 3, least=1)
    for function in ("project", "forward", "logits"):
        monkeypatch.setattr(engine.drafter.model, function, None)
    for some in (sequences, sequences[:1], sequences, sequences[:1], sequences[1:]):
        engine.step(some, 4, least=1)


@each_value_once
@eagerly_too
@pytest.mark.parametrize("tree", [11, ((0,), (1,), (0, 0), (1, 0), (0, 1), (0, 0, 0))], ids=["dynamic", "static"])
def test_trees_are_those_of_the_formulas(tmp_path, target, model, tree, enforce_eager):
    """Every node is a likely child of its path, computed densely: no row sees another branch, or a dropped node."""
    options = OPTIONS["subset"]
    engine = make(tmp_path, target, model, options, enforce_eager=enforce_eager, draft_tree=tree)
    sequences = engine.new_sequences((2, 21, 9), PARAMS)
    for _ in range(4):
        limits, node_limits = [engine.rng.randint(1, 4) for _ in sequences], [11, 11, 7]
        draft = engine.drafter.propose_trees(sequences, limits, node_limits)
        draft.check(limits, node_limits)
        assert (draft.scores is None) == isinstance(tree, tuple)
        for s, limit, num_nodes, drafted in zip(sequences, limits, node_limits, trees_of(draft), strict=True):
            assert drafted == dense_tree(engine, s, tree, limit, num_nodes)[:2]
        engine.emit(sequences, [[] for _ in sequences])


def dense_tree(engine, sequence, shape, depth, num_nodes):
    """Draft a tree with every node's logits computed from the formulas, along its path alone."""
    features = engine.features(sequence.token_ids)[:-1]
    ranker = TokenRanker(engine.drafter.model.ops, VOCAB_SIZE)
    static = StaticTree(shape) if isinstance(shape, tuple) else None
    tree = GrowingTree(num_nodes, WIDTH if static is None else len(shape), static)
    for level in range(depth):
        if not tree.frontier:
            break
        rows = []
        for node in tree.frontier:
            path, seen, above = [], [], node
            while above != ROOT:
                path.insert(0, tree.token(above))
                above = tree.parent(above)

            def choose(logits, ahead, path=path, seen=seen):
                seen.append(logits)
                return path[ahead] if ahead < len(path) else 0

            engine.expected(features, sequence.token_ids, choose, level + 1)
            rows.append(seen[-1])
        num_ranks = WIDTH if static is None else static.num_ranks[level]
        tree.add_children(*ranker(torch.stack(rows), [sequence] * len(rows), [0] * len(rows), level, num_ranks))
    return tree.nodes()


@eagerly_too
def test_forwards_have_as_many_rows_as_the_memory_plan_counts(tmp_path, target, model, monkeypatch, enforce_eager):
    engine = make(tmp_path, target, model, {}, enforce_eager=enforce_eager)
    engine.drafter.limit_prefill(8)
    rows, num_rows = engine.drafter.rows, []

    class Counting:
        program = rows.program

        def __call__(self, pool, batch, *args):
            num_rows.append(len(batch.token_ids))
            return rows(pool, batch, *args)

        def draft(self, pool, spans, token_ids, *args):
            num_rows.append(len(token_ids))
            return rows.draft(pool, spans, token_ids, *args)

    monkeypatch.setattr(engine.drafter, "rows", Counting())
    sequences = engine.new_sequences((30, 30, 30), PARAMS[:1])
    for _ in range(10):
        engine.step(sequences, 0)
    engine.step(sequences, 2)
    assert engine.num_proposed
    assert max(num_rows) <= max(8, 3 * (2 + 1))
