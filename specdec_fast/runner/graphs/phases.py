"""What the graph of each phase of a step computes, on the inputs of a bucket and without the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.batch.recurrent_batch import RecurrentBatch
from specdec_fast.batch.sampling_batch import Sampling, after
from specdec_fast.runner.graphs.inputs import Inputs

# Four int32 are 16 bytes. Triton compiles another kernel for an address that is not a multiple of 16.
_ALIGNED = 4


class Choices(NamedTuple):
    """How graphs choose tokens, without waiting for the device."""

    # Returns tokens ``[N]`` from logits ``[N, V]``, with ids below a number; Sampling None: greedily. It also takes the
    # rows' own tokens ``[N]``, and ``[N + 1]`` int32, 0 to N.
    choose: Callable[[Tensor, int, Sampling | None, Tensor, Tensor], Tensor]
    verify: Callable[[Tensor, Tensor, Tensor, Sampling | None, Tensor | None], tuple[Tensor, ...]]  # ``verify_chain``
    vocab_size: int  # of the model


def verification(
    forward: Callable[[RaggedBatch], Tensor], inputs: Inputs, sampling: Sampling | None, choices: Choices
) -> tuple[Tensor, Tensor]:
    """Compute the rows of last committed tokens and draft tokens, and what is accepted.

    ``forward`` computes the logits of all ``T`` rows of a bucket with ``B`` places for sequences.

    Returns:
        Logits ``[T, V]``, and ``[T + 2 B]`` int64: the target's tokens, the numbers of accepted draft tokens and the
        next tokens; for trees ``[2 T + 2 B]``, with the accepted rows at the end.

    """
    batch = replace(inputs.batch, token_ids=inputs.token_ids(choices.vocab_size))
    logits = forward(batch)
    results = choices.verify(logits, batch.token_ids, batch.cu_seqlens, sampling, inputs.parents)
    return logits, torch.cat([part.long() for part in results])


# A forward of a drafting loop, with or without a graph. It takes a batch, what its rows take besides their tokens,
# ``[T, size]`` (None: nothing), and the rows whose logits are wanted (None: all). It returns these logits, and what the
# rows that follow take.
LoopForward = Callable[[RaggedBatch, Any, Tensor | None], tuple[Tensor, Any]]


def drafting_loop(
    forward: LoopForward,
    inputs: Inputs,
    sampling: Sampling | None,
    choose: Callable[[Tensor, Sampling | None, Tensor, Tensor], Tensor],
    num_forwards: int,
    page_size: int,
    carried: Tensor | None = None,
) -> tuple[Tensor]:
    """Run the forwards of a drafting step, each on the tokens, and the hidden states, of the one before.

    Args:
        forward: computes rows.
        inputs: of the bucket, of which ``one_each`` places are for sequences.
        sampling: how the sequences choose; None: greedily.
        choose: ``Choices.choose`` without the number of ids.
        num_forwards: ``K``.
        page_size: positions of a page.
        carried: ``[num_rows, size]``, what the rows of the first forward take besides their tokens; None: nothing.

    Returns:
        ``[one_each, K]`` int64, the tokens chosen after each forward.

    """
    first = inputs.batch
    sampling = sampling and first_of(sampling, inputs.one_each)
    last_rows = (first.cu_seqlens_q[1 : inputs.one_each + 1] - 1).long()
    one_each = torch.arange(inputs.one_each + 1, dtype=torch.int32, device=last_rows.device)
    logits, carried = forward(first, carried, last_rows)
    carried = None if carried is None else carried[last_rows]
    chosen = [choose(logits, sampling, first.token_ids[last_rows], one_each)]
    for batch_of in later_batches(first, one_each, num_forwards - 1, page_size):
        sampling = sampling and after(sampling, chosen[-1])
        logits, carried = forward(batch_of(token_ids=chosen[-1]), carried, None)
        chosen.append(choose(logits, sampling, chosen[-1], one_each))
    return (torch.stack(chosen, dim=1),)


class ChainParts(NamedTuple):
    """The parts of a drafter whose rows take the hidden states of the rows before them."""

    project: Callable[[Tensor], Tensor]  # from the target's hidden states ``[T, taps, H]`` to what rows take
    forward: LoopForward
    choose: Callable[[Tensor, Sampling | None, Tensor, Tensor], Tensor]  # as in ``drafting_loop``; ids of the target


def chain_loop(
    parts: ChainParts,
    inputs: Inputs,
    features: Tensor,
    sampling: Sampling | None,
    num_forwards: int,
    page_size: int,
) -> tuple[Tensor]:
    """Run the drafting loop of a drafter over the target's hidden states ``[num_rows, taps, H]``."""
    carried = parts.project(features)
    return drafting_loop(parts.forward, inputs, sampling, parts.choose, num_forwards, page_size, carried)


def first_of(sampling: Sampling, count: int) -> Sampling:
    """Return how the first ``count`` sequences choose."""
    return Sampling(
        temperatures=sampling.temperatures[:count],
        top_k=sampling.top_k[:count],
        top_p=sampling.top_p[:count],
        min_p=sampling.min_p[:count],
        repetition_penalties=sampling.repetition_penalties[:count],
        seeds=sampling.seeds[:count],
        positions=sampling.positions[:count],
        seen_ids=sampling.seen_ids,
        cu_seen=sampling.cu_seen[: count + 1],
    )


def later_batches(
    first: RaggedBatch, one_each: Tensor, num_forwards: int, page_size: int
) -> list[partial[RaggedBatch]]:
    """Lay out one row per sequence for each forward after the first, as ``decode_batches`` does, but on the device.

    All forwards are laid out at once, because a layout is ten small kernels. Sequences of padding rows stay in the
    scratch page.

    Args:
        first: the first forward.
        one_each: ``[N + 1]`` int32, 0 to N: the forwards have one row for each of the first ``N`` places.
        num_forwards: number of forwards after the first.
        page_size: positions of a page.

    Returns:
        One function per forward; called with the keyword ``token_ids``, ``[N]``, it returns the batch.

    """
    num_rows = len(one_each) - 1
    table = first.block_table[:num_rows]
    missing = -num_rows % _ALIGNED
    # Padding rows repeat the last sequence. They only align the rows of the next forward, and no forward reads them.
    used = torch.cat([first.seqused_k[:num_rows], first.seqused_k[num_rows - 1 : num_rows].expand(missing)])
    tables = torch.cat([table, table[-1:].expand(missing, -1)])
    positions = used + torch.arange(num_forwards, dtype=torch.int32, device=used.device)[:, None]
    pages = tables.gather(1, (positions // page_size).long().T).T
    slots = (pages * page_size + positions % page_size).contiguous()
    wide = positions.long()
    lengths = positions + 1
    recurrent = _later_recurrent(first.recurrent, one_each, positions)
    return [
        partial(
            replace,
            first,
            recurrent=recurrent[i],
            positions=wide[i, :num_rows],
            slot_mapping=slots[i, :num_rows],
            cu_seqlens_q=one_each,
            cu_seqlens=one_each,
            seqused_k=lengths[i, :num_rows],
            block_table=table,
            most_rows=1,
            max_seqlen_q=1,
        )
        for i in range(num_forwards)
    ]


def _later_recurrent(
    first: RecurrentBatch | None, one_each: Tensor, positions: Tensor
) -> list[RecurrentBatch] | list[None]:
    """Return the rows for recurrent layers of each later forward, ``StatePool.behind`` on the device.

    All rows of the first forward are stored, and none of the later ones, which the next forward replays instead.

    Args:
        first: of the first forward; None: the model has no such layers.
        one_each: as for ``later_batches``.
        positions: ``[num_forwards, at least N]`` int32, of the rows; a multiple of 16 bytes from forward to forward.

    """
    if first is None:
        return [None] * len(positions)
    num_rows = len(one_each) - 1
    slots = first.slots[:num_rows]
    lengths = first.state_lengths[:num_rows] + first.num_stored[:num_rows]
    replayed = torch.zeros_like(positions)
    torch.sub(positions[:, :num_rows], lengths, out=replayed[:, :num_rows])
    none = torch.zeros_like(lengths)
    return [
        RecurrentBatch(
            cu_seqlens=one_each,
            slots=slots,
            state_lengths=lengths,
            num_replayed=replayed[i, :num_rows],
            num_stored=none,
        )
        for i in range(len(positions))
    ]
