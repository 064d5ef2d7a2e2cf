"""The time of a model's forward at given numbers of rows, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.runner.ragged_model import RaggedModel

REPEATS = 3
PROPOSAL_LENGTHS = 1, 4  # in tokens, of the proposals that are timed
_BUDGET_SECONDS = 0.5  # repeats end after this time,
_BUDGET_SHARE = 0.5  # or after this share of the time of the first round, if that is longer
_CONTEXT = 64


@torch.inference_mode()
def forward_seconds(model: RaggedModel, row_counts: Sequence[int], most_sequences: int = 2048) -> dict[int, float]:
    """Return the seconds of forwards by row count: the least of up to three repeats, over short contexts on own pages.

    It runs one forward to warm up and one at each count. The repeats may take half a second, or half as long as these
    forwards. If there is no time for all repeats, the smallest counts, those of plain steps, are repeated first. Rows
    are spread evenly over ``most_sequences`` at most.
    """
    num_owners = min(most_sequences, max(row_counts))
    longest = -(-max(row_counts) // num_owners)
    context = max(longest, min(_CONTEXT, model.max_positions or _CONTEXT))
    num_tokens = num_owners * (context + model.page_size)
    pool = PagePool(model.layout, num_tokens, model.page_size, model.row_padding, num_owners)
    for owner in range(num_owners):
        pool.add(owner)
    least: dict[int, float] = {}
    _forward(model, pool, max(row_counts), num_owners, context)
    deadline = float("inf")
    for repeat in range(REPEATS):  # in rounds, so that a busy moment of the machine affects each count at most once
        for count in sorted(row_counts):
            if perf_counter() < deadline:
                seconds = _forward(model, pool, count, num_owners, context)
                least[count] = min(least.get(count, float("inf")), seconds)
        if not repeat:  # a busy moment in the first round does not use up the time of the repeats, which correct it
            deadline = perf_counter() + max(_BUDGET_SECONDS, _BUDGET_SHARE * sum(least.values()))
    return least


def drafting_seconds(
    model: RaggedModel, row_counts: Sequence[int], most_sequences: int, measure: Callable[[int], float]
) -> dict[int, float]:
    """Return ``Drafter.forward_seconds`` of a drafter whose model computes one row per sequence and draft token.

    ``most_sequences`` is that of ``forward_seconds``, ``measure`` that of ``proposal_seconds``.
    """
    seconds_by_count = forward_seconds(model, row_counts, most_sequences)
    of_one, per_token = proposal_seconds(measure)
    # A measured forward includes a call from Python; the forwards of one proposal share a call.
    call = max(0.0, seconds_by_count[1] - per_token)
    seconds_by_count = {count: max(seconds - call, seconds / 10) for count, seconds in seconds_by_count.items()}
    return seconds_by_count | {0: max(0.0, of_one - seconds_by_count[1])}


def proposal_seconds(measure: Callable[[int], float]) -> tuple[float, float]:
    """Return the seconds of a proposal of one token, and those of each further token.

    ``measure`` runs a proposal of so many tokens, and returns its seconds. Both ``PROPOSAL_LENGTHS`` are measured in
    turn, so that a busy moment of the machine does not make one of them look slow; the least times count.
    """
    rounds = [[measure(length) for length in PROPOSAL_LENGTHS] for _ in range(REPEATS)]
    short, long = map(min, zip(*rounds, strict=True))
    return short, max(0.0, long - short) / (PROPOSAL_LENGTHS[1] - PROPOSAL_LENGTHS[0])


def most_proposed(most_draft_tokens: int) -> int:
    """Return the most tokens that a draft model proposes for a sequence: K, or more if longer proposals are timed."""
    return max(most_draft_tokens, *PROPOSAL_LENGTHS)


def _forward(model: RaggedModel, pool: PagePool, num_rows: int, num_owners: int, context: int) -> float:
    """Compute ``num_rows`` last positions of ``context``, spread over the owners; return the seconds."""
    num_owners = min(num_owners, num_rows)
    shares = [num_rows // num_owners + (owner < num_rows % num_owners) for owner in range(num_owners)]
    rows = [Rows(owner, context - count, count) for owner, count in enumerate(shares)]
    if pool.states is not None:
        for row in rows:
            pool.states.assume(pool.place(row.owner), row.start)
    token_ids = torch.zeros(num_rows, dtype=torch.int64, device=model.layout.device)
    batch = lay_out(pool, rows, token_ids)
    started = perf_counter()
    model.forward(batch, pool)[0, 0].item()  # reading waits for a GPU, on which forwards are only queued
    return perf_counter() - started
