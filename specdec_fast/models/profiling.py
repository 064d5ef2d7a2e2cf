"""What a model's forward takes at given numbers of rows, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.hf_model import RaggedModel

_REPEATS = 3
_BUDGET_SECONDS = 0.5  # after which a count that has been timed is not timed again,
_BUDGET_SHARE = 0.5  # unless that takes less than so much of what timing every count once took
_CONTEXT = 64


@torch.inference_mode()
def forward_seconds(model: RaggedModel, row_counts: Sequence[int], most_sequences: int = 2048) -> dict[int, float]:
    """Time forwards over short contexts on pages of their own, the least of up to three repeats each.

    It takes one forward to warm up, one at each count, and for the repeats up to half a second or half of that again.
    If there is no time for all, the smallest counts are repeated, those of plain steps among them.

    Args:
        model: with the row rule it will be run with.
        row_counts: rows of the forwards.
        most_sequences: over so many sequences the rows are spread, evenly.

    Returns:
        Seconds by row count.

    """
    num_owners = min(most_sequences, max(row_counts))
    longest = -(-max(row_counts) // num_owners)
    context = max(longest, min(_CONTEXT, model.max_positions or _CONTEXT))
    pool = PagePool(model.layout, num_owners * (context + model.page_size), model.page_size, model.row_padding)
    for owner in range(num_owners):
        pool.reserve(owner, context)
    found: dict[int, float] = {}
    _forward(model, pool, max(row_counts), num_owners, context)
    started = perf_counter()
    deadline = started + _BUDGET_SECONDS
    for _ in range(_REPEATS):  # round by round, so that a busy moment of the machine meets a count but once
        for count in sorted(row_counts):
            if count not in found or perf_counter() < deadline:
                seconds = _forward(model, pool, count, num_owners, context)
                found[count] = min(found.get(count, float("inf")), seconds)
        deadline = max(deadline, started + (1 + _BUDGET_SHARE) * sum(found.values()))
    return found


def _forward(model: RaggedModel, pool: PagePool, num_rows: int, num_owners: int, context: int) -> float:
    """Compute the last positions of ``context`` for as many owners as there are rows for; return what it took."""
    num_owners = min(num_owners, num_rows)
    shares = [num_rows // num_owners + (owner < num_rows % num_owners) for owner in range(num_owners)]
    rows = [Rows(owner, context - count, count) for owner, count in enumerate(shares)]
    token_ids = torch.zeros(num_rows, dtype=torch.int64, device=model.layout.device)
    batch = lay_out(pool, rows, token_ids)
    started = perf_counter()
    model.forward(batch, pool)[0, 0].item()  # on a GPU forwards are only queued
    return perf_counter() - started
