"""A drafter that runs out of memory after a step: the tokens of the step stand, and it admits the sequences again."""

from __future__ import annotations

import pytest

import specdec_fast as sd
from support.eagle3 import write_checkpoint
from support.grids import each_value_once
from support.mixed_batch import PARAMS, PROMPTS, outputs_of
from support.models import tiny_model, truncated_copy

FAILING = {2, 3, 9}  # calls of commit


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama")


@each_value_once
@pytest.mark.parametrize("kind", ["model", "eagle3", "ngram"])
@pytest.mark.parametrize("works_first", [False, True])
def test_a_commit_without_memory_changes_no_output(target, tmp_path, monkeypatch, kind, works_first):
    write_checkpoint(tmp_path, target, draft_vocab_size=60)
    draft = {"model": truncated_copy(target, 2), "eagle3": f"eagle3:{tmp_path}", "ngram": "ngram"}[kind]
    expected, _ = outputs_of(target, None)
    engine, num_calls = sd.Engine(target, draft, max_batch_size=4), 0
    original = engine.drafter.commit

    def commit(sequences, result):
        nonlocal num_calls
        num_calls += 1
        if num_calls not in FAILING or works_first:
            original(sequences, result)
        if num_calls in FAILING:
            raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(engine.drafter, "commit", commit)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [(o.raise_for_error().token_ids, o.logprobs) for o in outputs] == expected
    assert num_calls > max(FAILING)
    assert engine.last_run.num_out_of_memory == len(FAILING)
    assert engine.last_run.decoding.num_draft_tokens > 0
    assert engine.core.pool.is_vacant


def test_another_error_in_commit_is_the_callers(target, monkeypatch):
    engine = sd.Engine(target, "ngram")

    def commit(sequences, result):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(engine.drafter, "commit", commit)
    with pytest.raises(RuntimeError, match="a mistake"):
        engine.generate(PROMPTS, PARAMS)
