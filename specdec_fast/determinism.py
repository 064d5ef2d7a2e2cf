"""Row-count invariance: which row counts give every row of a forward the same bits, found by trying.

Kernels are deterministic, but a library chooses another order of summation for another number of rows, and a near-tie
between two logits then flips. So forwards are padded to row counts at which it does not: a multiple of a few rows, or,
should no multiple do, one fixed count. What holds depends on the model, its dtype, the machine and the number of
threads, so it is probed, not assumed. A forward program (``program/``) computes every row by itself and needs none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from specdec_fast.errors import DeterminismError
from specdec_fast.kv_cache import PagePool
from specdec_fast.models import RaggedModel
from specdec_fast.rows import RowRule, Rows

# Four at least: elementwise functions (sine, exponential) take a tensor's last, partial vector from another function
# with another last bit, and no probe is long enough to see it in bf16. Four rows of eight numbers leave none over.
_MULTIPLES = (4, 8, 16, 32, 64)
_LARGEST = 512  # rows of a forward, unless a verification needs more
_COMPARED = 64  # rows whose bits are compared; all of a smaller count
_TEXT = 12  # tokens of the text that the whole model computes in several ways
_FILLER, _MOST_FILLED = 32, 128  # tokens of a neighbour; rows of the largest forward of the whole model

Spans = list[tuple[str, int, int]]  # owner, start, count
# What was found for a linear, by all that it depends on: engines are made again and again for the same models.
_found: dict[tuple[object, ...], bool] = {}


def make_deterministic(model: RaggedModel, most_rows: int) -> None:
    """Find the cheapest RowRule under which each row's bits depend on nothing but its own sequence, and set it.

    Every kind of linear layer is run at many row counts, and its rows compared with those of the largest count; then
    the whole model computes one text token by token, at once, in pieces and beside others.

    Args:
        model: its ``row_rule`` is set; pools made for it pad by that rule.
        most_rows: rows of the largest verification or drafting forward.

    Raises:
        DeterminismError: no rule holds on this machine.

    """
    for rule in _candidates(most_rows, computes_row_by_row=model.program is not None):
        if all(_is_invariant(linear, rule) for linear in _linears(model)) and _reproduces(model, rule):
            model.row_rule = rule
            return
    raise DeterminismError(
        f"no row count gives {model.name} in {model.layout.dtype} on {model.layout.device} the same bits in every "
        f"batch (multiples of {', '.join(map(str, _MULTIPLES))} and a fixed count were tried); pass "
        "deterministic=False, and near-ties between tokens may fall differently in different batches."
    )


def _candidates(most_rows: int, computes_row_by_row: bool) -> Iterator[RowRule]:
    largest = max(_LARGEST, most_rows)
    if computes_row_by_row:  # a forward program; the multiples are for PyTorch's kernels
        yield RowRule(1, largest)
    fixed = most_rows + -most_rows % max(_MULTIPLES)
    for multiple, most in [*((m, largest + -largest % m) for m in _MULTIPLES), (fixed, fixed)]:
        yield RowRule(multiple, most)
        yield RowRule(multiple, most, attends_alone=True)


def _linears(model: RaggedModel) -> list[nn.Module]:
    """Return one linear of every kind, whatever its class: a leaf with a matrix that is no table of embeddings.

    Those that the op ``linear`` computes, in a program all, sum in one order by themselves. Quantised ones keep their
    matrix in shapes of their own; the run of the whole model has to do for them.
    """
    if model.program is not None:
        return []
    served = set(model.linears.modules)
    kinds: dict[tuple[object, ...], nn.Module] = {}
    for module in model.model.modules():
        weight = getattr(module, "weight", None)
        is_matrix = isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()
        is_leaf = next(module.children(), None) is None
        if is_matrix and is_leaf and module not in served and not isinstance(module, nn.Embedding):
            kinds.setdefault(_kind(module), module)
    return list(kinds.values())


def _kind(linear: nn.Module) -> tuple[object, ...]:
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return (type(linear), tuple(weight.shape), getattr(linear, "bias", None) is None, weight.dtype, weight.device)


def _is_invariant(linear: nn.Module, rule: RowRule) -> bool:
    key = (*_kind(linear), rule.multiple, rule.largest, torch.get_num_threads())
    if key not in _found:
        _found[key] = _compare_counts(linear, rule)
    return _found[key]


@torch.inference_mode()
def _compare_counts(linear: nn.Module, rule: RowRule) -> bool:
    weight = linear.weight
    assert isinstance(weight, Tensor)
    # Linear keeps [out, in]; GPT-2's Conv1D keeps [in, out].
    width = weight.shape[1] if isinstance(linear, nn.Linear) else weight.shape[0]
    generator = torch.Generator(device="cpu").manual_seed(0)
    rows = torch.randn(rule.largest, width, generator=generator, device="cpu").to(weight.dtype).to(weight.device)
    expected = linear(rows)[:_COMPARED]
    for count in _counts(rule):
        compared = min(count, _COMPARED)
        backwards = linear(rows[:count].flip(0)).flip(0)  # the same rows in other places
        for got in (linear(rows[:count]), backwards):
            if not torch.equal(got[:compared], expected[:compared]):
                return False
    return True


def _counts(rule: RowRule) -> list[int]:
    """Return row counts to try: small ones, where libraries change kernels, and few large ones, which take long."""
    wanted = [*(i * rule.multiple for i in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)), 33, 63, 65, 127, rule.largest - 1]
    return sorted({count + rule.padding(count) for count in wanted if count <= rule.largest})


def _reproduces(model: RaggedModel, rule: RowRule) -> bool:
    """Tell whether the whole model gives one text the same logits in every way of computing it."""
    others = min(_FILLER, model.max_positions or _FILLER)
    num_others = max(1, (min(rule.largest, _MOST_FILLED) - _TEXT) // others)
    crowd = [(f"other {i}", 0, others) for i in range(num_others)]
    ways: list[list[Spans]] = [
        [[("text", i, 1)] for i in range(_TEXT)],
        [[("other 0", 0, 5), ("text", 0, 3)], [("text", 3, 6), ("other 0", 5, 1)], [("text", 9, _TEXT - 9)]],
        [[*crowd, ("text", 0, _TEXT)]],
    ]
    expected = _logits(model, rule, [[("text", 0, _TEXT)]])
    return all(torch.equal(_logits(model, rule, way), expected) for way in ways)


def _logits(model: RaggedModel, rule: RowRule, forwards: list[Spans]) -> Tensor:
    """Compute the forwards one after the other; return the logits of the owner called text, ``[n, vocab_size]``."""
    owners = {owner: 0 for spans in forwards for owner, _, _ in spans}
    pool = PagePool(model.layout, len(owners) * (_FILLER + model.page_size), model.page_size, rule)
    for number, owner in enumerate(sorted(owners, reverse=True)):  # the text is number 0 in every way
        pool.open(owner, _FILLER)
        owners[owner] = number
    found = []
    for spans in forwards:
        ids = [_tokens(owners[owner], model.vocab_size)[start : start + count] for owner, start, count in spans]
        token_ids = torch.cat(ids).to(model.layout.device)
        logits = model.forward(pool.batch([Rows(*span) for span in spans], token_ids), pool)
        pieces = logits.split([count for _, _, count in spans])
        found += [piece for piece, (owner, _, _) in zip(pieces, spans, strict=True) if owner == "text"]
    return torch.cat(found)


def _tokens(seed: int, vocab_size: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randint(vocab_size, (_FILLER,), generator=generator, device="cpu")
