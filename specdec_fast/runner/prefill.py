"""Prefill: the KV entries of whole prompts, several in one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.device_copy import to_device
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.runner.ragged_model import RaggedModel


def prefill(
    model: RaggedModel,
    pool: PagePool,
    prompts: Mapping[Any, list[int]],
    starts: Mapping[Any, int] | None = None,
    observe: Callable[[list[Rows], Tensor], None] | None = None,
) -> None:
    """Compute the KV entries of whole prompts, several in one forward, at most ``row_padding.largest`` rows each.

    Args:
        model: the model that computes the entries.
        pool: a pool that has every key of ``prompts`` as an owner, and free pages enough.
        prompts: token ids from position 0 on, by owner; an empty prompt needs nothing.
        starts: number of tokens of each owner that already have entries; None: 0 for all.
        observe: receives the rows and the hidden states ``[T, taps, H]`` of each forward; None: they are not wanted.
            A model before ``use_taps`` computes none, and nothing is received.

    """
    for rows, token_ids in _prefill_forwards(prompts, model.row_padding.largest, starts or {}):
        batch = lay_out(pool, rows, to_device(token_ids, model.layout.device))
        hidden_states = None if observe is None else model.empty_hidden_states(len(token_ids))
        model.forward(batch, pool, batch.last_rows[:1], hidden_states)  # one row, because these logits are not used
        if observe is not None and hidden_states is not None:
            observe(rows, hidden_states)


def _prefill_forwards(
    prompts: Mapping[Any, list[int]], most_rows: int, starts: Mapping[Any, int]
) -> Iterator[tuple[list[Rows], list[int]]]:
    rows: list[Rows] = []
    token_ids: list[int] = []
    for owner, prompt in prompts.items():
        start = starts.get(owner, 0)
        while start < len(prompt):
            count = min(len(prompt) - start, most_rows - len(token_ids))
            rows.append(Rows(owner, start, count))
            token_ids += prompt[start : start + count]
            start += count
            if len(token_ids) == most_rows:
                yield rows, token_ids
                rows = []
                token_ids = []
    if rows:
        yield rows, token_ids
