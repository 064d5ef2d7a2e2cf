"""Tables as ``bench.laws`` writes them, of drafters that follow Scylla's laws."""

from __future__ import annotations

from itertools import accumulate
from math import log, log10
from operator import mul
from typing import Any

from specdec_fast.planner.laws import acceptance_like

K = 6
TOKENS = (1_000, 10_000, 100_000, 1_000_000)


def accepted(layers: int, tokens: int) -> float:
    """Return the accepted tokens of a drafter, which follow both laws."""
    return 0.3 * log(tokens) - 1.5 + 0.5 * log10(layers)


def point(layers: int, tokens: int, seed: int = 0, error: float = 0.0) -> dict[str, Any]:
    """Return a drafter whose draft tokens are accepted with one probability each."""
    value = accepted(layers, tokens) + error
    acceptance = acceptance_like([0.5] * K, accepted(layers, tokens))
    counts = [round(1e6 * p) for p in accumulate(acceptance, mul)]
    return {
        "layers": layers,
        "training_tokens": tokens,
        "seed": seed,
        "accepted_tokens": value,
        "num_drafts": 1_000_000,
        "accepted_per_position": counts,
    }


def costs(layers: int) -> dict[str, Any]:
    """Return forwards that take as long with 16 rows as with one, and drafters whose layers cost 0.05 each."""
    return {
        "layers": layers,
        "verify": [[1, 1.0], [16, 1.0], [32, 2.0], [64, 4.0]],
        "draft": [[0, 0.0], [1, 0.05 * layers], [8, 0.05 * layers]],
    }


def table(layers: tuple[int, ...] = (1, 2, 4), tokens: tuple[int, ...] = TOKENS) -> dict[str, Any]:
    """Return a whole grid of one seed."""
    points = [point(number, budget) for number in layers for budget in tokens]
    return {"num_draft_tokens": K, "points": points, "costs": [costs(number) for number in layers]}
