"""The simulated machines, pairs and texts over which the mechanisms of ``num_draft_tokens="auto"`` are ablated.

Forwards cost what was measured (two cores of an AMD EPYC, Zen 4; bf16; two threads; the least of twelve profiles for
the bundled pair and the pair of ten million parameters, 2026-11-22; the shape of Qwen3-0.6B 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from bench.common.simulation import World

# Milliseconds by rows: of the target, of the draft; at 0 rows of a proposal besides. And of a step besides forwards.
COSTS: dict[str, tuple[dict[int, float], dict[int, float], float]] = {
    "demo": (
        {1: 0.160, 2: 0.195, 4: 0.221, 8: 0.272, 16: 0.436, 32: 0.729, 64: 1.033, 128: 1.81, 288: 3.68},
        {0: 0.0135, 1: 0.0150, 2: 0.0272, 4: 0.0316, 8: 0.0409, 16: 0.0669, 32: 0.113, 64: 0.202},
        0.04,
    ),
    "10m": (
        {1: 1.33, 2: 1.33, 4: 1.66, 8: 2.47, 16: 3.94, 32: 5.58, 64: 8.07, 128: 13.1, 288: 23.6},
        {0: 0.0300, 1: 0.0482, 2: 0.0482, 4: 0.115, 8: 0.185, 16: 0.351, 32: 0.657, 64: 1.39},
        0.05,
    ),
    "qwen3-0.6b": (
        {1: 44, 3: 53, 5: 59, 8: 76, 16: 112, 24: 129, 32: 170, 48: 230, 64: 282, 128: 530, 300: 1200},
        {1: 4.92, 64: 31.4},
        0.1,
    ),
}
# Kinds of positions, equally frequent, by the probability that the draft token is accepted, which its score states.
KINDS = ((0.97,), (0.85,), (0.35,))
# Of a drafter of trees that is sure at every second position, by rank.
TREE_KINDS = ((0.92, 0.04, 0.02, 0.01), (0.45, 0.15, 0.08, 0.05))
CHOICE = 9e-5  # seconds of a choice of K: in a run, where it finds the caches cold, not alone (4e-5)
# Of a text's position by the number of its sequence; the last two change when half of the prompts have been decoded.
ACCEPTANCES = ("0.8", "0.4", "0", "0.9:0", "0:0.9")


class Cell(NamedTuple):
    """One world of the ablation, by name.

    Attributes:
        kind: one of ``KINDS_OF_WORLDS``.
        pair: one of ``COSTS``.
        acceptance: of a text's position by the number of its sequence, in equal shares, separated by colons.
        batch_size: sequences in a step at most.

    """

    kind: str
    pair: str
    acceptance: str
    batch_size: int

    def world(self, seed: int, is_refilled: bool = True) -> World:
        """Return its machine and requests."""
        usual = world(self.pair, self.acceptance, self.batch_size, seed, is_refilled)
        return KINDS_OF_WORLDS[self.kind](usual)


def world(pair: str, acceptance: str, batch_size: int, seed: int, is_refilled: bool) -> World:
    """Return the machine, the pair and four batches of requests, sixteen at least."""
    _, draft, overhead = COSTS[pair]
    num = max(16, 4 * batch_size)
    each = [float(part) for part in acceptance.split(":") if part != "-"]
    return World(
        verify=_curve(pair, False),
        draft=_curve(pair, True),
        acceptance=lambda number, _: each[number % num * len(each) // num],
        batch_size=batch_size,
        num_sequences=num,
        prompt_length=64,
        overhead=overhead / 1e3,
        once=draft.get(0, 0.0) / 1e3,
        choice=CHOICE,
        is_refilled=is_refilled,
        seed=seed,
    )


@cache
def _curve(pair: str, is_draft: bool) -> Callable[[int], float]:
    table = {rows: ms for rows, ms in COSTS[pair][is_draft].items() if rows}
    counts, values = list(table), list(table.values())

    @cache
    def seconds(rows: int) -> float:
        if rows > counts[-1]:
            return values[-1] * rows / counts[-1] / 1e3
        return float(np.interp(rows, counts, values)) / 1e3 if rows else 0.0

    return seconds


def scored(each: World) -> World:
    """Return the world with a drafter that drafts any K in one forward and scores its tokens.

    The forward takes as long as one of the pair's draft model over 8 rows a sequence. The policy cannot time it.
    """
    seconds = each.once + each.draft(each.batch_size * 8)
    return replace(each, draft=lambda rows: 0.0, once=seconds, is_profiled=False, rates=KINDS)


def _trees(each: World) -> World:
    return replace(each, rates=TREE_KINDS, max_nodes=16)


def _disturbed(each: World, rows: int) -> World:
    def once(count: int) -> float:
        return 100.0 if count == rows else 1.0

    return replace(each, profile_errors=(once, lambda count: 1.0))


def _scaled_profile(each: World, verify: float, draft: float) -> World:
    return replace(each, profile_errors=(lambda rows: verify, lambda rows: draft))


def _paced(each: World, since: float, until: float, draft: float, verify: float) -> World:
    return replace(each, pace=lambda begun: (draft, verify) if since <= begun < until else (1.0, 1.0))


# The acceptance of these is that of their kinds of positions.
WITH_SCORES = ("trees", "trees, scores too high", "trees, all profiled twice too slow", "chains with scores")
OTHERS = (("demo", "0.8", 8), ("demo", "0.4", 1), ("qwen3-0.6b", "0.8", 1))
# What is unlike the usual world, in which steps have noise of 5% and one forward of a hundred waits.
KINDS_OF_WORLDS: dict[str, Callable[[World], World]] = {
    "usual": lambda each: each,
    "each measurement wrong by a tenth": lambda each: replace(each, mismeasured=0.1),
    "plain measurement disturbed": lambda each: _disturbed(each, each.batch_size),
    "draft measurement disturbed": lambda each: _disturbed(each, 4 * each.batch_size),
    "drafter profiled as too slow": lambda each: replace(
        _scaled_profile(each, 1.0, 4.5), num_sequences=2 * each.num_sequences
    ),
    "all profiled 100 times too slow": lambda each: _scaled_profile(each, 100.0, 100.0),
    "drafter not profiled": lambda each: replace(each, is_profiled=False),
    "noise of 30%": lambda each: replace(each, noise=0.3),
    "one forward of ten waits": lambda each: replace(each, waits=0.1),
    "busy machine at first": lambda each: _paced(each, 0.0, 0.2, 3.0, 3.0),
    "busy machine for a while": lambda each: _paced(each, 0.2, 0.4, 3.0, 3.0),
    "slower from the middle": lambda each: _paced(each, 0.5, 2.0, 2.0, 2.0),
    "drafter slower from the middle": lambda each: _paced(each, 0.5, 2.0, 4.0, 1.0),
    "drafter slower to the middle": lambda each: _paced(each, 0.0, 0.5, 4.0, 1.0),
    "long contexts": lambda each: replace(each, growth=5e-4 * each.verify(1), new_tokens=256),
    "short texts": lambda each: replace(each, new_tokens=32, num_sequences=3 * each.num_sequences),
    "texts that no other follows": lambda each: replace(each, is_refilled=False),
    "the same, measurements wrong by a tenth": lambda each: replace(each, is_refilled=False, mismeasured=0.1),
    "drafter that proposes 30%": lambda each: replace(each, proposes=0.3),
    "trees": _trees,
    "trees, scores too high": lambda each: replace(_trees(each), score_scale=0.5),
    "trees, all profiled twice too slow": lambda each: _scaled_profile(_trees(each), 2.0, 2.0),
    "chains with scores": scored,
}


def cells(batch_sizes: list[int]) -> Iterator[Cell]:
    """Yield the usual worlds of all pairs and acceptances at these batch sizes, and three of each other kind."""
    for pair, acceptance, batch_size in product(COSTS, ACCEPTANCES, batch_sizes):
        yield Cell("usual", pair, acceptance, batch_size)
    for kind, (pair, acceptance, batch_size) in product(KINDS_OF_WORLDS, OTHERS):
        if kind not in ("usual", *WITH_SCORES):
            yield Cell(kind, pair, acceptance, batch_size)
    for kind, pair, batch_size in product(WITH_SCORES, ("demo", "qwen3-0.6b"), (1, 8)):
        yield Cell(kind, pair, "-", batch_size)
