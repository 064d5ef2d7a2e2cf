"""The oracle by itself: alignment, bytes moved, statistics of every step."""

from __future__ import annotations

import sys

import pytest
import torch

from specdec_fast import oracle
from specdec_fast.oracle.dense import DenseModel, RowMove, repad_in_python
from specdec_fast.oracle.exspec import choose_group
from specdec_fast.oracle.step import Row, StopRule
from support.demo import MAX_NEW_TOKENS
from support.invariants import TOLERANCE, dense_kv

eqspec_module = sys.modules["specdec_fast.oracle.eqspec"]  # the package exports the function of that name
LIMITS = StopRule(MAX_NEW_TOKENS, frozenset([1]))
LAYERS, KV_HEADS, HEAD_DIM = 4, 2, 32  # the demo target
DRAFT_LAYERS, DRAFT_KV_HEADS = 1, 1


def random_layers(columns, rows=3):
    return [(torch.randn(rows, 2, columns, 4), torch.randn(rows, 2, columns, 4)) for _ in range(2)]


@pytest.mark.parametrize(
    "shifts", [(2, 0, 1), (-1, 0, 3), (-2, -1, -3)], ids=["to the right", "both directions", "to the left"]
)
def test_repad_moves_every_entry(shifts):
    layers = random_layers(8)
    starts, lengths = (3, 2, 3), (2, 3, 4)
    moves = [RowMove(*move) for move in zip(starts, lengths, shifts, strict=True)]
    moved = repad_in_python(layers, moves, 10)
    for old, new in zip(layers, moved, strict=True):
        for before, after in zip(old, new, strict=True):
            assert after.shape == (3, 2, 10, 4)
            for row, move in enumerate(moves):
                first = move.start + move.shift
                content = before[row, :, move.start : move.start + move.length]
                assert torch.equal(after[row, :, first : first + move.length], content)
                assert after[row, :, :first].count_nonzero() == 0
                assert after[row, :, first + move.length :].count_nonzero() == 0


def test_nothing_moves_when_all_emit_the_same_number(target, draft, prompt_ids):
    """Target as its own draft, prompts of one length: every row emits K + 1 tokens in every step."""
    prompts = [ids[:9] for ids in prompt_ids[:3]]
    run = oracle.eqspec(target, target, prompts, StopRule(12), num_draft_tokens=3)
    assert [step.num_emitted for step in run.steps] == [[4, 4, 4]] * 3
    assert run.moved_bytes == 0
    assert all(step.equal_length for step in run.steps)


def test_moved_bytes_are_those_of_rows_with_a_shift(target, draft, prompt_ids):
    """Recomputed from the step records: shift = (L_new - L_old) - emitted; a row's KV is content - lag entries."""
    prompts = [prompt_ids[i] for i in (0, 2, 5, 8)]
    run = oracle.eqspec(target, draft, prompts, LIMITS)
    content = [len(prompt) for prompt in prompts]
    per_entry = {1: 2 * LAYERS * KV_HEADS * HEAD_DIM * 4, 2: 2 * DRAFT_LAYERS * DRAFT_KV_HEADS * HEAD_DIM * 4}
    for step in run.steps:
        new = [c + e for c, e in zip(content, step.num_emitted, strict=True)]
        growth = max(new) - max(content)
        moved = [n for n, e in zip(new, step.num_emitted, strict=True) if growth - e]
        assert step.moved_bytes == sum(max(0, n - lag) * size for n in moved for lag, size in per_entry.items())
        content = new
    assert run.moved_bytes > 0


def test_every_step_has_its_statistics(target, draft, prompt_ids):
    for run in (
        oracle.eqspec(target, draft, prompt_ids[:4], LIMITS),
        oracle.exspec(target, draft, prompt_ids, LIMITS, batch_size=4),
    ):
        emitted = sum(sum(step.num_emitted) for step in run.steps)
        assert emitted == sum(map(len, run.outputs)) == run.decoding.num_emitted_tokens
        for step in run.steps:
            assert {"draft", "verify", "accept", "commit", "realign"} <= set(step.seconds)
        for stage, total in run.timer.seconds.items():
            assert total == pytest.approx(sum(step.seconds.get(stage, 0.0) for step in run.steps))


@pytest.mark.parametrize("with_draft", [True, False], ids=["model", "ngram"])
def test_alignment_holds_after_every_step(target, draft, prompt_ids, monkeypatch, with_draft):
    """padding + content == L for every row, and each row's KV is that of its own committed tokens, less the lag."""
    rows_of_run, checked = [], []
    original_step, original_realign = eqspec_module.speculative_step, DenseModel.realign

    def step(rows, *args):
        rows_of_run[:] = rows
        return original_step(rows, *args)

    def realign(self, padding, shifts, num_columns, repad):
        moved = original_realign(self, padding, shifts, num_columns, repad)
        for i, row in enumerate(rows_of_run):
            new_padding = padding[i] + shifts[i]
            assert new_padding + len(row.token_ids) == num_columns
            kept = row.token_ids[: len(row.token_ids) - self.lag]
            if kept:
                layers = dense_kv(self.model, kept)
                recomputed = torch.stack([torch.stack(layer) for layer in layers])  # [layers, 2, n, heads, head_dim]
                cached = torch.stack([torch.stack([k[i], v[i]]) for k, v in self.layers]).transpose(2, 3)
                assert (cached[:, :, new_padding:] - recomputed).abs().max() < TOLERANCE
                checked.append(i)
        return moved

    monkeypatch.setattr(eqspec_module, "speculative_step", step)
    monkeypatch.setattr(DenseModel, "realign", realign)
    run = oracle.eqspec(target, draft if with_draft else None, prompt_ids[1:5], StopRule(12, frozenset([1])))
    assert len(checked) > 3 * len(run.steps)


def test_exspec_takes_equal_lengths_first():
    rows = [Row([0] * n, 1, LIMITS) for n in (5, 7, 6, 7)]
    assert choose_group(rows, 2) == [rows[1], rows[3]]
    assert choose_group(rows, 3) == rows[:3]


def test_exspec_realigns_only_unequal_groups(target, draft, prompt_ids):
    run = oracle.exspec(target, draft, prompt_ids, LIMITS, batch_size=2)
    assert {step.equal_length for step in run.steps} == {True, False}
    assert all(step.moved_bytes == 0 for step in run.steps if step.equal_length)


def test_finished_rows_of_eqspec_emit_nothing_and_keep_their_text(target, draft, prompt_ids, expected):
    chosen = [i for i in range(len(prompt_ids)) if len(expected[i]) in (10, MAX_NEW_TOKENS)][:3]
    run = oracle.eqspec(target, draft, [prompt_ids[i] for i in chosen], LIMITS)
    assert run.outputs == [expected[i] for i in chosen]
    assert any(0 in step.num_emitted for step in run.steps)


def test_a_wrong_shift_is_caught(target, draft, prompt_ids, expected, monkeypatch):
    """The negative control of the equivalence tests: entries one column off must change a text."""

    def one_column_off(layers, moves, num_columns):
        return [(k.roll(1, dims=2), v.roll(1, dims=2)) for k, v in repad_in_python(layers, moves, num_columns)]

    run = oracle.eqspec(target, draft, prompt_ids[:6], LIMITS, repad=one_column_off)
    assert run.outputs != expected[:6]


def test_prefill_leaves_the_newest_column_out(target, prompt_ids):
    model = DenseModel(target, lag=1)
    oracle.step.prefill(model, [Row(prompt_ids[0], len(prompt_ids[0]), LIMITS)])
    assert model.num_columns == len(prompt_ids[0]) - 1
