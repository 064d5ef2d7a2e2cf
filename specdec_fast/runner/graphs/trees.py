"""What the graph of a drafting of trees computes: a forward over new features, then one over every frontier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.runner.graphs.inputs import Inputs
from specdec_fast.runner.graphs.phases import LoopForward, first_of
from specdec_fast.runner.graphs.tree_growth import DraftRows, Growth


class TreeParts(NamedTuple):
    """The parts of a drafter of trees whose rows take the hidden states of the rows above them.

    Attributes:
        project: from the target's hidden states ``[T, taps, H]`` to what rows take.
        forward: computes rows.
        rank: names children of ``N`` rows. It takes their logits ``[N, V]``, how they choose (None: greedily), their
            tokens ``[N]``, and their depth. It returns ``[N, R]`` ids of the target, and ``[N, R]`` log-probabilities
            in fp64.
        growth: makes what chooses the frontiers of one drafting.
        max_nodes: the largest number of nodes of a tree.

    """

    project: Callable[[Tensor], Tensor]
    forward: LoopForward
    rank: Callable[[Tensor, Sampling | None, Tensor, int], tuple[Tensor, Tensor]]
    growth: Callable[[], Growth]
    max_nodes: int


def tree_loop(
    parts: TreeParts,
    inputs: Inputs,
    features: Tensor,
    sampling: Sampling | None,
    depth: int,
    page_size: int,
) -> tuple[Tensor, ...]:
    """Draft a tree for each of ``B`` sequences, ``one_each`` places of a bucket.

    Args:
        parts: of the drafter.
        inputs: of the bucket. Behind a sequence's last row there is room for ``max_nodes`` more.
        features: ``[num_rows, taps, H]``, the target's hidden states.
        sampling: how the sequences choose; None: greedily.
        depth: of the trees, at least 1.
        page_size: positions of a page.

    Returns:
        For every level the children that were named: ``[B, F, R]`` ids of the target, and ``[B, F, R]``
        log-probabilities in fp64, of ``F`` nodes of each tree. The nodes of the first level are the roots, those of the
        others the frontiers that the host finds as well.

    """
    first = inputs.batch
    batch_size = inputs.one_each
    carried = parts.project(features)
    last_rows = (first.cu_seqlens_q[1 : batch_size + 1] - 1).long()
    logits, hidden = parts.forward(first, carried, last_rows)
    rows = DraftRows(first.token_ids[last_rows], carried[last_rows], parts.max_nodes + 1)
    results = hidden[last_rows][:, None]
    growth = parts.growth()
    named: list[Tensor] = []
    for level in range(depth):
        own = None if sampling is None else _at(sampling, batch_size, rows.frontier.shape[1], level)
        ids, log_probs = (
            part.unflatten(0, (batch_size, -1))
            for part in parts.rank(logits, own, rows.tokens.gather(1, rows.frontier).flatten(), level)
        )
        named += [ids, log_probs]
        frontier = growth.frontier(log_probs) if level + 1 < depth else None
        if frontier is None:
            break
        children = frontier.parents * ids.shape[2] + frontier.ranks
        rows.add(frontier, ids.flatten(1).gather(1, children), results)
        batch = _batch(first, batch_size, rows, page_size)
        num_rows = rows.tokens.shape[1]
        wanted = (rows.frontier + num_rows * torch.arange(batch_size, device=ids.device)[:, None]).flatten()
        logits, hidden = parts.forward(batch, rows.inputs.flatten(0, 1), wanted)
        results = hidden.unflatten(0, (batch_size, num_rows))
    return tuple(named)


def _batch(first: RaggedBatch, batch_size: int, rows: DraftRows, page_size: int) -> RaggedBatch:
    """Lay out the rows of all trees: the root where the last row of the first forward was, the others behind it."""
    num_rows = rows.tokens.shape[1]
    table = first.block_table[:batch_size]
    roots = (first.seqused_k[:batch_size, None] - 1).clamp(min=0)  # of a full bucket, a place may have no row
    entries = roots + torch.arange(num_rows, dtype=torch.int32, device=roots.device)
    slots = table.gather(1, (entries // page_size).long()) * page_size + entries % page_size
    starts = num_rows * torch.arange(batch_size + 1, dtype=torch.int32, device=roots.device)
    return replace(
        first,
        token_ids=rows.tokens.flatten(),
        positions=(roots + rows.depths).flatten(),
        slot_mapping=slots.flatten(),
        cu_seqlens_q=starts,
        cu_seqlens=starts,
        seqused_k=(roots + num_rows).flatten(),
        block_table=table,
        most_rows=num_rows,
        max_seqlen_q=num_rows,
        tree_mask=rows.mask(),
    )


def _at(sampling: Sampling, batch_size: int, count: int, depth: int) -> Sampling:
    """Return how ``count`` nodes of each sequence at a depth choose, without repetition penalties."""
    own = first_of(sampling, batch_size)

    def each(column: Tensor) -> Tensor:
        return column[:, None].expand(-1, count).contiguous().flatten()  # of one sequence, flatten() alone is a view

    return replace(
        own,
        temperatures=each(own.temperatures),
        top_k=each(own.top_k),
        top_p=each(own.top_p),
        min_p=each(own.min_p),
        repetition_penalties=each(own.repetition_penalties),
        seeds=each(own.seeds),
        positions=each(own.positions + depth),
        cu_seen=own.cu_seen.new_zeros(batch_size * count + 1),
    )
