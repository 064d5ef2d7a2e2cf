"""The EAGLE-3 drafter proposes what the formulas say, whatever the batch, the chunks, rejections and pauses."""

from __future__ import annotations

import random

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
from support.courses import Course, chosen_by_rule, features_of, new_sequence
from support.eagle3 import dense_chain, write_checkpoint
from support.models import VOCAB_SIZE
from support.trees import trees_of

TAPS = (0, 1, 2)
HAS_PROGRAMS = all_ops()["linear"].why_unavailable("cpp") is None
eagerly_too = pytest.mark.parametrize("enforce_eager", [False, True], ids=["program", "pytorch"])
OPTIONS = {
    "plain": {},
    "subset": {"draft_vocab_size": 40, "norm_before_residual": True},
    "v31": {"fc_norm": True, "norm_output": True, "qk_norm": True},
    "deep": {"num_layers": 2, "norm_before_fc": True, "bias": True},
}


class Eagle3Course(Course):
    """Compares with the formulas of EAGLE-3."""

    def __init__(self, model, drafter, weights, options, seed):
        super().__init__(model, drafter, None, seed)
        self.weights, self.options = weights, options

    def step(self, sequences, largest, least=0):
        """One step: compare the proposals with the formulas, then accept some of each and emit another token."""
        limits = [self.rng.randint(least, largest) for _ in sequences]
        proposals = [[] for _ in sequences]
        if any(limits):
            draft = self.drafter.propose(sequences, limits)
            draft.check(limits)
            proposals = [part.tolist() for part in draft.token_ids.split(draft.num_draft_tokens)]
            for s, limit, proposal in zip(sequences, limits, proposals, strict=True):
                if limit and s.length > 1:
                    features = self.features(s.token_ids)[:-1]
                    expected = dense_chain(self.weights, self.options, features, s.token_ids, chosen_by_rule(s), limit)
                    assert proposal == expected
                    self.num_proposed += limit
                else:
                    assert not proposal
        self.emit(sequences, proposals)


def make(tmp_path, target, model, options, seed=0, enforce_eager=False, draft_tree=None):
    weights = write_checkpoint(tmp_path / "drafter", model, taps=TAPS, **options)
    config = EngineConfig(enforce_eager=enforce_eager, draft_tree=draft_tree)
    drafter = Eagle3Drafter(DrafterContext(target, config), str(tmp_path / "drafter"))
    assert drafter.taps == TAPS
    assert drafter.describe()["forward_program"] == (HAS_PROGRAMS and not enforce_eager), drafter.describe()
    return Eagle3Course(model, drafter, weights, options, seed)


@eagerly_too
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_proposals_are_those_of_the_formulas(tmp_path, target, model, options, enforce_eager):
    course = make(tmp_path, target, model, options, enforce_eager=enforce_eager)
    params = [sd.SamplingParams(), sd.SamplingParams(temperature=1.0), sd.SamplingParams(temperature=0.7, top_k=9)]
    sequences = [new_sequence(i, length, params[i % 3], course.rng) for i, length in enumerate((1, 2, 21, 9))]
    course.prefill(sequences)
    for _ in range(6):
        course.step(sequences, 5)
        course.step(sequences[::2], 3)
        course.step(sequences[1:2], 3)
    assert course.num_proposed > 60


@pytest.mark.skipif(not HAS_PROGRAMS, reason="programs run in the C++ extension")
def test_one_call_projects_and_drafts(tmp_path, target, model, monkeypatch):
    course = make(tmp_path, target, model, {"fc_norm": True, "draft_vocab_size": 40})
    sequences = [new_sequence(i, length, sd.SamplingParams(), course.rng) for i, length in enumerate((9, 3))]
    course.prefill(sequences)
    course.step(sequences, 3, least=1)
    for function in ("project", "forward", "logits"):
        monkeypatch.setattr(course.drafter.model, function, None)
    for some in (sequences, sequences[:1], sequences, sequences[:1], sequences[1:]):
        course.step(some, 4, least=1)


@eagerly_too
@pytest.mark.parametrize("tree", [11, ((0,), (1,), (0, 0), (1, 0), (0, 1), (0, 0, 0))], ids=["dynamic", "static"])
def test_trees_are_those_of_the_formulas(tmp_path, target, model, tree, enforce_eager):
    """Every node is a likely child of its path, computed densely: no row sees another branch, or a dropped node."""
    options = OPTIONS["subset"]
    course = make(tmp_path, target, model, options, enforce_eager=enforce_eager, draft_tree=tree)
    params = [sd.SamplingParams(), sd.SamplingParams(temperature=1.0), sd.SamplingParams(temperature=0.7, top_k=9)]
    sequences = [new_sequence(i, length, params[i % 3], course.rng) for i, length in enumerate((2, 21, 9))]
    course.prefill(sequences)
    for _ in range(4):
        limits, node_limits = [course.rng.randint(1, 4) for _ in sequences], [11, 11, 7]
        draft = course.drafter.propose_trees(sequences, limits, node_limits)
        draft.check(limits, node_limits)
        assert (draft.scores is None) == isinstance(tree, tuple)
        for s, limit, num_nodes, own in zip(sequences, limits, node_limits, trees_of(draft), strict=True):
            assert own == dense_tree(course, s, tree, limit, num_nodes)[:2]
        course.emit(sequences, [[] for _ in sequences])


def dense_tree(course, sequence, shape, depth, num_nodes):
    """Draft a tree with every node's logits computed from the formulas, along its path alone."""
    features = features_of(course.model, sequence.token_ids, TAPS)[:-1]
    ranker = TokenRanker(course.drafter.model.ops, VOCAB_SIZE)
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

            dense_chain(course.weights, course.options, features, sequence.token_ids, choose, level + 1)
            rows.append(seen[-1])
        num_ranks = WIDTH if static is None else static.num_ranks[level]
        tree.add_children(*ranker(torch.stack(rows), [sequence] * len(rows), [0] * len(rows), level, num_ranks))
    return tree.nodes()


@eagerly_too
def test_features_wait_while_nothing_is_drafted(tmp_path, target, model, monkeypatch, enforce_eager):
    monkeypatch.setattr("specdec_fast.drafters.shared.tapped.MOST_QUEUED_BYTES", 0)
    course = make(tmp_path, target, model, {}, enforce_eager=enforce_eager)
    sequences = [new_sequence(i, 5, sd.SamplingParams(), course.rng) for i in range(2)]
    course.prefill(sequences)
    for _ in range(70):
        course.step(sequences, 0)
        assert kept_rows(course.drafter) <= 2 * 64
    assert course.drafter._states[sequences[0]].kv_length
    course.step(sequences, 5)
    course.step(sequences, 5)
    assert course.num_proposed


@eagerly_too
def test_small_hidden_states_wait_however_many(tmp_path, target, model, monkeypatch, enforce_eager):
    course = make(tmp_path, target, model, {}, enforce_eager=enforce_eager)
    sequences = [new_sequence(i, 5, sd.SamplingParams(), course.rng) for i in range(2)]
    course.prefill(sequences)
    with monkeypatch.context() as patched:
        for method in ("_projected", "_compute"):
            patched.setattr(course.drafter, method, None)
        for _ in range(70):
            course.step(sequences, 0)
    assert kept_rows(course.drafter) == 2 * 74
    course.drafter.release(sequences[1])
    assert kept_rows(course.drafter) == 2 * 70 + 8, "the others of a step still need its hidden states"
    course.step(sequences[:1], 5, least=1)
    assert course.drafter._kept.num_rows == kept_rows(course.drafter) <= 6


def test_rejected_rows_count_while_they_are_kept(tmp_path, target, model, monkeypatch):
    """One sequence is drafted for, the other only keeps rows of the same forwards: it is caught up in time."""
    monkeypatch.setattr("specdec_fast.drafters.shared.tapped.MOST_QUEUED", 8)
    monkeypatch.setattr("specdec_fast.drafters.shared.tapped.MOST_QUEUED_BYTES", 0)
    course = make(tmp_path, target, model, {})
    sequences = [new_sequence(i, 5, sd.SamplingParams(), course.rng) for i in range(2)]
    course.prefill(sequences)
    for _ in range(9):
        draft = course.drafter.propose(sequences, [5, 0])
        course.emit(sequences, [draft.token_ids.tolist(), []])
        assert kept_rows(course.drafter) <= 2 * 8
    course.step(sequences, 5, least=1)


def kept_rows(drafter):
    """The rows of hidden states in memory: those for which no sequence waits are part of their forward's tensor."""
    kept = {id(each): each for state in drafter._states.values() for each, _, _ in state.queued}
    found = sum(each.hidden_states.untyped_storage().nbytes() // each.hidden_states[0].nbytes for each in kept.values())
    assert found == drafter._kept.num_rows
    return found


@eagerly_too
def test_a_preempted_sequence_starts_again(tmp_path, target, model, enforce_eager):
    course = make(tmp_path, target, model, {}, enforce_eager=enforce_eager)
    sequences = [new_sequence(i, 30, sd.SamplingParams(), course.rng) for i in range(3)]
    course.prefill(sequences)
    course.step(sequences, 4)
    course.drafter.release(sequences[1])
    course.step([sequences[0], sequences[2]], 4)
    course.prefill([sequences[1]])
    course.drafter.grow(4000)
    course.step(sequences, 4)
    for sequence in sequences:
        course.drafter.release(sequence)
    assert course.drafter.pool.is_vacant
    assert not course.drafter._states


def test_long_prompts_are_computed_in_portions(tmp_path, target, model, monkeypatch):
    course = make(tmp_path, target, model, {})
    course.drafter.limit_prefill(7)
    compute, num_rows = course.drafter._compute, []

    def counted(rows):
        num_rows.append(sum(own.count for own in rows))
        compute(rows)

    monkeypatch.setattr(course.drafter, "_compute", counted)
    sequences = [new_sequence(i, length, sd.SamplingParams(), course.rng) for i, length in enumerate((40, 3, 18))]
    course.prefill(sequences)
    course.step(sequences, 4, least=1)
    course.step(sequences, 4)
    assert course.num_proposed
    whole, rest = divmod(sum(num_rows), 7)
    assert whole > 5
    assert num_rows == [7] * whole + [rest] * bool(rest)


def test_a_sequence_without_all_its_features_gets_no_draft(tmp_path, target, model):
    course = make(tmp_path, target, model, {})
    sequences = [new_sequence(i, 6, sd.SamplingParams(), course.rng) for i in range(2)]
    course.prefill(sequences[:1])
    course.drafter.admit(sequences[1:])  # memory ran out: it was admitted again, but not prefilled
    draft = course.drafter.propose(sequences, [3, 3])
    assert draft.num_draft_tokens == [3, 0]


def test_what_waits_of_a_long_prompt_keeps_no_memory_of_the_rest(tmp_path, target, model, monkeypatch):
    monkeypatch.setattr("specdec_fast.drafters.shared.tapped.MOST_QUEUED", 19)
    monkeypatch.setattr("specdec_fast.drafters.shared.tapped.MOST_QUEUED_BYTES", 0)
    drafter = make(tmp_path, target, model, {}).drafter
    rng = random.Random(0)
    sequences = [new_sequence(i, length, sd.SamplingParams(), rng) for i, length in enumerate((2, 40))]
    drafter.prepare(2000, 16)
    drafter.admit(sequences)
    features = torch.cat([features_of(model, s.token_ids, TAPS)[:-1] for s in sequences])
    drafter.observe(sequences, [range(1), range(39)], features)
    for sequence in sequences:
        ((kept, start, stop),) = drafter._states[sequence].queued
        waiting = kept.hidden_states
        assert (start, stop) == (0, 1)
        assert waiting.untyped_storage().nbytes() == waiting.nbytes == features[0].nbytes
    assert kept_rows(drafter) == 2


@eagerly_too
def test_forwards_have_as_many_rows_as_the_memory_plan_counts(tmp_path, target, model, monkeypatch, enforce_eager):
    course = make(tmp_path, target, model, {}, enforce_eager=enforce_eager)
    sequences = [new_sequence(i, 30, sd.SamplingParams(), course.rng) for i in range(3)]
    course.drafter.limit_prefill(8)
    rows, num_rows = course.drafter.rows, []

    class Counting:
        program = rows.program

        def __call__(self, pool, batch, *args):
            num_rows.append(len(batch.token_ids))
            return rows(pool, batch, *args)

        def draft(self, pool, spans, token_ids, *args):
            num_rows.append(len(token_ids))
            return rows.draft(pool, spans, token_ids, *args)

    monkeypatch.setattr(course.drafter, "rows", Counting())
    course.prefill(sequences)
    for _ in range(10):
        course.step(sequences, 0)
    course.step(sequences, 2)
    assert course.num_proposed
    assert max(num_rows) <= max(8, 3 * (2 + 1))
