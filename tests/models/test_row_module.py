"""Functions of rows, such as the layers of drafters: a program computes what PyTorch computes, or PyTorch does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.program import RowFunction
from specdec_fast.program.executors import Projection, TokenChoice
from specdec_fast.runner.row_module import RowModule
from support.lazy_signs import negative_view
from support.programs import needs_programs
from support.row_modules import OPS, VOCAB, WIDTH, function_of, pool_of


@needs_programs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_program_computes_what_pytorch_computes(dtype):
    function, found = function_of(dtype), []
    for enforce_eager in (False, True):
        module, pool, results = RowModule(function, OPS, 16, enforce_eager), pool_of(function), []
        assert (module.program is None) == enforce_eager
        assert module.why_no_program == ("enforce_eager=True" if enforce_eager else None)
        for rows in ([Rows("a", 0, 5), Rows("b", 0, 20)], [Rows("a", 5, 1), Rows("b", 18, 3), Rows("c", 0, 2)]):
            batch = lay_out(pool, rows, torch.arange(sum(each.count for each in rows)) % VOCAB)
            carried = torch.linspace(-1, 1, len(batch.token_ids) * WIDTH).view(-1, WIDTH).to(dtype)
            results += module(pool, batch, carried, None)
            results += module(pool, batch, carried, batch.last_rows)
            results.append(module(pool, batch, carried, batch.last_rows[:0])[1])
        found.append(results)
    for own, other in zip(*found, strict=True):
        assert own.shape == other.shape
        torch.testing.assert_close(own.float(), other.float(), rtol=0, atol=32 * torch.finfo(dtype).eps)


@needs_programs
def test_a_program_drafts_what_its_forwards_choose():
    function = function_of()
    module, pool, other = RowModule(function, OPS, 16), pool_of(function), pool_of(function)
    rows, counts = [Rows("a", 0, 4), Rows("b", 0, 1), Rows("c", 0, 2)], [3, 1, 6]
    token_ids, carried = [3, 1, 4, 1, 5, 9, 2], torch.linspace(-1, 1, 7 * WIDTH).view(7, WIDTH)
    ids = torch.tensor([1, 5, 6, 7, 11, 13, 17, 20, 23, 28])
    for choice in (TokenChoice(VOCAB, None), TokenChoice(11, None), TokenChoice(len(ids), None, ids, VOCAB)):
        drafted = module.draft(pool, rows, token_ids, carried, counts, choice).split(counts)
        for row, own, first in zip(rows, drafted, (0, 4, 5), strict=True):
            tokens, hidden = token_ids[first : first + row.count], carried[first : first + row.count]
            for ahead, token in enumerate(own.tolist()):
                span = Rows(row.owner, row.start if ahead == 0 else row.start + row.count - 1 + ahead, len(tokens))
                logits, hidden = module(other, lay_out(other, [span], torch.tensor(tokens)), hidden, None)
                best = int(logits[-1, : choice.vocab_size].argmax())
                assert token == (best if choice.target_ids is None else int(ids[best]))
                tokens, hidden = [token], hidden[-1:]


@needs_programs
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda hidden, batch: hidden + torch.erfinv(hidden * 0), "erfinv"),
        (lambda hidden, batch: hidden.flip(0), "flip"),
        (lambda hidden, batch: hidden.cumsum(0), "cumsum"),
        (lambda hidden, batch: hidden * len(batch.token_ids), "two batches are not computed in the same way"),
        (lambda hidden, batch: hidden[5], "picked out of the batch"),
    ],
    ids=["operation", "order", "sum", "count", "row"],
)
def test_what_no_program_expresses_is_run_by_pytorch(spoil, reason):
    module = RowModule(function_of(spoil=spoil), OPS, 16)
    assert module.program is None
    assert reason in module.why_no_program


@needs_programs
def test_a_function_keeps_to_its_pages_and_its_batch():
    own = function_of()
    other = pool_of(own)

    def on_other_pages(ops, pool, batch, carried, logit_rows):
        return own.run(ops, other, batch, carried, logit_rows)

    def in_own_layout(ops, pool, batch, carried, logit_rows):
        return own.run(ops, pool, replace(batch, tree_mask=None), carried, logit_rows)

    def in_place(ops, pool, batch, carried, logit_rows):
        carried[:, :3].copy_(carried[:, 3:6])
        return own.run(ops, pool, batch, carried, logit_rows)

    for run, reason in (
        (on_other_pages, "pages of another pool"),
        (in_own_layout, "in a layout of the model's own"),
        (in_place, "overwritten"),
    ):
        module = RowModule(RowFunction(run, own.layout, WIDTH, WIDTH), OPS, 16)
        assert module.program is None
        assert reason in module.why_no_program


@needs_programs
def test_a_projection_of_rows_without_bytes_is_refused(monkeypatch):
    """No program has such rows, but the extension would divide by their size."""
    function, carried = function_of(), torch.zeros(2, WIDTH)
    module, pool, choice = RowModule(function, OPS, 16), pool_of(function), TokenChoice(VOCAB, None)
    monkeypatch.setattr(
        type(module.program),
        "_carried",
        lambda self, inputs, num_rows: (0, 4 * WIDTH, self._program, 0, [(inputs.data_ptr(), num_rows)]),
    )
    with pytest.raises(ValueError, match="a projection takes rows of 0 bytes"):
        module.draft(pool, [Rows("a", 0, 2)], [1, 2], carried, [1], choice)


@needs_programs
def test_inputs_of_another_size_are_refused():
    function = function_of()
    module, pool, choice = RowModule(function, OPS, 16), pool_of(function), TokenChoice(VOCAB, None)
    rows, carried = [Rows("a", 0, 2)], torch.zeros(2, WIDTH)
    for inputs, message in (
        (carried[:1], "2 rows take"),
        (carried.double(), "2 rows take"),
        (torch.zeros(WIDTH, 2).t(), "not contiguous"),
        (Projection(module.program, [carried]), "has KV entries"),
    ):
        with pytest.raises(ValueError, match=message):
            module.draft(pool, rows, [1, 2], inputs, [1], choice)
    with pytest.raises(ValueError, match=f"chosen from {VOCAB + 1} ids, but a row has {VOCAB} logits"):
        module.draft(pool, rows, [1, 2], carried, [1], TokenChoice(VOCAB + 1, None))
    assert len(module.draft(pool, rows, [1, 2], carried, [1], choice)) == 1
    with pytest.raises(ValueError, match="2 spans of 3 rows"):
        module.draft(pool, [Rows("a", 0, 2), Rows("b", 0, 1)], [1, 2], carried, [1, 1], choice)


@needs_programs
def test_inputs_have_the_sign_that_they_show():
    function, results = function_of(), []
    carried = torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)
    for inputs in (carried, negative_view(carried)):
        module, pool = RowModule(function, OPS, 16), pool_of(function)
        results.append(module(pool, lay_out(pool, [Rows("a", 0, 5)], torch.arange(5)), inputs, None)[0])
    assert torch.equal(*results)
    with pytest.raises(ValueError, match="a lazy negative view"):
        module.draft(pool, [Rows("b", 0, 5)], [1] * 5, inputs, [2], TokenChoice(VOCAB, None))


@needs_programs
def test_a_constant_with_lazy_signs_has_no_program():
    """A program would read its memory; and the op of a forward in PyTorch says what to do."""
    function, sinks = function_of(), negative_view(torch.ones(4))

    def run(ops, pool, *others):
        def attention(query, kv, batch, params):
            return ops.paged_attention(query, kv, batch, replace(params, sinks=sinks))

        return function.run(ops.replaced(paged_attention=attention), pool, *others)

    module, pool = RowModule(replace(function, run=run), OPS, 16), pool_of(function)
    assert not module.has_program
    assert "a lazy negative view" in module.why_no_program
    batch = lay_out(pool, [Rows("a", 0, 5)], torch.arange(5))
    with pytest.raises(ValueError, match="sinks is a lazy negative view"):
        module(pool, batch, torch.ones(5, WIDTH), None)
