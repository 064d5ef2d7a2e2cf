"""Drafting chains forward by forward, and how a drafter's rows choose their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch, Rows
from specdec_fast.batch.sampling_batch import Sampling, after, sampling_columns, sampling_of
from specdec_fast.device_copy import to_device
from specdec_fast.kv_cache.forward_layout import HostLayout, decode_batches, lay_out_on_host
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.runner.graphs.phases import Choices
from specdec_fast.runner.verification import owners

# PyTorch's argmax is called in less time, but reads logits a hundred times slower than the op.
_LARGE_VOCABULARY = 8192


def greedy_tokens(ops: Ops, logits: Tensor, vocab_size: int) -> Tensor:
    """Return the id below ``vocab_size`` with the largest logit of each row, ``[N]`` int64; 0 for a row with a NaN."""
    return chosen_tokens(ops, logits, vocab_size, None)


def draft_chains(
    pool: PagePool,
    first: list[Rows],
    tokens: Tensor,
    carried: Tensor | None,
    num_draft_tokens: list[int],
    forward: Callable[[RaggedBatch, Any, Tensor | None], tuple[Tensor, Any]],
    choose: Callable[[Tensor, Tensor, Sampling | None], Tensor],
) -> Tensor:
    """Draft chains: one forward over the first rows, then one more row per sequence and further token.

    Args:
        pool: pages of the rows.
        first: the rows of the first forward, one span per sequence.
        tokens: ``[T]`` int64 on the device, the tokens of those rows.
        carried: ``[T, ...]``, what those rows take besides their tokens; None: nothing.
        num_draft_tokens: number of tokens to draft per sequence, at least 1.
        forward: computes a batch with what its rows carry. Returns the logits of the rows whose indices are given
            (None: all), and what the rows that follow carry.
        choose: returns each row's token ``[N]`` of logits ``[N, V]``, the rows' own tokens, and how each is chosen.

    Returns:
        ``[sum(num_draft_tokens)]`` int64, sequence after sequence.

    """
    device = tokens.device
    drafted: list[Tensor] = []
    before: list[int] = []  # the sequences of the last forward
    for num_forwards, members in stages(num_draft_tokens):
        # A repetition penalty does not see what this step has drafted so far: it costs acceptance, no token.
        sampling = sampling_of([first[i].owner for i in members], device, ahead=len(drafted))  # type: ignore[misc]
        rows = first
        if drafted:
            rows = [Rows(first[i].owner, first[i].start + first[i].count - 1 + len(drafted), 1) for i in members]
            kept = to_device([before.index(i) for i in members], device)
            tokens = tokens[kept]
            carried = None if carried is None else carried[kept]
        for batch_of in decode_batches(pool, rows, num_forwards):
            batch = batch_of(token_ids=tokens)
            last = batch.last_rows if batch.most_rows > 1 else None
            logits, carried = forward(batch, carried, last)
            if last is not None:
                tokens = tokens[last]
                carried = None if carried is None else carried[last]
            tokens = choose(logits, tokens, sampling)
            sampling = sampling and after(sampling, tokens)
            drafted.append(tokens)
        before = members
    if len(drafted) == min(num_draft_tokens):  # every sequence gets as many
        return torch.stack(drafted, dim=1).flatten()
    return torch.cat(drafted)[to_device(by_sequence(num_draft_tokens), device)]


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
    sequences = owners(rows)
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
