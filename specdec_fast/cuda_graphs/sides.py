"""What the graph of each side of a step computes, on the inputs of a bucket and without the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.batch.sampling_batch import Sampling, after
from specdec_fast.cuda_graphs.inputs import Inputs


class Choices(NamedTuple):
    """How graphs choose tokens, without waiting for the device.

    Attributes:
        choose: returns tokens ``[N]`` from logits ``[N, V]``, with ids below a number; ``Sampling`` None: greedily.
        verify: ``verify_chain``.
        vocab_size: of the model.

    """

    choose: Callable[[Tensor, int, Sampling | None], Tensor]
    verify: Callable[[Tensor, Tensor, Tensor, Sampling | None, Tensor | None], tuple[Tensor, ...]]
    vocab_size: int


def verification(
    forward: Callable[[RaggedBatch], Tensor], inputs: Inputs, sampling: Sampling | None, choices: Choices
) -> tuple[Tensor, Tensor]:
    """Compute the rows of last committed tokens and draft tokens, and what is accepted.

    Args:
        forward: computes the logits of all rows.
        inputs: of the bucket; ``T`` rows, ``B`` places for sequences.
        sampling: how the sequences choose; None: greedily.
        choices: how tokens are chosen.

    Returns:
        Logits ``[T, V]``, and ``[T + 2 B]`` int64: the target's tokens, the numbers of accepted draft tokens and the
        next tokens; for trees ``[2 T + 2 B]``, with the accepted rows at the end.

    """
    batch = replace(inputs.batch, token_ids=inputs.token_ids(choices.vocab_size))
    logits = forward(batch)
    found = choices.verify(logits, batch.token_ids, batch.cu_seqlens, sampling, inputs.parents)
    return logits, torch.cat([part.long() for part in found])


def drafting_loop(
    forward: Callable[[RaggedBatch, Tensor | None], Tensor],
    inputs: Inputs,
    sampling: Sampling | None,
    choose: Callable[[Tensor, Sampling | None], Tensor],
    size: tuple[int, int],
) -> tuple[Tensor]:
    """Run the forwards of a drafting step.

    Args:
        forward: computes the logits of the rows with the given indices, or of all.
        inputs: of the bucket, of which ``one_each`` places are for sequences.
        sampling: how the sequences choose; None: greedily.
        choose: returns a token for each row of logits.
        size: number of forwards, ``K``, and positions of a page.

    Returns:
        ``[one_each, K]`` int64, the tokens chosen after each forward.

    """
    first, (num_forwards, page_size) = inputs.batch, size
    sampling = sampling and first_of(sampling, inputs.one_each)
    last_rows = (first.cu_seqlens_q[1 : inputs.one_each + 1] - 1).long()
    chosen = [choose(forward(first, last_rows), sampling)]
    for ahead in range(num_forwards - 1):
        sampling = sampling and after(sampling, chosen[-1])
        chosen.append(choose(forward(one_row_each(first, chosen[-1], ahead, page_size), None), sampling))
    return (torch.stack(chosen, dim=1),)


class ChainParts(NamedTuple):
    """The parts of a drafter whose rows take the hidden states of the rows before them.

    Attributes:
        project: from the target's hidden states ``[T, taps, H]`` to what rows take, ``[T, size]``.
        forward: from a batch, what its rows take, and the rows whose logits are wanted (None: all) to these logits and
            the hidden states of all rows ``[T, size]``.
        choose: returns the target's token for each row of logits; ``Sampling`` None: greedily.

    """

    project: Callable[[Tensor], Tensor]
    forward: Callable[[RaggedBatch, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    choose: Callable[[Tensor, Sampling | None], Tensor]


def chain_loop(
    parts: ChainParts, inputs: Inputs, features: Tensor, sampling: Sampling | None, size: tuple[int, int]
) -> tuple[Tensor]:
    """Run the forwards of a drafting step, each on the tokens and the hidden states of the one before.

    Args:
        parts: of the drafter.
        inputs, sampling, size: as in ``drafting_loop``.
        features: ``[num_rows, taps, H]``, the target's hidden states for the rows of the first forward.

    Returns:
        ``[one_each, K]`` int64, the tokens chosen after each forward.

    """
    first, (num_forwards, page_size) = inputs.batch, size
    sampling = sampling and first_of(sampling, inputs.one_each)
    last_rows = (first.cu_seqlens_q[1 : inputs.one_each + 1] - 1).long()
    logits, hidden = parts.forward(first, parts.project(features), last_rows)
    hidden, chosen = hidden[last_rows], [parts.choose(logits, sampling)]
    for ahead in range(num_forwards - 1):
        sampling = sampling and after(sampling, chosen[-1])
        logits, hidden = parts.forward(one_row_each(first, chosen[-1], ahead, page_size), hidden, None)
        chosen.append(parts.choose(logits, sampling))
    return (torch.stack(chosen, dim=1),)


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


def one_row_each(first: RaggedBatch, token_ids: Tensor, ahead: int, page_size: int) -> RaggedBatch:
    """Lay out one row per sequence, ``ahead`` positions after the next one of the batch: ``token_ids [N]``.

    As ``forward_layout.decode_batches`` does, but on the device. Sequences of padding rows stay in the scratch page.
    """
    num_rows = token_ids.shape[0]
    positions, table = first.seqused_k[:num_rows] + ahead, first.block_table[:num_rows]
    pages = table.gather(1, (positions // page_size).long()[:, None])[:, 0]
    cu_seqlens = torch.arange(num_rows + 1, dtype=torch.int32, device=token_ids.device)
    return replace(
        first,
        token_ids=token_ids,
        positions=positions.long(),
        slot_mapping=pages * page_size + positions % page_size,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens=cu_seqlens,
        seqused_k=positions + 1,
        block_table=table,
        most_rows=1,
        max_seqlen_q=1,
    )
