"""Checks whether a model on pages reproduces its own dense logits and hidden states, and a program those of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch, Rows
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.model_checks import pool_of_two
from specdec_fast.models.probe import PROBE_LENGTH
from specdec_fast.models.quantized_linears import exact_rows, quantized_linears
from specdec_fast.models.refusal_reasons import why_not_reproduced
from specdec_fast.runner.hf_model import HFModel

RaggedForward = Callable[[RaggedBatch, PagePool], Tensor]


def check_reproduces(
    hf: HFModel,
    forward: RaggedForward,
    page_size: int,
    token_ids: Tensor,
    expected: Tensor,
    results: str = "logits",
    reference: RaggedForward | None = None,
) -> None:
    """Compare ragged logits (two sequences, two forwards) with the model's own dense ones; or its hidden states.

    The bound is the square root of the dtype's rounding unit, on the relative L2 distance: far above rounding, far
    below what a wrong position, mask or cache entry does. Where quantised linears round their rows, the distance to
    logits without that is added. In 16 bits it is the median of the rows' distances, because rounding may let a mixture
    of experts choose other experts for single rows; what a page, position or mask does wrong changes most rows of one
    of the two forwards. A fault of a program may change one row only. So in 16 bits every row is compared with
    ``reference`` as well, which rounds where the program does. Raises UnsupportedModelError if they are further apart;
    the message says why, as far as that can be found.

    Args:
        hf: the model.
        forward: computes a batch on a pool's pages: logits ``[T, vocab_size]``, or ``[T, taps, H]``, tap by tap.
        page_size: of the pages.
        token_ids: ``[PROBE_LENGTH]`` int64.
        expected: ``[PROBE_LENGTH, vocab_size]`` or ``[PROBE_LENGTH, taps, H]``, what the model computes of them.
        results: what they are, for the message.
        reference: computes what ``forward`` does, operation by operation; None if ``forward`` itself does so.
    """
    name = type(hf.model).__name__
    bound = torch.finfo(hf.layout.dtype).eps ** 0.5 + _effect_of_rounded_rows(hf, token_ids)
    is_short = torch.finfo(hf.layout.dtype).bits == 16
    pool = pool_of_two(hf.layout, page_size)
    reference_pool = pool_of_two(hf.layout, page_size) if is_short and reference is not None else None
    pieces = [[Rows("a", 0, 3), Rows("b", 0, 6)], [Rows("a", 3, PROBE_LENGTH - 3), Rows("b", 6, PROBE_LENGTH - 6)]]
    for rows in pieces:
        positions = torch.cat([torch.arange(r.start, r.start + r.count, device=token_ids.device) for r in rows])
        ragged = forward(lay_out(pool, rows, token_ids[positions]), pool).float()
        dense = expected[positions].float()
        if is_short:
            distances = _distances(ragged, dense).median(dim=0).values
        else:
            distances = _distances(ragged, dense, dim=(0, -1))
        distance = float(distances.max())
        if not distance <= bound:
            embeddings = hf.model.get_input_embeddings()
            why = why_not_reproduced(hf.dense_logits, token_ids, bound, bool(hf.layout.states), embeddings)
            raise UnsupportedModelError(
                f"{name} does not reproduce its own {results} on a paged KV cache (relative "
                f"distance {distance:.1e}, bound {bound:.1e}): {why}."
            )
        if reference is not None and reference_pool is not None:
            rounded = reference(lay_out(reference_pool, rows, token_ids[positions]), reference_pool).float()
            distance = float(_distances(ragged, rounded).max())
            if not distance <= bound:
                raise UnsupportedModelError(
                    f"the program of {name} computes other {results} of a row than PyTorch (relative distance "
                    f"{distance:.1e}, bound {bound:.1e})."
                )


def check_reproduces_taps(
    hf: HFModel,
    forward: Callable[..., Tensor],
    page_size: int,
    token_ids: Tensor,
    reference: Callable[..., Tensor] | None,
) -> None:
    """Compare a model's ragged hidden states with its dense ones; see ``check_reproduces``.

    ``forward`` and ``reference`` take the arguments of ``RaggedModel.forward``.
    """
    taps = hf.taps
    assert taps is not None, "use_taps has not been called"

    def computed_by(forward: Callable[..., Tensor], batch: RaggedBatch, pool: PagePool) -> Tensor:
        hidden_states = taps.empty(len(batch.token_ids), hf.layout.device)
        forward(batch, pool, batch.last_rows, hidden_states)
        return hidden_states

    expected = hf.dense_hidden_states(token_ids)
    results = f"hidden states (taps {taps.ids})"
    compared = None if reference is None else partial(computed_by, reference)
    check_reproduces(hf, partial(computed_by, forward), page_size, token_ids, expected, results, compared)


def _effect_of_rounded_rows(hf: HFModel, token_ids: Tensor) -> float:
    """Return how far rounding the rows of quantised linears moves the logits; 0 if none rounds its rows.

    The last bits of a row decide which way its numbers are rounded, so two ways to compute it may differ as much.
    """
    if not any(module.rounds_rows for module in quantized_linears(hf.model).values()):
        return 0.0
    logits = hf.dense_logits(token_ids).float()
    with exact_rows():
        return float(_distances(hf.dense_logits(token_ids).float(), logits, dim=(0, -1)))


def _distances(computed: Tensor, expected: Tensor, dim: int | tuple[int, int] = -1) -> Tensor:
    """Return the relative L2 distance of every row, ``[T]`` or ``[T, taps]``; or over the rows too.

    An infinity is at no distance from itself: some models give excluded tokens a logit of -inf. A row may be all zeros.
    """
    is_same = computed.isinf() & (computed == expected)
    computed = computed.masked_fill(is_same, 0)
    expected = expected.masked_fill(is_same, 0)
    return (computed - expected).norm(dim=dim) / expected.norm(dim=dim).clamp(min=torch.finfo(torch.float32).tiny)
