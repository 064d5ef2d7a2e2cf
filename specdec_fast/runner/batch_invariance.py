"""Batch invariance: by construction, a row of a forward has the same bits whatever the other rows.

Kernels are deterministic, but a library chooses another order of summation for another number of rows, and then a
near-tie between two logits flips. A forward program (``program/``) computes each row by itself. If PyTorch runs a
model,

* linears are computed in chunks of sizes with the same order of sums (``row_counts.py``),
* attention gets each row as a sequence of its own, unless the chosen implementation reduces each row by itself,
* all other operations depend on one row at a time, which is checked operation by operation (``row_mixing.py``); they
  are computed on one thread and on a multiple of 64 rows, so that no element is left after the last full vector.

If an operation of a model mixes rows, the model is computed one row at a time. None of this depends on batch size or K,
so all engines over one model have the same bits. A run of the whole model checks the construction. If a program of
launches fails it, PyTorch runs the model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RowPadding, Rows
from specdec_fast.errors import DeterminismError
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.probe import PROBE_LENGTH
from specdec_fast.models.row_mixing import RowMixing, sizes_of_rows
from specdec_fast.runner.ragged_model import MAX_PREFILL_ROWS, RaggedModel

# PyTorch's loops on a CPU process so many elements at once: two vectors of the narrowest numbers in the widest
# registers. On CUDA, a mean over features has another order at 1, 2, 4 and 8 rows.
ROW_MULTIPLE = 64
_LARGEST_OF_PROGRAM = 512  # rows of a prefill forward
_OTHER_BITS = "rows had other bits in another batch"
_TEXT = 80  # tokens of the text that the model computes in several ways
_OTHER = 32  # tokens of another sequence
_NUM_OTHERS = 3  # such sequences


def make_deterministic(model: RaggedModel) -> None:
    """Set the cheapest RowPadding with which a row's bits depend on its sequence alone, or raise DeterminismError."""
    for row_padding in _candidates(model):
        if _reproduces(model, row_padding):
            model.row_padding = row_padding
            return
        model.why_one_by_one = _OTHER_BITS
    raise DeterminismError(
        f"{model.name} in {model.layout.dtype} on {model.layout.device} does not give one text the same bits in every "
        "batch, not even one row at a time; pass deterministic=False: at a near-tie, another batch may then emit "
        "another token."
    )


def _candidates(model: RaggedModel) -> Iterator[RowPadding]:
    if model.has_program:
        yield RowPadding(1, _LARGEST_OF_PROGRAM)
        if model.program is not None:
            return
        _run_in_pytorch(model)
    attend_per_row = not model.ops.is_invariant("paged_attention")
    model.why_one_by_one = _why_mixing(model)
    if model.why_one_by_one is None:
        yield RowPadding(ROW_MULTIPLE, MAX_PREFILL_ROWS, attend_per_row)
    yield RowPadding(1, MAX_PREFILL_ROWS, one_by_one=True)


def _run_in_pytorch(model: RaggedModel) -> None:
    """Drop a program of launches whose rows have other bits in another batch; check PyTorch's forward in its place."""
    model.use_programs(None, None)
    model.why_no_program = _OTHER_BITS
    probe = _tokens(0, model.vocab_size)[:PROBE_LENGTH].to(model.layout.device)
    dense = model.hf.dense_logits(probe)
    model.check_logits(probe, dense)


def _why_mixing(model: RaggedModel) -> str | None:
    """Return what mixes rows in ``model``, or None. If necessary, let the model intercept all its linears."""
    counts = sizes_of_rows(model.model, most=min(_TEXT, model.max_positions or _TEXT))
    if counts is None:
        return "nearly every number of rows that could be tried divides one of its sizes"
    mixing = None
    for model.hf.linears.sees_all in (False, True):
        mixing = _mixing(model, *counts)
        if mixing is None:
            return None
    model.hf.linears.sees_all = False
    return mixing


def _mixing(model: RaggedModel, num_rows: int, num_logits: int) -> str | None:
    pool = PagePool(model.layout, 2 * (num_rows + model.page_size), model.page_size, RowPadding())
    spans = [Rows("a", 0, num_rows - 6), Rows("b", 0, 6)]
    for owner in "ab":
        pool.add(owner)
    token_ids = _tokens(0, model.vocab_size)[:num_rows].to(model.layout.device)
    logit_rows = torch.arange(num_logits, device=model.layout.device)
    with RowMixing((num_rows, num_logits)) as watched:
        model.forward(lay_out(pool, spans, token_ids), pool, logit_rows)
    return watched.mixing_op


def _reproduces(model: RaggedModel, row_padding: RowPadding) -> bool:
    """Return whether the whole model gives one text the same logits in every way of computing it.

    One row at a time, all ways are the same slow forwards, so a short text, computed twice, suffices.
    """
    text = _OTHER if row_padding.one_by_one else _TEXT
    length, other = (min(n, model.max_positions or n) for n in (text, _OTHER))
    crowd = [Rows(f"other {i}", 0, other) for i in range(_NUM_OTHERS)]
    pieces = [[Rows("other 0", 0, 5), Rows("text", 0, length // 2)]]
    start = length // 2
    beside = 5
    for wanted in (1, 6, 1, 2, 9, 1, 4, length):  # rows of plain decoding, of verifications, of prefill
        if count := min(wanted, length - start):
            pieces.append([Rows("text", start, count), *([Rows("other 0", beside, 1)] if beside < other else [])])
        start = start + count
        beside = beside + 1
    whole = Rows("text", 0, length)
    decoded = [[Rows("text", i, 1)] for i in range(min(4, length))]
    after = [[Rows("text", 4, length - 4)]] if length > 4 else []
    ways = [pieces] if row_padding.one_by_one else [[*decoded, *after], pieces, [[*crowd, whole]]]
    expected = _logits(model, row_padding, [[whole]])
    return all(_same(_logits(model, row_padding, way), expected) for way in ways)


def _same(first: Tensor, second: Tensor) -> bool:
    """Compare logits number by number; a model whose weights hold a NaN gives the same NaN in every batch."""
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _logits(model: RaggedModel, row_padding: RowPadding, forwards: list[list[Rows]]) -> Tensor:
    """Compute the forwards one after the other; return the logits of the owner called text, ``[n, vocab_size]``."""
    owners = {owner: 0 for spans in forwards for owner, *_ in spans}
    pool = PagePool(model.layout, len(owners) * (_TEXT + model.page_size), model.page_size, row_padding)
    for number, owner in enumerate(sorted(owners, key=str, reverse=True)):  # the text is number 0 in every way
        pool.add(owner)
        owners[owner] = number
    of_text = []
    for spans in forwards:
        ids = [_tokens(owners[owner], model.vocab_size)[start : start + count] for owner, start, count, _ in spans]
        token_ids = torch.cat(ids).to(model.layout.device)
        logits = model.forward(lay_out(pool, spans, token_ids), pool)
        pieces = logits.split([each.count for each in spans])
        of_text += [piece for piece, (owner, *_) in zip(pieces, spans, strict=True) if owner == "text"]
    return torch.cat(of_text)


def _tokens(seed: int, vocab_size: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randint(vocab_size, (_TEXT,), generator=generator, device="cpu")
