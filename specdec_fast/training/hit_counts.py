"""How often drafted tokens are right, by depth and rank: what static trees are chosen from."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.drafters.shared.trainable import DrafterModule


@torch.no_grad()
def hit_counts(module: DrafterModule, features: Tensor, token_ids: Tensor, lengths: Tensor, shape: list[int]) -> Tensor:
    """Count how often the token at each depth is the one of each rank, where all tokens before it had a counted rank.

    Args:
        module: drafts; step d has depth d.
        features: ``[B, L, feature_size]`` of texts.
        token_ids: ``[B, L]`` int64, the texts, padded at the end.
        lengths: ``[B]``.
        shape: ``[depths, ranks]`` to count; texts of L tokens have L - 2 depths at most.

    Returns:
        ``[depths, 1 + ranks]`` int64: the number of positions that were looked at, then those of each rank.
    """
    num_depths, num_ranks = shape
    counts = torch.zeros(num_depths, 1 + num_ranks, dtype=torch.int64, device="cpu")
    reached = torch.ones_like(token_ids, dtype=torch.bool)
    for depth, logits in enumerate(module.unroll(features, token_ids, min(num_depths, token_ids.shape[1] - 2))):
        positions = torch.arange(2 + depth, token_ids.shape[1], device=token_ids.device)
        valid = reached[:, : len(positions)] & (positions < lengths[:, None])
        best = logits[:, : len(positions)].topk(num_ranks, dim=-1).indices
        is_hit = (best == token_ids[:, 2 + depth :, None]) & valid[..., None]
        counts[depth, 0] += valid.sum().cpu()
        counts[depth, 1:] += is_hit.sum((0, 1)).cpu()
        reached = is_hit.any(-1)
    return counts
