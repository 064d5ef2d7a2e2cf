"""The drafter ``"ngram-trie"``: its trees are those of a scan, and begin with what ``ngram`` proposes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec_fast as sd
from specdec_fast.drafters.ngram.trie import trie
from specdec_fast.drafters.ngram.trie_drafter import CopyIndex, NgramTrieDrafter
from specdec_fast.oracle.prompt_lookup import prompt_lookup
from support.demo import MAX_NEW_TOKENS

PARAMS = sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS)


def continuations_by_scan(tokens, num_tokens):
    """What follows each place where the last n tokens stand earlier: n from 3 to 1, later places first, 16 at most."""
    found = []
    for n in (3, 2, 1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :] and end not in found:
                found.append(end)
    return [tokens[end : end + num_tokens] for end in found[:16]]


def texts_of(proposals, max_nodes):
    """The nodes of a tree as the texts that they end: beginnings of the proposals, until there are enough."""
    found = []
    for proposal in proposals:
        for length in range(1, len(proposal) + 1):
            text = tuple(proposal[:length])
            if text in found:
                continue
            if len(found) == max_nodes:
                break
            found.append(text)
    return found


def texts_in(tokens, parents):
    texts = []
    for token, parent in zip(tokens, parents, strict=True):
        texts.append((*(texts[parent] if parent >= 0 else ()), token))
    return texts


def is_depth_first(parents):
    """Whether every node follows its parent, or a descendant of one of its parent's other children."""
    open_nodes = [-1]
    for node, parent in enumerate(parents):
        while open_nodes and open_nodes[-1] != parent:
            open_nodes.pop()
        if not open_nodes:
            return False
        open_nodes.append(node)
    return True


@pytest.mark.parametrize(
    ("proposals", "max_nodes", "tokens", "parents"),
    [
        ([[1, 2, 3]], 9, [1, 2, 3], [-1, 0, 1]),
        ([[1, 2], [1, 3]], 9, [1, 2, 3], [-1, 0, 0]),
        ([[1, 2], [4], [1, 3]], 9, [1, 2, 3, 4], [-1, 0, 0, -1]),  # depth first, children as they were named
        ([[1, 2], [4, 5], [1, 3]], 3, [1, 2, 4], [-1, 0, -1]),  # full within a proposal
        ([[1, 2], [3]], 1, [1], [-1]),
        ([[1], [1, 2]], 2, [1, 2], [-1, 0]),
        ([[], [5]], 4, [5], [-1]),
        ([], 4, [], []),
        ([[1]], 0, [], []),
    ],
)
def test_tries_by_hand(proposals, max_nodes, tokens, parents):
    assert trie(proposals, max_nodes) == (tokens, parents)


@settings(max_examples=150)
@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=12), st.integers(0, 20))
def test_a_trie_has_the_beginnings_of_its_proposals(proposals, max_nodes):
    tokens, parents = trie(proposals, max_nodes)
    texts = texts_in(tokens, parents)
    assert len(set(texts)) == len(texts), "equal siblings"
    assert set(texts) == set(texts_of(proposals, max_nodes))
    assert is_depth_first(parents)
    assert all(-1 <= parent < node for node, parent in enumerate(parents))


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=80),
    st.lists(st.integers(1, 80), min_size=1, max_size=12, unique=True),
    st.integers(1, 6),
)
def test_continuations_are_those_of_a_scan(tokens, lengths, num_tokens):
    """The list grows by any number of tokens between two look-ups."""
    index, committed = CopyIndex(), []
    for length in sorted(min(length, len(tokens)) for length in lengths):
        committed += tokens[len(committed) : length]
        found = index.continuations(committed, num_tokens)
        assert found == continuations_by_scan(committed, num_tokens)
        assert (found[0] if found else []) == prompt_lookup(committed, num_tokens), "the first is what ngram proposes"


class Compared(NgramTrieDrafter):
    """Compares every tree of a run with the scan's, and nodes with their limit."""

    num_branches = 0

    def propose_trees(self, sequences, limits, node_limits):
        draft = super().propose_trees(sequences, limits, node_limits)
        trees = zip(
            draft.token_ids.split(draft.num_draft_tokens), draft.parents.split(draft.num_draft_tokens), strict=True
        )
        for sequence, limit, most, (tokens, parents) in zip(sequences, limits, node_limits, trees, strict=True):
            proposals = continuations_by_scan(sequence.token_ids, limit) if limit else []
            texts = texts_in(tokens.tolist(), parents.tolist())
            assert set(texts) == set(texts_of(proposals, most))
            self.num_branches += (parents == -1).sum().item() > 1
        return draft


@pytest.mark.parametrize(("batch_size", "max_nodes"), [(1, 16), (4, 5)])
def test_whole_runs(target, prompt_ids, expected, batch_size, max_nodes):
    engine = sd.Engine(target, "ngram-trie", max_batch_size=batch_size, num_draft_tokens=4)
    engine.core.drafter = drafter = Compared(type("Context", (), {"device": torch.device("cpu")}), max_nodes)
    outputs = engine.generate(prompt_ids, PARAMS)
    assert [output.token_ids for output in outputs] == expected
    assert drafter.num_branches
    assert not drafter.indexes, "released sequences leave nothing behind"


def test_trees_hold_more_than_chains(target, prompt_ids, expected):
    steps = {}
    for draft in ("ngram", "ngram-trie"):
        outputs = sd.generate(target, draft, prompt_ids, PARAMS)
        assert [output.token_ids for output in outputs] == expected
        steps[draft] = [output.stats.num_steps for output in outputs]
    assert sum(steps["ngram-trie"]) < sum(steps["ngram"])


def test_a_model_without_trees_is_refused_when_the_engine_is_made(target, monkeypatch):
    monkeypatch.setattr("specdec_fast.ops.registry.Ops.has_trees", lambda self, op: False)
    with pytest.raises(sd.NotYetSupportedError, match="verifies no trees of draft tokens: attention by"):
        sd.Engine(target, "ngram-trie")
    sd.Engine(target, "ngram")
