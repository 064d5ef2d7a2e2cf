"""Oracle of ``verify_chain``: which draft tokens the target itself would have emitted."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

INVALID_TOKEN = -1


def verify_chain(logits: Tensor, token_ids: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compare every draft token with the target's own greedy choice.

    Sequence b was fed rows ``cu_seqlens[b]:cu_seqlens[b + 1]``: its last committed token, then its draft tokens.
    Row j's logits say what the target emits after that row, so they judge the token fed in row j + 1.

    Args:
        logits: ``[T, vocab_size]`` of fp32, fp16 or bf16.
        token_ids: ``[T]`` int64, what was fed.
        cu_seqlens: ``[B + 1]`` int32; every sequence has at least one row.

    Returns:
        ``target_tokens [T]`` int64: the argmax of each row, the lowest id among equals, -1 if the row holds a NaN;
        ``num_accepted [B]`` int32: draft tokens equal to the target's, up to the first that is not;
        ``next_tokens [B]`` int64: the target's token after the accepted ones (correction or bonus; -1 if NaN).

    """
    best = logits.argmax(dim=-1)  # torch returns the first of equal maxima
    target_tokens = torch.where(logits.isnan().any(dim=-1), INVALID_TOKEN, best)
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
