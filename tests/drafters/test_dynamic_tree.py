"""Trees that follow the drafter's confidence: the best nodes of all candidates, in an order that moves few entries."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specdec_fast as sd
from specdec_fast.drafters.shared.dynamic_tree import ROOT, DynamicTree, RankPaths, TreeNodes, draft_of
from specdec_fast.drafters.shared.ranked import GREEDY_TEMPERATURE, TokenRanker
from specdec_fast.ops import all_ops, resolve
from specdec_fast.ops.sampling import gumbel, gumbel_noise
from specdec_fast.request.sequence import Sequence
from specdec_fast.trees.parents import depths_of
from specdec_fast.trees.static import StaticTree, fit_tree

RANKS = 4


def children_of(path, seed):
    """Names and log-probabilities of the children of a path; a seed decides. Some are equal, some impossible."""
    rng = random.Random(f"{seed} {path}")
    tokens = rng.sample(range(50), RANKS)
    return tokens, [rng.choice([-0.1, -0.5, -0.5, -1.0, -3.0 * rng.random(), -math.inf]) for _ in tokens]


def paths_of(nodes):
    """Return the tokens from the root to each node."""
    paths = []
    for token, parent in zip(nodes.token_ids, nodes.parents, strict=True):
        paths.append(((*paths[parent], token)) if parent >= 0 else (token,))
    return paths


def drafted(seed, depth, width, max_nodes):
    """Return the tree, and the scores of all candidates by path: those named for the nodes of a frontier."""
    tree, candidates, paths = DynamicTree(max_nodes, width), {}, {ROOT: ()}
    for _ in range(depth):
        named = [children_of(paths[node], seed) for node in tree.frontier]
        for node, (tokens, values) in zip(tree.frontier, named, strict=True):
            for token, value in zip(tokens, values, strict=True):
                if value > -math.inf:
                    candidates[(*paths[node], token)] = candidates.get(paths[node], 0.0) + value
        before = dict(paths)
        tree.add_children(*zip(*named, strict=True))
        paths |= {node: (*before[tree.parent(node)], tree.token(node)) for node in tree.frontier}
        if not tree.frontier:
            break
    return tree, candidates


@given(seed=st.integers(0, 10**6), depth=st.integers(1, 5), width=st.integers(1, 6), max_nodes=st.integers(1, 24))
def test_a_tree_is_the_best_of_all_candidates(seed, depth, width, max_nodes):
    tree, candidates = drafted(seed, depth, width, max_nodes)
    nodes = tree.nodes()
    paths = paths_of(nodes)
    assert len(paths) == len(set(paths)) == min(max_nodes, len(candidates)), "siblings are different tokens"
    assert all(-1 <= parent < node for node, parent in enumerate(nodes.parents))
    assert max(depths_of(nodes.parents), default=0) <= depth
    assert nodes.scores == [pytest.approx(candidates[path]) for path in paths]
    assert sorted(nodes.scores) == pytest.approx(sorted(candidates.values())[len(candidates) - len(paths) :])
    # Depth first: the children of a node follow it, the best one at once.
    for node, parent in enumerate(nodes.parents):
        ancestors = {-1} | {paths.index(paths[node - 1][:length]) for length in range(1, len(paths[node - 1]) + 1)}
        assert node == 0 or parent in ancestors
        siblings = [nodes.scores[other] for other in range(node) if nodes.parents[other] == parent]
        assert all(score >= nodes.scores[node] for score in siblings)
    draft_of([nodes, None], torch.device("cpu")).check([depth, 0], [max_nodes, 0])


@given(seed=st.integers(0, 10**6), width=st.integers(1, 6), max_nodes=st.integers(1, 24))
def test_a_frontier_is_the_best_of_a_level_that_the_tree_can_hold(seed, width, max_nodes):
    """A node outside the best ``max_nodes`` so far is never expanded; a forward has the frontier and its ancestors."""
    tree, candidates = drafted(seed, 3, width, max_nodes)
    level = sorted((score for path, score in candidates.items() if len(path) == 3), reverse=True)
    least = sorted(candidates.values(), reverse=True)[:max_nodes][-1]
    held = [score for score in level if score > least][:width]
    rows, parents = tree.frontier_rows()
    assert len(held) <= len(tree.frontier) <= width
    assert len(rows) <= max_nodes
    assert set(tree.frontier) <= set(rows)
    assert all(-1 <= parent < row for row, parent in enumerate(parents))
    assert [ROOT if p == ROOT else rows[p] for p in parents] == [tree.parent(node) for node in rows]


@given(seed=st.integers(0, 10**6), depth=st.integers(1, 4), num_nodes=st.integers(1, 12))
def test_rank_paths_give_the_static_tree(seed, depth, num_nodes):
    rng = random.Random(seed)
    rates = [sorted((rng.random() for _ in range(3)), reverse=True) for _ in range(3)]
    static = StaticTree(fit_tree(rates, 10))
    paths, tree, level = RankPaths(static), DynamicTree(num_nodes, 10), 0
    while tree.frontier and level < depth:
        ranks = paths.num_ranks(level)
        tokens = [range(ranks)] * len(tree.frontier)
        paths.add_children(tree, tokens, [[-9.0 * rng.random() for _ in range(ranks)] for _ in tokens])
        level += 1
    nodes, expected = tree.nodes(), static.within(depth, num_nodes)
    assert (nodes.token_ids, nodes.parents) == (expected.ranks, expected.parents)


def test_children_without_a_probability_are_left_out():
    tree = DynamicTree(8, 4)
    tree.add_children([[5, 6, 7]], [[-math.inf, math.nan, math.nan]])
    assert tree.frontier == []
    assert tree.nodes() == TreeNodes([], [], [])
    static, tree = RankPaths(StaticTree([(0,), (1,)])), DynamicTree(8, 4)
    static.add_children(tree, [[5, 5]], [[-1.0, -math.inf]])
    assert tree.nodes().token_ids == [5]


VOCAB = 40


def sequence(params, seed=3):
    return Sequence(0, [1, 2, 3], 3, 50, params, frozenset(), seed=seed)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_ranks_are_in_the_order_of_the_targets_rule(is_mapped):
    """Greedy, sampled and penalised rows of one batch, and the same logits ranked greedily alone."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(VOCAB, generator=generator)[:25].sort().values if is_mapped else torch.arange(VOCAB)
    ranker = TokenRanker(resolve(torch.device("cpu")), VOCAB, ids if is_mapped else None)
    logits = torch.randn(3, len(ids), generator=generator) * 3
    rules = [{}, {"temperature": 0.7}, {"temperature": 1.0, "repetition_penalty": 3.0}]
    sequences = [sequence(sd.SamplingParams(**rule)) for rule in rules]
    found = ranker(logits, sequences, [4, 4, 4], 2, 6)
    alone = ranker(logits[:1], sequences[:1], [4], 2, 6)
    assert found.token_ids[0] == alone.token_ids[0] == ids[logits[0].topk(6).indices].tolist()
    softmax = (logits[0] / GREEDY_TEMPERATURE).log_softmax(0).topk(6).values.tolist()
    assert alone.log_probs[0] == pytest.approx(softmax)
    assert found.log_probs[0] == pytest.approx(softmax), "whatever the rules of its neighbours"
    drawn = (logits[1].double() / 0.7) + gumbel_noise(VOCAB, 3, 5, logits.device)[ids]
    best = drawn.topk(6)
    assert found.token_ids[1] == ids[best.indices].tolist()
    assert found.log_probs[1] == pytest.approx(best.values.log_softmax(0).tolist())
    assert all(len(set(own)) == 6 for own in found.token_ids)


def test_ranks_beyond_the_vocabulary_have_no_probability():
    ranker = TokenRanker(resolve(torch.device("cpu")), VOCAB, torch.tensor([3, 9]))
    for rule in ({}, {"temperature": 1.0}):
        found = ranker(torch.zeros(1, 2), [sequence(sd.SamplingParams(**rule))], [4], 0, 6)
        finite = [i for i, v in zip(found.token_ids[0], found.log_probs[0], strict=True) if v > -math.inf]
        assert sorted(finite) == [3, 9]


def test_noise_of_tokens_is_that_of_the_whole_vocabulary():
    seeds, positions = torch.tensor([5, 2**40 + 3]), torch.tensor([7, 2**33 + 1])
    ids = torch.tensor([[0, 31, 2], [39, 8, 17]])
    found = gumbel(all_ops()["noise_words"].load("torch")(ids, seeds, positions))
    for row in range(2):
        whole = gumbel_noise(VOCAB, int(seeds[row]), int(positions[row]), ids.device)
        assert torch.equal(found[row], whole[ids[row]])
