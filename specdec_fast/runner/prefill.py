"""Prefill: the KV entries of whole prompts, several in one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.device_copy import to_device
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.runner.ragged_model import RaggedModel


class LogitReader(NamedTuple):
    """Which logits of a prefill are wanted."""

    starts: Mapping[Any, int]  # by owner, the first position whose logits are wanted; owners without one want none
    # receives the positions of each forward whose logits are wanted, and the logits [R, vocab_size], position after
    # position; it must read them at once
    read: Callable[[list[Rows], Tensor], None]
    most_rows: int  # largest number of rows of a forward

    def wanted(self, rows: list[Rows]) -> list[Rows]:
        """Return the wanted ones of a forward's positions."""
        found = []
        for owner, start, count, _ in rows:
            first = max(start, self.starts.get(owner, start + count))
            if first < start + count:
                found.append(Rows(owner, first, start + count - first))
        return found


def prefill(
    model: RaggedModel,
    pool: PagePool,
    prompts: Mapping[Any, list[int]],
    starts: Mapping[Any, int] | None = None,
    observe: Callable[[list[Rows], Tensor], None] | None = None,
    reader: LogitReader | None = None,
) -> None:
    """Compute the KV entries of whole prompts, several in one forward, at most ``row_padding.largest`` rows each.

    Args:
        model: the model that computes the entries.
        pool: a pool that has every key of ``prompts`` as an owner, and free pages enough.
        prompts: token ids from position 0 on, by owner; an empty prompt needs nothing.
        starts: number of tokens of each owner that already have entries; None: 0 for all.
        observe: receives the rows and the hidden states ``[T, taps, H]`` of each forward; None: they are not wanted.
            A model before ``use_taps`` computes none, and nothing is received.
        reader: receives logits; None: they are not wanted.

    """
    most_rows = model.row_padding.largest
    if reader is not None:
        most_rows = min(most_rows, reader.most_rows)
    for rows, token_ids in _prefill_forwards(prompts, most_rows, starts or {}):
        batch = lay_out(pool, rows, to_device(token_ids, model.layout.device))
        hidden_states = None if observe is None else model.empty_hidden_states(len(token_ids))
        wanted = [] if reader is None else reader.wanted(rows)
        logit_rows = batch.last_rows[:1]  # one row, if no logits are used
        if wanted:
            logit_rows = to_device(_indices(rows, wanted), model.layout.device)
        logits = model.forward(batch, pool, logit_rows, hidden_states)
        if reader is not None and wanted:
            reader.read(wanted, logits)
        if observe is not None and hidden_states is not None:
            observe(rows, hidden_states)


def _indices(rows: list[Rows], wanted: list[Rows]) -> list[int]:
    """Return the rows of a forward that have the wanted positions, which each owner has in one span."""
    firsts = accumulate((each.count for each in rows), initial=0)
    places = {each.owner: first - each.start for each, first in zip(rows, firsts, strict=False)}
    return [places[owner] + position for owner, start, count, _ in wanted for position in range(start, start + count)]


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
