"""The ablation of ``num_draft_tokens="auto"`` in simulated time, where a percent is visible and no clock matters."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from bench.common.simulation import World, best_fixed, speed, tokens_per_second
from bench.engine_.length_ablation import FIXED
from bench.engine_.length_parts import OF_SCORES, PARTS, without
from bench.engine_.length_worlds import COSTS, WITH_SCORES, Cell, cells, scored, world
from specdec_fast.commands.common import format_table
from specdec_fast.speculation_length import Profiler
from specdec_fast.speculation_length.adaptive import AdaptiveLength
from specdec_fast.speculation_length.fixed import FixedLength

PARTS_AT = (1, 8)  # batch sizes at which the parts are taken out


def simulated_rows(batch_sizes: list[int], repeats: int, is_refilled: bool) -> list[dict[str, Any]]:
    """Return one row per world, see ``rows_of_cell``; a process per core computes them."""
    with ProcessPoolExecutor() as pool:
        return list(pool.map(partial(rows_of_cell, repeats=repeats, is_refilled=is_refilled), cells(batch_sizes)))


def rows_of_cell(cell: Cell, repeats: int, is_refilled: bool = True) -> dict[str, Any]:
    """Return the speeds of a new engine over plain decoding, of a warm one over the best fixed K, and what parts gain.

    Args:
        cell: the world.
        repeats: number of seeds of it.
        is_refilled: see ``World``.

    """
    worlds = [cell.world(seed, is_refilled) for seed in range(repeats)]
    first = [_before(each) for each in worlds]
    fixed = {k: speed(worlds, lambda _, k=k: FixedLength(k)) for k in FIXED.values()}  # type: ignore[misc]
    parts = PARTS if cell.batch_size in PARTS_AT else ()
    names = [name for name in parts if name not in OF_SCORES or cell.kind in WITH_SCORES]
    cold, warm = _speeds(first, worlds, None)
    found = {name: _speeds(first, worlds, name) for name in names}
    return {
        **cell._asdict(),
        **{f"K {k} over plain": fixed[k] / fixed[0] for k in fixed if k},
        "cold over plain": cold / speed(first, lambda _: FixedLength(0)),
        "warm over best fixed": warm / max(fixed.values()),
        "cold over cold without": {name: cold / other for name, (other, _) in found.items()},
        "warm over warm without": {name: warm / other for name, (_, other) in found.items()},
    }


def _before(each: World) -> World:
    return replace(each, seed=each.seed + 1000)


def _speeds(first: list[World], worlds: list[World], part: str | None) -> tuple[float, float]:
    """Return the mean speeds of new engines and of the same over other texts, without a mechanism."""
    with without(part):
        policies = [each.prepared(AdaptiveLength()) for each in worlds]
        return tuple(fmean(map(tokens_per_second, texts, policies)) for texts in (first, worlds))  # type: ignore[return-value]


class _Whole(AdaptiveLength):
    """The policy without its budget: whole chains are verified."""

    def prepare(self, profiler: Profiler) -> None:
        super().prepare(profiler._replace(has_scores=False))


def confidence_rows(batch_sizes: list[int], repeats: int, is_refilled: bool) -> list[dict[str, Any]]:
    """Return one row per pair and batch size: a drafter that scores its chains, and drafts any K in one forward."""
    rows = []
    for pair in COSTS:
        for batch_size in batch_sizes:
            worlds = [scored(world(pair, "0.8", batch_size, seed, is_refilled)) for seed in range(repeats)]
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


def print_confidence_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per row."""
    keys = list(rows[0])
    lines = [[f"{row[key]:.2f}" if isinstance(row[key], float) else row[key] for key in keys] for row in rows]
    print(format_table(keys, lines))


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the speeds in all worlds, the least of each kind, and what each part gains where it gains the most."""
    keys = ["K 3 over plain", "K 5 over plain", "cold over plain", "warm over best fixed"]
    names = [*Cell._fields, *keys]
    print(format_table(names, [[*(row[f] for f in Cell._fields), *(f"{row[k]:.3f}" for k in keys)] for row in rows]))
    for kind in dict.fromkeys(row["kind"] for row in rows):
        least = [min(row[key] for row in rows if row["kind"] == kind) for key in keys[2:]]
        print(f"least in {kind}: cold {least[0]:.3f} of plain, warm {least[1]:.3f} of the best fixed K")
    print(format_table(("without", "gain", "in", "engine"), list(gains(rows))))


def gains(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    """Yield per part its largest mean gain over a kind of worlds, in percent, the kind, and cold or warm."""
    for name in PARTS:
        found = []
        for key in ("cold over cold without", "warm over warm without"):
            with_part = [row for row in rows if name in row[key]]
            for kind in dict.fromkeys(row["kind"] for row in with_part):
                found.append((fmean(row[key][name] for row in with_part if row["kind"] == kind), kind, key[:4]))
        most, kind, engine = max(found, default=(1.0, "-", "-"))
        yield name, f"{100 * (most - 1):.1f}", kind, engine
