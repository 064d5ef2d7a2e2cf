"""Trees in the engine: their contract, their statistics, and what happens if pages or memory run short."""

from __future__ import annotations

import pytest
import torch

import specdec_fast as sd
from specdec_fast.runner.ragged_model import RaggedModel
from support.models import VOCAB_SIZE
from support.scripted_trees import RandomTrees

PARAMS = sd.SamplingParams(max_new_tokens=18, ignore_eos=True, logprobs=True)
PROMPTS = [[1, 2, 3], [7, 8], [9] * 12, [4, 5, 6, 7]]


@pytest.fixture(scope="module")
def target(pair):
    return pair[0]


@pytest.fixture(scope="module")
def expected(target):
    return decode(sd.Engine(target, None, max_batch_size=1))


def decode(engine):
    outputs = engine.generate(PROMPTS, PARAMS, progress=False)
    return [(output.raise_for_error().token_ids, output.logprobs) for output in outputs]


def trees_for(expected, **settings):
    return RandomTrees([token_ids for token_ids, _ in expected], **settings)


def limits_of(drafter):
    """Every pair of a depth limit and a node limit that the engine asked for."""
    return [pair for asked in drafter.asked for pair in zip(*asked, strict=True)]


class Fixed(sd.Drafter):
    """Proposes the same draft for every sequence after its first token; keeps the rows that were accepted."""

    name = "fixed"

    def __init__(self, tokens, parents, max_nodes=0, scores=None):
        self.tokens, self.parents, self.max_nodes, self.scores = tokens, parents, max_nodes, scores
        self.accepted_rows = []

    def propose(self, sequences, limits):
        counts = [len(self.tokens) if s.length == s.prompt_length + 1 else 0 for s in sequences]
        drafting = sum(map(bool, counts))
        parents = self.parents
        if isinstance(parents, list):
            parents = torch.tensor(parents * drafting, dtype=torch.int32)
        scores = torch.tensor(self.scores * drafting) if isinstance(self.scores, list) else self.scores
        return sd.Draft(torch.tensor(self.tokens * drafting, dtype=torch.int64), counts, parents, scores)

    def commit(self, sequences, result):
        self.accepted_rows.append(result.accepted_rows)


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([3, 4], [-1, 1], "parents are .-1, 1.; expected -1 or the index of an earlier token"),
        ([3, 4], [0, -1], "parents are .0, -1.; expected"),
        ([3, 4], [-2, -1], "parents are .-2, -1.; expected"),
        ([3, 3], [-1, -1], "two children of one parent with the same token; merge them"),
        ([3, 4, 5, 6], [-1, 0, 1, 2], "a tree of depth 4; at most 3"),
        ([1, 2, 3, 4, 5, 6, 7], [-1] * 7, "proposed .7. tokens per sequence; at most .6."),
        ([3, 4], torch.tensor([-1, 0]), "parents are torch.int64 .2.; expected a tensor of int32 .2."),
        ([3, 4], torch.tensor([-1], dtype=torch.int32), "parents are torch.int32 .1.; expected"),
        ([3, 4], "none", "parents are str; expected a tensor of int32"),
    ],
)
def test_broken_trees_are_refused(target, tokens, parents, message):
    engine = sd.Engine(target, Fixed(tokens, parents, max_nodes=6), num_draft_tokens=3)
    with pytest.raises(sd.DrafterError, match=message):
        engine.generate(PROMPTS[:1], PARAMS)
    assert engine.core.pool.is_vacant


@pytest.mark.parametrize(
    ("parents", "scores", "message"),
    [
        ([-1, 0], [-1.0, -0.5], "scores have a node of -0.5 under -1.0; expected log-probabilities"),
        (None, [-1.0, -0.5], "scores have a node of -0.5 under -1.0; expected log-probabilities"),
        ([-1, -1], [-1.0, 0.5], "scores have a node of 0.5 under 0.0; expected"),
        ([-1, 0], [float("nan"), -1.0], "scores have a node of nan under 0.0"),
        (
            [-1, 0],
            torch.zeros(2, dtype=torch.float64),
            "scores are torch.float64 .2.; expected a tensor of float32 .2.",
        ),
        ([-1, 0], torch.zeros(3), "scores are torch.float32 .3.; expected a tensor of float32 .2."),
        (None, "none", "scores are str; expected a tensor of float32"),
    ],
)
def test_broken_scores_are_refused(target, parents, scores, message):
    engine = sd.Engine(target, Fixed([3, 4], parents, max_nodes=6, scores=scores), num_draft_tokens=3)
    with pytest.raises(sd.DrafterError, match=message):
        engine.generate(PROMPTS[:1], PARAMS)


@pytest.mark.parametrize("parents", [[-1, -1, 0], None])
def test_scores_change_no_output(target, expected, parents):
    drafter = Fixed([3, 4, 5], parents, max_nodes=6, scores=[-0.5, -0.5, -float("inf")])
    assert decode(sd.Engine(target, drafter, num_draft_tokens=3)) == expected
    assert drafter.accepted_rows


def test_a_drafter_of_chains_may_propose_trees_of_k_nodes(target):
    text = sd.generate(target, None, PROMPTS[:1], PARAMS)[0].token_ids
    params = sd.SamplingParams(max_new_tokens=5, ignore_eos=True)
    wrong = [(text[1] + 1) % VOCAB_SIZE, (text[1] + 2) % VOCAB_SIZE]
    drafter = Fixed([*wrong, text[1]], [-1, -1, -1])
    (output,) = sd.generate(target, drafter, PROMPTS[:1], params, num_draft_tokens=3)
    assert output.token_ids == text[:5]
    assert drafter.accepted_rows[0] == [[0, 3]]
    with pytest.raises(sd.DrafterError, match=r"at most \[3\]"):
        sd.generate(target, Fixed([*wrong, text[1], 5], [-1, -1, -1, 0]), PROMPTS[:1], params, num_draft_tokens=3)


@pytest.mark.parametrize("reason", ["one_by_one", "attention"])
def test_models_that_verify_no_trees_refuse_them(target, monkeypatch, reason):
    engine = sd.Engine(target, Fixed([1, 2], [-1, -1]))
    if reason == "attention":
        monkeypatch.setattr(type(engine.target.ops), "has_trees", lambda self, op: False)
    else:
        monkeypatch.setattr(engine.target, "row_padding", type(engine.target.row_padding)(one_by_one=True))
    with pytest.raises(sd.NotYetSupportedError, match=r"verifies no trees of draft tokens: .* use a drafter of chains"):
        engine.generate(PROMPTS, PARAMS)


def test_a_tree_of_one_branch_is_a_chain(target, expected, monkeypatch):
    """So are its statistics and the rows that the drafter learns; the model gets no parents."""
    text, seen, verify_step = expected[0][0], [], RaggedModel.verify_step

    def noting(self, *args):
        seen.append(args[-1])
        return verify_step(self, *args)

    monkeypatch.setattr(RaggedModel, "verify_step", noting)
    params = sd.SamplingParams(max_new_tokens=5, ignore_eos=True, logprobs=True)
    found = []
    for parents in (None, [-1, 0, 1]):
        drafter = Fixed([text[1], text[2], (text[3] + 1) % VOCAB_SIZE], parents)
        (output,) = sd.generate(target, drafter, PROMPTS[:1], params, num_draft_tokens=3)
        assert (output.token_ids, output.logprobs) == (text[:5], expected[0][1][:5])
        found.append((output.stats, drafter.accepted_rows))
    assert found[0] == found[1]
    assert found[0][1][0] == [range(3)]
    assert set(seen) == {None}


def test_statistics_and_step_results_of_a_tree(target, expected):
    """A wrong branch lies before the right one. Nodes count as draft tokens, acceptance counts by depth."""
    text = expected[0][0]
    wrong = [(text[1] + 1) % VOCAB_SIZE, (text[1] + 2) % VOCAB_SIZE]
    drafter = Fixed([*wrong, text[1], text[2]], [-1, 0, -1, 2], max_nodes=4)
    params = sd.SamplingParams(max_new_tokens=5, ignore_eos=True)
    (output,) = sd.generate(target, drafter, PROMPTS[:1], params, num_draft_tokens=2)
    assert output.token_ids == text[:5]
    assert output.stats.num_draft_tokens == 4
    assert output.stats.num_accepted_tokens == 2
    assert output.stats.accepted_per_position == [1, 1]
    assert drafter.accepted_rows[0] == [[0, 3, 4]]


def test_k_bounds_the_depth_and_a_limit_of_its_own_the_nodes(target, expected):
    drafter = trees_for(expected, max_nodes=9)
    assert decode(sd.Engine(target, drafter, num_draft_tokens=3)) == expected
    assert set(limits_of(drafter)) <= {(0, 0), (1, 9), (2, 9), (3, 9)}
    assert (3, 9) in limits_of(drafter)


@pytest.mark.parametrize("method", ["eqspec", "exspec"])
def test_trees_shrink_and_sequences_are_preempted_if_pages_are_short(target, expected, method):
    """The pool holds the longest sequence alone, without a position for the branches at its end."""
    drafter = trees_for(expected, max_nodes=30)
    settings = {"page_size": 4, "kv_cache_tokens": 32, "max_batch_size": 3, "method": method}
    engine = sd.Engine(target, drafter, **settings)
    assert decode(engine) == expected
    assert engine.last_run.num_preemptions
    assert any(limit and limit == nodes for limit, nodes in limits_of(drafter)), "no tree shrank"
    assert engine.core.pool.is_vacant


def test_a_pool_of_free_size_has_room_for_all_nodes(target, expected):
    drafter = trees_for(expected, max_nodes=30)
    engine = sd.Engine(target, drafter, page_size=4, max_batch_size=4)
    assert decode(engine) == expected
    assert {nodes for _, nodes in limits_of(drafter)} <= {0, 30}
    assert engine.last_run.num_preemptions == 0


def test_trees_shrink_after_a_step_that_ran_out_of_memory(target, expected, monkeypatch):
    drafter = trees_for(expected, max_nodes=20)
    engine = sd.Engine(target, drafter, num_draft_tokens=4)
    verify_step, most = engine.target.verify_step, 4 * 5

    def limited(pool, sequences, tokens, counts, parents):
        if len(sequences) + len(tokens) > most:
            raise MemoryError("none left")
        return verify_step(pool, sequences, tokens, counts, parents)

    monkeypatch.setattr(engine.target, "verify_step", limited)
    assert decode(engine) == expected
    assert engine.last_run.num_out_of_memory


def test_auto_chooses_the_depth_of_trees(target, expected):
    drafter = trees_for(expected, max_nodes=9)
    assert decode(sd.Engine(target, drafter, num_draft_tokens="auto")) == expected
    assert all(limit <= 8 and nodes in ((limit, 9) if limit else (0,)) for limit, nodes in limits_of(drafter))


def test_trees_have_k_nodes_where_a_memory_budget_has_no_room_for_more(target, expected):
    settings = {"num_draft_tokens": 4, "kv_cache_tokens": 2048, "max_prefill_tokens": 1}
    drafter = trees_for(expected, max_nodes=9)
    engine = sd.Engine(target, drafter, memory_bytes=1 << 30, **settings)
    assert decode(engine) == expected
    assert {nodes for limit, nodes in limits_of(drafter) if limit} == {9}
    less = sum(engine.memory_plan.terms.values()) - 1
    drafter = trees_for(expected, max_nodes=9)
    assert decode(sd.Engine(target, drafter, memory_bytes=less, **settings)) == expected
    assert limits_of(drafter)
    assert all(limit == nodes for limit, nodes in limits_of(drafter))


@pytest.mark.parametrize("max_nodes", [None, -20, 2.5, 10**30])
def test_a_wrong_number_of_nodes_is_refused_when_the_engine_is_made(target, max_nodes):
    with pytest.raises(sd.DrafterError, match=r"max_nodes is .*expected an integer from 0 on"):
        sd.Engine(target, Fixed([3], None, max_nodes))
