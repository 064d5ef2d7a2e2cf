"""A draft model's forwards of one step, one after the other, where no program runs them in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch, Rows
from specdec_fast.batch.sampling_batch import Sampling, after, sampling_columns, sampling_of
from specdec_fast.cuda_graphs.sides import Choices
from specdec_fast.device_copy import to_device
from specdec_fast.kv_cache.forward_layout import HostLayout, decode_batches, lay_out_on_host
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.request.sequence import Sequence

if TYPE_CHECKING:
    from specdec_fast.models.ragged_model import RaggedModel

# PyTorch's argmax is called in less time, but reads logits a hundred times slower than the op.
_LARGE_VOCABULARY = 8192


def greedy_tokens(ops: Ops, logits: Tensor, vocab_size: int) -> Tensor:
    """Return the id below ``vocab_size`` with the largest logit of each row, ``[N]`` int64; 0 for a row with a NaN."""
    return chosen_tokens(ops, logits, vocab_size, None)


class DraftLoop:
    """The forwards of one drafting step.

    Args:
        model: computes them.
        pool: its pages.
        vocab_size: ids that may be chosen are below it.

    """

    def __init__(self, model: RaggedModel, pool: PagePool, vocab_size: int) -> None:
        self._model, self._pool, self._vocab_size = model, pool, vocab_size
        self._device = model.layout.device

    def run(self, rows: list[Rows], token_ids: list[int], num_draft_tokens: list[int]) -> Tensor:
        """Draft for the sequences that own ``rows``.

        Args:
            rows: of the first forward, one span per sequence.
            token_ids: of those rows.
            num_draft_tokens: of each sequence, at least 1.

        Returns:
            ``[sum(num_draft_tokens)]`` int64, sequence after sequence.

        """
        of_graph = self._by_graph(rows, token_ids, num_draft_tokens)
        if of_graph is not None:
            return of_graph
        with self._model.attached():
            drafted = self._draft(rows, token_ids, num_draft_tokens)
        if len(drafted) == min(num_draft_tokens):  # every sequence gets as many
            return torch.stack(drafted, dim=1).flatten()
        return torch.cat(drafted)[to_device(by_sequence(num_draft_tokens), self._device)]

    def _by_graph(self, rows: list[Rows], token_ids: list[int], num_draft_tokens: list[int]) -> Tensor | None:
        """Return the tokens that a graph of the whole loop chooses; None if there is none for these sequences.

        A sequence that gets fewer tokens than others, as at the end of its text, has as many forwards. Those that it
        does not need write their KV entries into the scratch page.
        """
        graphs, num_forwards = self._model.graphs, max(num_draft_tokens)
        if graphs is None or not graphs.has_loop(num_forwards):
            return None
        longest = max(row.start + row.count for row in rows) + num_forwards - 1
        if self._model.max_positions is not None and longest > self._model.max_positions:
            return None
        laid_out = laid_out_loop(self._pool, rows, num_draft_tokens)
        if laid_out is None:
            return None
        layout, columns = laid_out
        chosen = graphs.draft(layout, token_ids, num_forwards, columns, self._pool, self._vocab_size)
        return None if chosen is None else first_tokens(chosen, num_draft_tokens)

    def _draft(self, first: list[Rows], token_ids: list[int], num_draft_tokens: list[int]) -> list[Tensor]:
        """Return the tokens of each forward: one of every sequence that gets so many, in batch order."""
        drafted: list[Tensor] = []
        before: list[int] = []  # the sequences of the last forward
        for num_forwards, members in stages(num_draft_tokens):
            sequences: list[Sequence] = [first[i].owner for i in members]  # type: ignore[misc]
            # A repetition penalty does not see what this step has drafted so far: it costs acceptance, no token.
            sampling = sampling_of(sequences, self._device, ahead=len(drafted))
            if drafted:
                rows = [Rows(s, s.length - 1 + len(drafted), 1) for s in sequences]
                tokens = drafted[-1][to_device([before.index(i) for i in members], self._device)]
            else:
                rows, tokens = first, to_device(token_ids, self._device)
            drafted += self._forwards(rows, num_forwards, tokens, sampling)
            before = members
        return drafted

    def _forwards(
        self, rows: list[Rows], num_forwards: int, tokens: Tensor, sampling: Sampling | None
    ) -> Iterable[Tensor]:
        """Compute ``[T]`` tokens, then one row more each on the tokens chosen before; return each forward's ``[B]``."""
        drafted: list[Tensor] = []
        for batch_of in decode_batches(self._pool, rows, num_forwards):
            tokens = self._next_tokens(batch_of(token_ids=tokens), sampling)
            drafted.append(tokens)
            sampling = sampling and after(sampling, tokens)
        return drafted

    def _next_tokens(self, batch: RaggedBatch, sampling: Sampling | None) -> Tensor:
        """Compute the rows; return each sequence's next token ``[B]``, chosen as the target chooses its own."""
        last = batch.last_rows if batch.most_rows > 1 else None
        logits = self._model.forward(batch, self._pool, last)
        fed = batch.token_ids if last is None else batch.token_ids[last]
        return chosen_tokens(self._model.ops, logits, self._vocab_size, sampling, fed)


def chosen_tokens(
    ops: Ops,
    logits: Tensor,
    vocab_size: int,
    sampling: Sampling | None,
    fed: Tensor | None = None,
    one_each: Tensor | None = None,
) -> Tensor:
    """Return each row's token ``[N]``; every row is the only one of its sequence.

    Args:
        ops: choose tokens.
        logits: ``[N, V]``.
        vocab_size: ids below it may be chosen.
        sampling: how each row chooses; None: greedily.
        fed: ``[N]`` int64, what each row was fed. Only repetition penalties read it; None: there are none.
        one_each: ``[N + 1]`` int32, 0 to N; None: it is made here.

    """
    if vocab_size < logits.shape[1]:
        logits = logits[:, :vocab_size]
    if sampling is None and logits.shape[1] < _LARGE_VOCABULARY:
        return logits.argmax(dim=-1)
    if fed is None:
        fed = logits.new_zeros(len(logits), dtype=torch.int64)
    if one_each is None:  # not cached: a cached tensor might be freed before a graph that reads it is replayed
        one_each = torch.arange(len(logits) + 1, dtype=torch.int32, device=logits.device)
    tokens = (ops.unchecked or ops).verify_chain(logits, fed, one_each, sampling)[0]
    return tokens.clamp_(min=0)  # NaN logits have no token; the target rejects whatever stands for it


def choices_of(ops: Ops, vocab_size: int) -> Choices:
    """Return how the graphs of a model with so many ids choose tokens."""
    return Choices(partial(chosen_tokens, ops), (ops.unchecked or ops).verify_chain, vocab_size)


def widened(logits: Tensor, target_ids: Tensor, vocab_size: int) -> Tensor:
    """Return logits over the target's ids: the noise of a token belongs to its id in the target's vocabulary.

    Args:
        logits: ``[N, draft_vocab_size]``.
        target_ids: ``[draft_vocab_size]`` int64, the target's id of each draft id.
        vocab_size: number of the target's ids.

    Returns:
        ``[N, vocab_size]``; minus infinity where the drafter has no such id.

    """
    wide = logits.new_full((len(logits), vocab_size), float("-inf"))
    wide[:, target_ids] = logits
    return wide


def laid_out_loop(
    pool: PagePool, rows: list[Rows], num_draft_tokens: list[int]
) -> tuple[HostLayout, dict[str, np.ndarray]] | None:
    """Lay out a drafting loop for a graph.

    Returns:
        The layout of the first forward, and how the sequences choose (empty: greedily); None if a sequence has a
        repetition penalty, for which there are no graphs.

    """
    sequences: list[Sequence] = [row.owner for row in rows]  # type: ignore[misc]
    if any(sequence.params.repetition_penalty != 1 for sequence in sequences):
        return None
    layout = lay_out_on_host(pool, rows, ahead=[count - 1 for count in num_draft_tokens])
    return layout, sampling_columns(sequences) if any(sequence.samples for sequence in sequences) else {}


def first_tokens(chosen: Tensor, num_draft_tokens: list[int]) -> Tensor:
    """Return the first tokens of each sequence, ``[sum(num_draft_tokens)]``, of ``chosen [B, K]``."""
    num_forwards = chosen.shape[1]
    if num_forwards == min(num_draft_tokens):
        return chosen.flatten()
    own = [i * num_forwards + j for i, count in enumerate(num_draft_tokens) for j in range(count)]
    return chosen.flatten()[to_device(own, chosen.device)]


def stages(num_draft_tokens: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield (number of forwards, members): successive forwards in which the same sequences draft."""
    start = 0
    for stop in sorted(set(num_draft_tokens)):
        yield stop - start, [i for i, count in enumerate(num_draft_tokens) if count >= stop]
        start = stop


def by_sequence(num_draft_tokens: list[int]) -> list[int]:
    """Return the places that bring the tokens of one forward after the other into the order of the sequences."""
    places: list[list[int]] = [[] for _ in num_draft_tokens]
    place = 0
    for forward in range(max(num_draft_tokens)):
        for i, count in enumerate(num_draft_tokens):
            if count > forward:
                places[i].append(place)
                place += 1
    return [place for own in places for place in own]
