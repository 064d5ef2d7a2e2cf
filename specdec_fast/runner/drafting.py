"""Drafting chains forward by forward, and how a drafter's rows choose their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_fast.batch.joint_ids import JointIds
from specdec_fast.batch.ragged_batch import RaggedBatch, Rows, owners
from specdec_fast.batch.sampling_batch import Sampling, after, sampling_columns, sampling_of
from specdec_fast.device_copy import to_device
from specdec_fast.kv_cache.forward_layout import HostLayout, decode_batches, lay_out_on_host
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.request.sequence import Sequence
from specdec_fast.request.token_masks import UNREAD, num_words
from specdec_fast.runner.graphs.phases import Choices, LoopForward
from specdec_fast.runner.mask_rows import masks_read_tokens, rows_for_drafts

# PyTorch's argmax is called in less time, but reads logits a hundred times slower than the op.
_LARGE_VOCABULARY = 8192


@dataclass(frozen=True)
class DraftPlan:
    """The chains that a model drafts in one step by its own choice: one for each of ``B`` sequences."""

    rows: list[Rows]  # of the first forward, one span per sequence; their owners are the sequences
    token_ids: list[int]  # of these rows, in the model's own ids
    num_draft_tokens: list[int]  # per sequence, at least 1
    num_choosable: int  # ids below it may be chosen
    # the model's ids and the target's, if they differ: joint ones are chosen. None: the target has the model's ids.
    joint: JointIds | None = None


# What a forward of ``draft_chains`` returns: logits ``[N, V]``, and the tokens and carried states of the same rows.
_Computed = tuple[Tensor, Tensor, Tensor | None]


def draft_chains(
    sequences: list[Sequence],
    num_draft_tokens: list[int],
    tokens: Tensor,
    carried: Tensor | None,
    batches: Callable[[list[int], int, int], Iterable[Any]],
    forward: Callable[[Any, Tensor, Tensor | None], _Computed],
    choose: Callable[[Tensor, Sampling | None, Tensor], Tensor],
) -> Tensor:
    """Draft chains: each forward chooses one more token of every sequence that still drafts.

    Args:
        sequences: ``B`` sequences.
        num_draft_tokens: number of tokens to draft per sequence, at least 1.
        tokens: int64 on the device: what the first forward takes.
        carried: what the first forward takes besides; None: nothing.
        batches: returns what ``forward`` takes first, for several forwards, given the indices of their sequences, the
            number of forwards before, and their own number.
        forward: computes logits from tokens and carried states, those of the forward before.
        choose: returns each row's token ``[N]`` of logits ``[N, V]``, how each is chosen, and the rows' own tokens.

    Returns:
        ``[sum(num_draft_tokens)]`` int64, sequence after sequence.
    """
    device = tokens.device
    drafted: list[Tensor] = []
    before = list(range(len(sequences)))  # the sequences of the last forward
    paths = DraftPaths(sequences)
    for num_forwards, members in _stages(num_draft_tokens):
        # A penalty does not see what this step has drafted so far: it costs acceptance, no token.
        own = [sequences[i] for i in members]
        sampling = sampling_of(own, device, ahead=len(drafted), allowed=paths.masks_of(members))
        if members != before:
            kept = to_device([before.index(i) for i in members], device)
            tokens = tokens[kept]
            carried = None if carried is None else carried[kept]
        for batch in batches(members, len(drafted), num_forwards):
            logits, tokens, carried = forward(batch, tokens, carried)
            tokens = choose(logits, sampling, tokens)
            drafted.append(tokens)
            paths.add(members, tokens)
            sampling = sampling and paths.masked(after(sampling, tokens), members)
        before = members
    if len(drafted) == min(num_draft_tokens):  # every sequence gets as many
        return torch.stack(drafted, dim=1).flatten()
    return torch.cat(drafted)[to_device(_by_sequence(num_draft_tokens), device)]


class DraftPaths:
    """The tokens that a step has drafted so far, for the masks of its sequences; nothing without masks."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self._sequences = sequences
        self._reads = masks_read_tokens(sequences)
        self._paths: list[list[int]] | None = None
        if any(sequence.masks is not None for sequence in sequences):
            self._paths = [[] for _ in sequences]

    def add(self, members: list[int], tokens: Tensor) -> None:
        """Append one token to the path of each member; if a mask reads tokens, this waits for the device."""
        if self._paths is not None:
            for i, token in zip(members, tokens.tolist() if self._reads else [UNREAD] * len(members), strict=True):
                self._paths[i].append(token)

    def masks_of(self, members: list[int]) -> np.ndarray | None:
        """Return the bitmasks of the members' next rows; None if no sequence has a mask."""
        if self._paths is None:
            return None
        return rows_for_drafts([self._sequences[i] for i in members], [self._paths[i] for i in members])

    def masked(self, sampling: Sampling, members: list[int]) -> Sampling:
        """Return ``sampling`` with these bitmasks."""
        words = self.masks_of(members)
        return sampling if words is None else replace(sampling, allowed=to_device(words, sampling.seeds.device))


def draft_on_pages(
    pool: PagePool,
    first: list[Rows],
    tokens: Tensor,
    carried: Tensor | None,
    num_draft_tokens: list[int],
    forward: LoopForward,
    choose: Callable[[Tensor, Sampling | None, Tensor], Tensor],
) -> Tensor:
    """Draft chains by forwards that write KV entries: the first one over given rows, then one more row per sequence.

    Args:
        pool: pages of the rows.
        first: the rows of the first forward, one span per sequence.
        tokens: ``[T]`` int64 on the device, the tokens of those rows.
        carried: ``[T, ...]``, what those rows take besides their tokens; None: nothing.
        num_draft_tokens: as for ``draft_chains``.
        forward: computes a batch.
        choose: as for ``draft_chains``.

    Returns:
        ``[sum(num_draft_tokens)]`` int64, sequence after sequence.
    """

    def batches(members: list[int], num_before: int, num_forwards: int) -> list[partial[RaggedBatch]]:
        rows = first
        if num_before:
            rows = [Rows(first[i].owner, first[i].start + first[i].count - 1 + num_before, 1, 1) for i in members]
        return decode_batches(pool, rows, num_forwards)

    def step(batch_of: partial[RaggedBatch], tokens: Tensor, carried: Tensor | None) -> _Computed:
        batch = batch_of(token_ids=tokens)
        last = batch.last_rows if batch.most_rows > 1 else None
        logits, carried = forward(batch, carried, last)
        if last is None:
            return logits, tokens, carried
        return logits, tokens[last], None if carried is None else carried[last]

    return draft_chains(owners(first), num_draft_tokens, tokens, carried, batches, step, choose)


def chosen_tokens(
    ops: Ops,
    logits: Tensor,
    vocab_size: int,
    sampling: Sampling | None,
    token_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    target_ids: Tensor | None = None,
) -> Tensor:
    """Return each row's token ``[N]``; of a row with a NaN, which has none, any id.

    Args:
        ops: choose tokens.
        logits: ``[N, V]``.
        vocab_size: ids below it may be chosen.
        sampling: how each sequence chooses; None: greedily.
        token_ids: ``[N]`` int64, the token of each row. Only penalties read it; None: there are none.
        cu_seqlens: ``[B + 1]`` int32, the first row of each sequence, and their number; None: each row is one's only.
        target_ids: ``[V]`` int64, the target's id of each id of the logits, returned in its place; None: the same.
    """
    if target_ids is not None:
        if sampling is None:
            return target_ids[chosen_tokens(ops, logits, logits.shape[1], None, token_ids, cu_seqlens)]
        logits = widened(logits, target_ids, vocab_size)
    if vocab_size < logits.shape[1]:
        logits = logits[:, :vocab_size]
    if sampling is not None and sampling.allowed is not None:
        words = num_words(logits.shape[1])
        if words < sampling.allowed.shape[1]:  # a drafter may have fewer ids than the target
            sampling = replace(sampling, allowed=sampling.allowed[:, :words].contiguous())
    if sampling is None and logits.shape[1] < _LARGE_VOCABULARY:
        return logits.argmax(dim=-1)
    if token_ids is None:
        token_ids = logits.new_zeros(len(logits), dtype=torch.int64)
    if cu_seqlens is None:  # not cached: a cached tensor might be freed before a graph that reads it is replayed
        cu_seqlens = torch.arange(len(logits) + 1, dtype=torch.int32, device=logits.device)
    tokens = ops.without_checks.verify_chain(logits, token_ids, cu_seqlens, sampling)[0]
    return tokens.clamp_(min=0)  # NaN logits have no token; the target rejects whatever stands for it


def choices_of(ops: Ops, vocab_size: int) -> Choices:
    """Return how the graphs of a model with so many ids choose tokens."""
    return Choices(partial(chosen_tokens, ops), ops.without_checks.verify_chain, vocab_size)


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
    pool: PagePool, rows: list[Rows], num_positions: list[int]
) -> tuple[HostLayout, dict[str, np.ndarray]] | None:
    """Lay out a drafting loop for a graph, with pages for ``num_positions`` from the last row of each sequence on.

    Returns:
        The layout of the first forward, and how the sequences choose (empty: greedily); None if a sequence
        edits logits, for which there are no graphs.
    """
    sequences = owners(rows)
    if any(sequence.edits_logits for sequence in sequences):
        return None
    layout = lay_out_on_host(pool, rows, ahead=[count - 1 for count in num_positions])
    return layout, sampling_columns(sequences) if any(sequence.samples for sequence in sequences) else {}


def first_tokens(chosen: Tensor, num_draft_tokens: list[int]) -> Tensor:
    """Return the first tokens of each sequence, ``[sum(num_draft_tokens)]``, of ``chosen [B, K]``."""
    num_forwards = chosen.shape[1]
    if num_forwards == min(num_draft_tokens):
        return chosen.flatten()
    places = [i * num_forwards + j for i, count in enumerate(num_draft_tokens) for j in range(count)]
    return chosen.flatten()[to_device(places, chosen.device)]


def _stages(num_draft_tokens: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield (number of forwards, members): successive forwards in which the same sequences draft."""
    start = 0
    for stop in sorted(set(num_draft_tokens)):
        yield stop - start, [i for i, count in enumerate(num_draft_tokens) if count >= stop]
        start = stop


def _by_sequence(num_draft_tokens: list[int]) -> list[int]:
    """Return the places that bring the tokens of one forward after the other into the order of the sequences."""
    places: list[list[int]] = [[] for _ in num_draft_tokens]
    place = 0
    for forward in range(max(num_draft_tokens)):
        for i, count in enumerate(num_draft_tokens):
            if count > forward:
                places[i].append(place)
                place += 1
    return [place for of_sequence in places for place in of_sequence]
