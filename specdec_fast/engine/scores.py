"""Scores of tokens by the target's logits: log-probabilities, ranks, and the most likely tokens."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from specdec_fast.device_copy import to_device
from specdec_fast.ops import INVALID_TOKEN
from specdec_fast.request.sequence import Sequence
from specdec_fast.results import TokenScores

_ROWS = 64  # whose scores are computed at a time: several vectors as long as the vocabulary each
_ID_BITS = 32
_LARGEST_ID = 2**_ID_BITS - 1


def emission_scores(
    batch: Many[Sequence], accepted_rows: Many[Many[int]], emissions: Many[list[int]], logits: Tensor
) -> list[TokenScores | None]:
    """Return the scores of emitted tokens for the sequences that request them.

    Token i of a sequence's emission was chosen at its i-th accepted row of ``logits [T, vocab_size]``. A sequence that
    requests none gets None; ``INVALID_TOKEN`` gets no score.
    """
    if all(sequence.logprobs is None for sequence in batch):
        return [None] * len(batch)
    rows: list[int] = []
    tokens: list[int] = []
    spans: list[tuple[int, int] | None] = []
    num_top = 0
    for sequence, own, emission in zip(batch, accepted_rows, emissions, strict=True):
        if sequence.logprobs is None:
            spans.append(None)
            continue
        length = len(emission) - (emission[-1] == INVALID_TOKEN)
        spans.append((len(rows), len(rows) + length))
        rows += own[:length]
        tokens += emission[:length]
        num_top = max(num_top, sequence.params.num_top_logprobs)
    scores = token_scores(logits, rows, tokens, num_top)
    return [
        None if span is None else scores.part(*span, sequence.params.num_top_logprobs)
        for sequence, span in zip(batch, spans, strict=True)
    ]


def token_scores(
    logits: Tensor, rows: list[int], tokens: list[int], num_top: int = 0, with_ranks: bool = False
) -> TokenScores:
    """Return the scores of ``tokens[i]`` at row ``rows[i]`` of ``logits [T, vocab_size]``; of a NaN row they are NaN.

    Log-probabilities are float32, and the sum over the vocabulary is computed in float32, whatever the dtype of the
    logits. A row's scores do not depend on the other rows.
    """
    index = to_device([*rows, *tokens], logits.device).view(2, -1)
    num_top = min(num_top, logits.shape[1])
    logprobs = []
    ranks = []
    top_ids = []
    top_logprobs = []
    for some_rows, some_tokens in zip(index[0].split(_ROWS), index[1].split(_ROWS), strict=True):
        own = logits[some_rows].float()  # [R, vocab_size]
        own_logprobs = own.log_softmax(dim=-1)
        logprobs.append(own_logprobs.gather(1, some_tokens[:, None])[:, 0])
        if with_ranks:
            ranks.append(_ranks(own, some_tokens[:, None]))
        if num_top:
            top_ids.append(_most_likely(own, num_top))
            top_logprobs.append(own_logprobs.gather(1, top_ids[-1]))
    scores = TokenScores(torch.cat(logprobs).tolist())
    if ranks:
        scores.ranks = torch.cat(ranks).tolist()
    if top_ids:
        pairs = zip(torch.cat(top_ids).tolist(), torch.cat(top_logprobs).tolist(), strict=True)
        scores.top_logprobs = [dict(zip(ids, values, strict=True)) for ids, values in pairs]
    return scores


def _ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the place of a token in each row, from 1, ``[R]`` int64: ``logits [R, V]``, ``tokens [R, 1]``."""
    chosen = logits.gather(1, tokens)
    ids = torch.arange(logits.shape[1], device=logits.device)
    is_before = (logits > chosen) | ((logits == chosen) & (ids < tokens))
    return is_before.sum(dim=1) + 1


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """Return the ids of the largest of ``logits [R, V]`` float32 in each row, ``[R, count]`` int64, in their order.

    ``topk`` orders equal numbers as it likes. So it gets integers that all differ: the order of a float's bits, and
    behind it the id, of which the lowest must win.
    """
    bits = (logits + 0.0).view(torch.int32)  # minus zero becomes zero, which it equals
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (order << _ID_BITS) + (_LARGEST_ID - ids)
    return _LARGEST_ID - (keys.topk(count).values & _LARGEST_ID)
