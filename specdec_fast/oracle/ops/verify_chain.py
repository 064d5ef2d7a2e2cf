"""Oracle of ``verify_chain``: which draft tokens, of a chain or a tree, the target itself would have emitted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.oracle.sampling import INVALID_TOKEN, sampled_tokens

__all__ = ["INVALID_TOKEN", "verify_chain"]


def verify_chain(
    logits: Tensor,
    token_ids: Tensor,
    cu_seqlens: Tensor,
    sampling: Sampling | None = None,
    parents: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compare every draft token with the target's own choice.

    Sequence b has rows ``cu_seqlens[b]:cu_seqlens[b + 1]``: its last committed token, then its draft tokens. The logits
    of row j determine the target's token after that row, which is compared with the draft token in row j + 1.

    In a tree, the target's token after a row is compared with the tokens of the row's children. The first child that
    equals it is accepted, and its own children are next. A row's depth takes the place of j: it determines the position
    of the noise.

    Without ``sampling``, the target's token is the most likely one, among equals the lowest id. With ``sampling``,
    every row chooses in float64 by these rules:

    1. the logits of seen tokens are divided by the repetition penalty (negative ones are multiplied), each token once;
       seen tokens are the sequence's ``seen_ids`` and its tokens in rows 0 to j (in a tree, those on the path to j);
    2. at temperature 0, or if the largest logit is infinite, the largest logit wins;
    3. scores are the differences to the largest logit, divided by the temperature;
    4. ``top_k``, then ``top_p``, then ``min_p`` keep scores down to a threshold; equal scores are kept or dropped
       together;
    5. the largest sum of a kept score and its noise wins, among equals the lowest id; the noise is keyed by seed,
       position and token id, see ``oracle/sampling.py``.

    Args:
        logits: ``[T, vocab_size]`` of fp32, fp16 or bf16.
        token_ids: ``[T]`` int64, the token of each row.
        cu_seqlens: ``[B + 1]`` int32; every sequence has at least one row.
        sampling: how each sequence chooses its tokens; None: all greedily.
        parents: ``[T]`` int32, for trees: of each row its parent, an earlier row of its sequence, counted from the
            sequence's first row, which has -1. None: every row's parent is the row before it.

    Returns:
        ``target_tokens [T]`` int64: the choice of each row, -1 if the row holds a NaN;
        ``num_accepted [B]`` int32: draft tokens equal to the target's, up to the first that differs;
        ``next_tokens [B]`` int64: the target's token after the accepted ones (correction or bonus; -1 if NaN);
        with ``parents`` also ``accepted_rows [T]`` int32: from each sequence's first row on, the rows that were
        accepted, counted from that row, in the order of their depth; then -1.

    """
    if sampling is None:
        best = logits.argmax(dim=-1)  # torch returns the first of equal maxima
        target_tokens = torch.where(logits.isnan().any(dim=-1), INVALID_TOKEN, best)
    else:
        target_tokens = sampled_tokens(logits, token_ids, cu_seqlens, sampling, parents)
    fed, wanted = token_ids.tolist(), target_tokens.tolist()
    num_accepted, next_tokens, accepted_rows = _accepted(fed, wanted, cu_seqlens, parents)
    found = (
        target_tokens,
        torch.tensor(num_accepted, dtype=torch.int32, device=logits.device),
        torch.tensor(next_tokens, dtype=torch.int64, device=logits.device),
    )
    return found if parents is None else (*found, torch.tensor(accepted_rows, dtype=torch.int32, device=logits.device))


def _accepted(
    fed: list[int], wanted: list[int], cu_seqlens: Tensor, parents: Tensor | None
) -> tuple[list[int], list[int], list[int]]:
    """Return the numbers of accepted rows, the next tokens, and the accepted rows, for all sequences."""
    num_accepted, next_tokens, accepted_rows = [], [], []
    for start, stop in pairwise(cu_seqlens.tolist()):
        above = range(-1, stop - start - 1) if parents is None else parents[start:stop].tolist()
        path = _accepted_path(fed[start:stop], wanted[start:stop], above)
        num_accepted.append(len(path))
        next_tokens.append(wanted[start + (path[-1] if path else 0)])
        accepted_rows += [*path, *[-1] * (stop - start - len(path))]
    return num_accepted, next_tokens, accepted_rows


def _accepted_path(fed: list[int], wanted: list[int], parents: Sequence[int]) -> list[int]:
    """Return the accepted rows of one sequence, from the children of row 0 down."""
    path, row = [], 0
    for child in range(1, len(fed)):  # parents precede their children
        if parents[child] == row and fed[child] == wanted[row]:
            path.append(child)
            row = child
    return path
