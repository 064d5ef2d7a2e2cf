"""The drafter ``"ngram"``: its incremental index proposes the tokens of the oracle's scan, at constant cost."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec_fast as sd
from specdec_fast import oracle
from specdec_fast.drafters import DRAFTERS
from specdec_fast.drafters.ngram.drafter import NgramDrafter, NgramIndex
from specdec_fast.oracle.prompt_lookup import prompt_lookup
from support.demo import MAX_NEW_TOKENS
from support.grids import each_value_once, grid

PARAMS = sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS)


@pytest.mark.parametrize(
    ("token_ids", "num_draft_tokens", "proposal"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 9, [9, 1, 2, 3]),  # no more tokens follow the copy
        ([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], 1, [9]),  # the latest of two copies
        ([1, 2, 3, 8, 7, 2, 3, 9, 1, 2, 3], 1, [8]),  # a copy of three tokens before a later copy of two
        ([2, 3, 8, 3, 9, 2, 3], 1, [8]),  # a copy of two tokens before a later copy of one
        ([3, 8, 4, 3], 2, [8, 4]),
        ([5, 5], 3, [5]),
        ([5, 5, 5, 5, 5], 3, [5]),  # the copy overlaps the ending
        ([4, 5, 4, 5, 4, 5], 4, [4, 5]),
        ([1, 2, 3], 3, []),
        ([7], 3, []),
    ],
)
def test_proposals_by_hand(token_ids, num_draft_tokens, proposal):
    assert prompt_lookup(token_ids, num_draft_tokens) == proposal
    assert NgramIndex().propose(token_ids, num_draft_tokens) == proposal


def assert_agrees(tokens: list[int], lengths: list[int], num_draft_tokens: int) -> None:
    """Look up prefixes of ``tokens`` with one index; compare each proposal with the oracle's."""
    index, committed = NgramIndex(), []
    for length in lengths:
        committed += tokens[len(committed) : length]
        assert index.propose(committed, num_draft_tokens) == prompt_lookup(committed, num_draft_tokens), committed


@pytest.mark.parametrize(("num_words", "length"), [(1, 9), (2, 11), (3, 7)])
def test_every_short_stream_token_by_token(num_words, length):
    for tokens in product(range(num_words), repeat=length):
        assert_agrees(list(tokens), list(range(1, length + 1)), 3)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=80),
    st.lists(st.integers(1, 80), min_size=1, max_size=12, unique=True),
    st.integers(1, 9),
)
@settings(max_examples=200)
def test_streams_that_grow_by_any_number_of_tokens(tokens, lengths, num_draft_tokens):
    assert_agrees(tokens, sorted(min(length, len(tokens)) for length in lengths), num_draft_tokens)


class Compared(NgramDrafter):
    """Compares every proposal of a run with the oracle's; proposes for a sequence in some of its steps only."""

    skipped_steps: tuple[int, ...] = ()
    num_proposed = num_compared = 0

    def propose(self, sequences, limits):
        limits = [
            0 if sequence.stats.num_steps % 5 in self.skipped_steps else limit
            for sequence, limit in zip(sequences, limits, strict=True)
        ]
        draft = super().propose(sequences, limits)
        proposals = draft.token_ids.split(draft.num_draft_tokens)
        for sequence, limit, proposal in zip(sequences, limits, proposals, strict=True):
            assert proposal.tolist() == (prompt_lookup(sequence.token_ids, limit) if limit else [])
            self.num_compared += limit > 0
            self.num_proposed += len(proposal)
        return draft


@each_value_once
@pytest.mark.parametrize(("method", "batch_size"), [("eqspec", 3), ("exspec", 4), ("exspec", 1)])
@pytest.mark.parametrize(("num_draft_tokens", "skipped_steps"), [(1, ()), (4, ()), (4, (0, 2, 3))])
def test_whole_runs(monkeypatch, target, prompt_ids, expected, method, batch_size, num_draft_tokens, skipped_steps):
    monkeypatch.setitem(DRAFTERS, "ngram", Compared)
    engine = sd.Engine(target, "ngram", method=method, max_batch_size=batch_size, num_draft_tokens=num_draft_tokens)
    engine.drafter.skipped_steps = skipped_steps
    outputs = engine.generate(prompt_ids[::2], PARAMS)
    assert [output.token_ids for output in outputs] == expected[::2]
    assert engine.drafter.num_compared > engine.drafter.num_proposed / num_draft_tokens > 0
    assert not engine.drafter.indexes, "released sequences leave nothing behind"


@pytest.mark.parametrize("num_draft_tokens", grid([1, 5], keep=[5]))
def test_steps_are_those_of_the_oracle(target, prompt_ids, num_draft_tokens):
    """The same proposals are accepted: each sequence needs as many steps as in the dense reference."""
    engine = sd.Engine(target, "ngram", num_draft_tokens=num_draft_tokens, max_batch_size=1)
    for prompt in prompt_ids[:4]:
        (output,) = engine.generate([prompt], PARAMS)
        first, *later = output.token_ids  # the engine drafts after the first token
        limits = oracle.StopRule(MAX_NEW_TOKENS - 1, frozenset(engine.target.eos_token_ids))
        run = oracle.eqspec(target, None, [[*prompt, first]], limits, num_draft_tokens)
        assert run.outputs == [later]
        assert 1 + len(run.steps) == output.stats.num_steps


def test_interrupted_call_drops_its_indexes(target, prompt_ids):
    engine = sd.Engine(target, "ngram", max_batch_size=2)
    stream = engine.stream(prompt_ids, PARAMS)
    while not engine.drafter.indexes:  # until it drafts for a text
        next(stream)
    stream.close()
    assert not engine.drafter.indexes


class Counted(list):
    """Counts how many of its tokens are read."""

    num_read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):
        raise AssertionError("the whole list is read")


def test_a_step_reads_new_tokens_only():
    generator = torch.Generator().manual_seed(0)
    tokens = Counted(torch.randint(7, (4000,), generator=generator).tolist())
    index = NgramIndex()
    index.propose(tokens, 4)
    reads = []
    for token in torch.randint(7, (50,), generator=generator).tolist():
        tokens.append(token)
        before = tokens.num_read
        index.propose(tokens, 4)
        reads.append(tokens.num_read - before)
    new, looked_up, proposed = 3 + 2 + 1, 3 + 2 + 1, 4
    assert max(reads) <= new + looked_up + proposed


@given(st.lists(st.integers(0, 3), max_size=60))
@settings(max_examples=50)
def test_memory_is_three_entries_a_token(tokens):
    index = NgramIndex()
    for length in range(1, len(tokens) + 1):
        index.propose(tokens[:length], 1)
    assert sum(map(len, index.tables.values())) <= 3 * len(tokens)
