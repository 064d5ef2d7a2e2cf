"""Oracle of ``verify_chain``: which draft tokens the target itself would have emitted."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.oracle.sampling import INVALID_TOKEN, sampled_tokens

__all__ = ["INVALID_TOKEN", "verify_chain"]


def verify_chain(
    logits: Tensor, token_ids: Tensor, cu_seqlens: Tensor, sampling: Sampling | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare every draft token with the target's own choice.

    Sequence b was fed rows ``cu_seqlens[b]:cu_seqlens[b + 1]``: its last committed token, then its draft tokens.
    Row j's logits say what the target emits after that row, so they judge the token fed in row j + 1.

    The choice is the most likely token, the lowest id among equals, unless ``sampling`` says otherwise. It then is
    made in float64, for each row by itself:

    1. logits of seen tokens are divided by the repetition penalty (negative ones multiplied), each token once; seen
       are the sequence's ``seen_ids`` and what it was fed in rows 0 to j;
    2. temperature 0: the largest logit wins. So it does if it is infinite;
    3. scores are the differences to the largest logit, divided by the temperature;
    4. ``top_k``, of these ``top_p``, of these ``min_p`` keep scores down to a threshold; equals stay together;
    5. the largest sum of a kept score and its noise wins, the lowest id among equals; the noise is keyed by seed,
       position and token id, see ``oracle/sampling.py``.

    Args:
        logits: ``[T, vocab_size]`` of fp32, fp16 or bf16.
        token_ids: ``[T]`` int64, what was fed.
        cu_seqlens: ``[B + 1]`` int32; every sequence has at least one row.
        sampling: how each sequence chooses; None: all are greedy.

    Returns:
        ``target_tokens [T]`` int64: the choice of each row, -1 if the row holds a NaN;
        ``num_accepted [B]`` int32: draft tokens equal to the target's, up to the first that is not;
        ``next_tokens [B]`` int64: the target's token after the accepted ones (correction or bonus; -1 if NaN).

    """
    if sampling is None:
        best = logits.argmax(dim=-1)  # torch returns the first of equal maxima
        target_tokens = torch.where(logits.isnan().any(dim=-1), INVALID_TOKEN, best)
    else:
        target_tokens = sampled_tokens(logits, token_ids, cu_seqlens, sampling)
    fed, wanted, starts = token_ids.tolist(), target_tokens.tolist(), cu_seqlens.tolist()
    num_accepted = []
    for start, stop in pairwise(starts):
        accepted = 0
        while start + accepted + 1 < stop and fed[start + accepted + 1] == wanted[start + accepted]:
            accepted += 1
        num_accepted.append(accepted)
    next_tokens = [wanted[start + accepted] for start, accepted in zip(starts, num_accepted, strict=False)]
    return (
        target_tokens,
        torch.tensor(num_accepted, dtype=torch.int32, device=logits.device),
        torch.tensor(next_tokens, dtype=torch.int64, device=logits.device),
    )
