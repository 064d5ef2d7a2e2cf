"""Pearson's chi-squared test, by which draws are compared with the law that they should follow."""

from __future__ import annotations

import torch
from torch import Tensor

SIGNIFICANCE = 1e-4  # p-values of right results lie above it; those of every mistake that tests make are 0 in float64


def p_value(outcomes: Tensor, probs: Tensor) -> float:
    """Pearson's chi-squared test of outcome numbers; outcomes expected fewer than five times are counted as one."""
    counts = torch.bincount(outcomes, minlength=len(probs)).double()
    expected = probs * len(outcomes)
    if bool(counts[probs == 0].any()):
        return 0.0
    rare = expected < 5
    counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    kept = expected > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    return float(torch.special.gammaincc((kept.sum() - 1).double() / 2, statistic / 2))
