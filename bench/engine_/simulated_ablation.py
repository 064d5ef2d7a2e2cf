"""``num_draft_tokens="auto"`` beside fixed K in simulated time, where a percent is visible and no clock matters.

Forwards cost what was measured (two cores of an AMD EPYC, Zen 4; bf16; two threads; the least of twelve profiles for
the bundled pair and the pair of ten million parameters, 2026-11-22; the shape of Qwen3-0.6B 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from bench.common.simulation import World, best_fixed, speed
from bench.engine_.length_ablation import FIXED
from specdec_fast.commands.common import format_table
from specdec_fast.speculation_length import Profiler
from specdec_fast.speculation_length.adaptive import AdaptiveLength

# Milliseconds by rows: of the target, of the draft; at 0 rows of a proposal besides.
COSTS: dict[str, tuple[dict[int, float], dict[int, float]]] = {
    "demo": (
        {1: 0.160, 2: 0.195, 4: 0.221, 8: 0.272, 16: 0.436, 32: 0.729, 64: 1.033, 128: 1.81, 288: 3.68},
        {0: 0.0135, 1: 0.0150, 2: 0.0272, 4: 0.0316, 8: 0.0409, 16: 0.0669, 32: 0.113, 64: 0.202},
    ),
    "10m": (
        {1: 1.33, 2: 1.33, 4: 1.66, 8: 2.47, 16: 3.94, 32: 5.58, 64: 8.07, 128: 13.1, 288: 23.6},
        {0: 0.0300, 1: 0.0482, 2: 0.0482, 4: 0.115, 8: 0.185, 16: 0.351, 32: 0.657, 64: 1.39},
    ),
    "qwen3-0.6b": (
        {1: 44, 3: 53, 5: 59, 8: 76, 16: 112, 24: 129, 32: 170, 48: 230, 64: 282, 128: 530, 300: 1200},
        {1: 4.92, 64: 31.4},
    ),
}
# Kinds of positions, equally frequent, by the probability that the draft token is accepted, which its score states.
KINDS = ((0.97,), (0.85,), (0.35,))
# Seconds of a step besides forwards, and for each sequence. Plain steps of the bundled pair took 58, 69, 91, 125 and
# 202 us besides at 1, 4, 8, 16 and 32 sequences (2026-11-25).
OVERHEAD, OVERHEAD_EACH = 5.4e-5, 4.5e-6
BURSTS = 100.0  # plain steps of one sequence that the machine is busy at a time, on average
# ``0.9:0`` changes when half of the prompts have been decoded. ``0.82 ± 0.08`` is the mean and the standard deviation
# over texts, as of the bundled pair's prompts: each text has its own, which does not depend on the position.
ACCEPTANCES = ("0.8", "0.4", "0", "0.9:0", "0:0.9", "0.82 ± 0.08")


def world(pair: str, acceptance: str, batch_size: int, seed: int, is_refilled: bool) -> World:
    """Return the machine, the pair and four batches of requests, sixteen at least."""
    verify, draft = COSTS[pair]
    num = max(16, 4 * batch_size)
    each = _of_texts(acceptance, num, seed)
    return World(
        verify=_curve(verify),
        draft=_curve({rows: ms for rows, ms in draft.items() if rows}),
        acceptance=lambda number, _: each[number % num * len(each) // num],
        batch_size=batch_size,
        num_sequences=num,
        prompt_length=64,
        overhead=OVERHEAD,
        overhead_each=OVERHEAD_EACH,
        once=draft.get(0, 0.0) / 1e3,
        is_refilled=is_refilled,
        bursts=BURSTS * verify[1] / 1e3,
        seed=seed,
    )


def _of_texts(acceptance: str, num: int, seed: int) -> list[float]:
    """Return the acceptances of equal shares of the texts: one of each of ``num`` texts, if they differ."""
    if " ± " not in acceptance:
        return [float(part) for part in acceptance.split(":")]
    mean, deviation = map(float, acceptance.split(" ± "))
    weight = mean * (1 - mean) / deviation**2 - 1  # a + b of the beta distribution with this deviation
    return np.random.default_rng(seed).beta(weight * mean, weight * (1 - mean), num).tolist()


def _curve(milliseconds: dict[int, float]) -> Callable[[int], float]:
    counts, values = list(milliseconds), list(milliseconds.values())

    @cache
    def seconds(rows: int) -> float:
        if rows > counts[-1]:
            return values[-1] * rows / counts[-1] / 1e3
        return float(np.interp(rows, counts, values)) / 1e3 if rows else 0.0

    return seconds


def simulated_rows(batch_sizes: list[int], repeats: int, is_refilled: bool) -> list[dict[str, Any]]:
    """Return one row per pair, acceptance and batch size: speeds over plain decoding and the best of K 0, 3 and 5."""
    rows = []
    for pair in COSTS:
        for acceptance in ACCEPTANCES:
            for batch_size in batch_sizes:
                worlds = [world(pair, acceptance, batch_size, seed, is_refilled) for seed in range(repeats)]
                fixed = {k: best_fixed(worlds, (k,)) for k in FIXED.values()}
                cold = speed(worlds, lambda each: each.prepared(AdaptiveLength()))
                warm = speed(worlds, lambda each: each.warmed(AdaptiveLength()))
                rows.append({
                    "pair": pair, "acceptance": acceptance, "batch_size": batch_size,
                    **{f"K {k} over plain": fixed[k] / fixed[0] for k in fixed if k},
                    "cold over plain": cold / fixed[0], "warm over best fixed": warm / max(fixed.values()),
                })  # fmt: skip
    return rows


class _Whole(AdaptiveLength):
    """The policy without its budget: whole chains are verified."""

    def prepare(self, profiler: Profiler) -> None:
        super().prepare(profiler._replace(has_scores=False))


def confidence_rows(batch_sizes: list[int], repeats: int, is_refilled: bool) -> list[dict[str, Any]]:
    """Return one row per pair and batch size: a drafter that scores its chains, and drafts any K in one forward.

    That forward takes as long as one of the pair's draft model over a row per draft token. The policy cannot time it.
    """
    rows = []
    for pair in COSTS:
        for batch_size in batch_sizes:
            worlds = [
                replace(_scored(world(pair, "0.8", batch_size, seed, is_refilled)), seed=seed)
                for seed in range(repeats)
            ]
            plain = best_fixed(worlds, (0,))
            fixed = {k: best_fixed(worlds, (k,)) / plain for k in range(1, 9)}
            best = max(fixed, key=fixed.__getitem__)
            whole, found = (
                speed(worlds, lambda each, make=make: each.warmed(make())) / plain for make in (_Whole, AdaptiveLength)
            )
            rows.append({
                "pair": pair, "batch_size": batch_size, "best K": best, "best K over plain": fixed[best],
                "auto, whole chains, over plain": whole, "auto over plain": found,
            })  # fmt: skip
    return rows


def _scored(each: World) -> World:
    draft, once = each.draft, each.once
    seconds = once + draft(each.batch_size * 8)
    return replace(each, draft=lambda rows: 0.0, once=seconds, is_profiled=False, rates=KINDS)


def print_confidence_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per row."""
    keys = list(rows[0])
    lines = [[f"{row[key]:.2f}" if isinstance(row[key], float) else row[key] for key in keys] for row in rows]
    print(format_table(keys, lines))


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per row."""
    keys = ["K 3 over plain", "K 5 over plain", "cold over plain", "warm over best fixed"]
    lines = [(row["pair"], row["acceptance"], row["batch_size"], *(f"{row[key]:.3f}" for key in keys)) for row in rows]
    print(format_table(("pair", "acceptance", "batch", *keys), lines))
    print(*(f"least {key}: {min(row[key] for row in rows):.3f}" for key in keys[2:]), sep="\n")
