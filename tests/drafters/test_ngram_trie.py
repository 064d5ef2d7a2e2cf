"""The drafter ``"ngram-trie"``: its trees are those of a scan, and begin with what ``ngram`` proposes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec_fast as sd
from specdec_fast.drafters.ngram.trie_drafter import CopyIndex, NgramTrieDrafter
from specdec_fast.oracle.prompt_lookup import prompt_lookup
from specdec_fast.trees.parents import ROOT
from support.demo import MAX_NEW_TOKENS
from support.trees import beginnings_of, paths_of, trees_of

PARAMS = sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS)


def continuations_by_scan(tokens, num_tokens):
    """What follows each place where the last n tokens stand earlier: n from 3 to 1, later places first, 16 at most."""
    found = []
    for n in (3, 2, 1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :] and end not in found:
                found.append(end)
    return [tokens[end : end + num_tokens] for end in found[:16]]


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
        for sequence, limit, most, own in zip(sequences, limits, node_limits, trees_of(draft), strict=True):
            proposals = continuations_by_scan(sequence.token_ids, limit) if limit else []
            assert set(paths_of(*own)) == set(beginnings_of(proposals, most))
            self.num_branches += own[1].count(ROOT) > 1
        return draft


@pytest.mark.parametrize(("batch_size", "max_nodes"), [(1, 16), (4, 5)])
def test_whole_runs(target, prompt_ids, expected, batch_size, max_nodes):
    engine = sd.Engine(target, "ngram-trie", max_batch_size=batch_size, num_draft_tokens=4)
    engine.core.drafting.drafter = drafter = Compared(type("Context", (), {"device": torch.device("cpu")}), max_nodes)
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
