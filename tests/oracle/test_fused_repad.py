"""The oracle's repad by the op ``realign_kv_``: the same outputs, bytes and cache as its Python loops."""

from __future__ import annotations

import pytest
import torch

from specdec_fast import oracle
from specdec_fast.ops import all_ops
from specdec_fast.oracle.dense import DenseModel, RowMove, repad_in_place, repad_in_python
from specdec_fast.oracle.step import StopRule
from support.demo import MAX_NEW_TOKENS
from support.grids import each_value_once, grid

LIMITS = StopRule(MAX_NEW_TOKENS, frozenset([1]))
OP = all_ops()["realign_kv_"]


@pytest.fixture(params=["torch", "cpp"])
def fused(request):
    reason = OP.why_unavailable(request.param)
    if reason is not None:
        pytest.skip(reason)
    return repad_in_place(OP.load(request.param))


def run_eqspec(target, draft, prompts, repad):
    return oracle.eqspec(target, draft, prompts, LIMITS, repad=repad)


def run_exspec(target, draft, prompts, repad):
    return oracle.exspec(target, draft, prompts, LIMITS, batch_size=3, repad=repad)


# A prompt of one or two tokens is a row that keeps no entry at all, beside one of 90.
@each_value_once
@pytest.mark.parametrize("chosen", [slice(8, 13), slice(2, 8)], ids=["prose", "one_and_two_tokens"])
@pytest.mark.parametrize("run", [run_eqspec, run_exspec])
def test_same_outputs_and_bytes_as_python(run, target, draft, prompt_ids, expected, fused, chosen):
    got = run(target, draft, prompt_ids[chosen], fused)
    reference = run(target, draft, prompt_ids[chosen], repad_in_python)
    assert got.outputs == reference.outputs == expected[chosen]
    assert [step.moved_bytes for step in got.steps] == [step.moved_bytes for step in reference.steps]
    assert got.moved_bytes > 0


@pytest.mark.grid
@pytest.mark.parametrize("run", [run_eqspec, run_exspec])
def test_same_cache_after_every_realignment(run, target, draft, prompt_ids, monkeypatch, fused):
    """Bit for bit, in every column that a row holds, of both models."""
    assert kept_columns(run, target, draft, prompt_ids[:6], monkeypatch, fused) == kept_columns(
        run, target, draft, prompt_ids[:6], monkeypatch, repad_in_python
    )


def kept_columns(run, target, draft, prompts, monkeypatch, repad):
    """Return the bytes of every row after each realignment."""
    snapshots = []
    original = DenseModel.realign

    def realign(self, padding, shifts, num_columns, repad):
        moved = original(self, padding, shifts, num_columns, repad)
        for row, (before, shift) in enumerate(zip(padding, shifts, strict=True)):
            held = [t[row, :, before + shift :].contiguous() for layer in self.layers for t in layer]
            snapshots.append([t.numpy().tobytes() for t in held])
        return moved

    with monkeypatch.context() as patch:
        patch.setattr(DenseModel, "realign", realign)
        run(target, draft, prompts, repad)
    assert len(snapshots) > len(prompts)
    return snapshots


def test_result_is_views_of_the_given_layers(fused):
    layers = [(torch.randn(3, 2, 8, 4), torch.randn(3, 2, 8, 4)) for _ in range(2)]
    moved = fused(layers, [RowMove(3, 2, 2), RowMove(2, 3, -1), RowMove(9, 0, 5)], 7)
    for old, new in zip(layers, moved, strict=True):
        for before, after in zip(old, new, strict=True):
            assert after.shape == (3, 2, 7, 4)
            assert after.data_ptr() == before.data_ptr()


@pytest.mark.parametrize("run", grid([run_eqspec, run_exspec], keep=[run_exspec]))
def test_an_op_that_moves_nothing_is_caught(run, target, draft, prompt_ids, expected):
    """The negative control: rows left where they were must change a text."""
    wrong = repad_in_place(lambda layers, starts, lengths, shifts: None)
    assert run(target, draft, prompt_ids[:6], wrong).outputs != expected[:6]
