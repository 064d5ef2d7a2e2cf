"""One row per setting, with medians over the repeats, and the tables of ``bench.engine``."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.common.measurement import Measurement, MethodSetting, Runs, accepted_histogram
from bench.common.timing import median_ratio
from bench.engine_.methods import PLAIN, TRANSFORMERS
from specdec_fast.commands.common import format_table

PERCENTILES = (50, 90, 99)
REALIGNMENT = ("realign", "assemble")  # stages that only a dense layout such as the oracle's needs
STAGES = ("prefill", "draft", "verify", "accept", "commit", *REALIGNMENT, "host")

Row = dict[str, Any]


def summarise(runs: Runs) -> list[Row]:
    """Reduce repeats to medians; ratios of speeds are taken within a repeat."""
    return [_row(setting, measurements, runs) for setting, measurements in runs.items()]


def _row(setting: MethodSetting, measurements: list[Measurement], runs: Runs) -> Row:
    name, batch_size, k = setting.name, setting.batch_size, setting.num_draft_tokens
    first = measurements[0]
    decoding = first.decoding

    def speedup_over(other: str, batch_size: int, k: int | str | None = None) -> float | None:
        key = (other, batch_size, k)
        found = next((m for c, m in runs.items() if (c.name, c.batch_size, c.num_draft_tokens) == key), None)
        speeds = [[m.tokens_per_second for m in ms] for ms in (measurements, found)] if found else None
        return median_ratio(*speeds) if speeds else None

    return {
        "method": name,
        "num_draft_tokens": k,
        "acceptance": setting.acceptance,
        "batch_size": batch_size,
        "tokens_per_second": _median([m.tokens_per_second for m in measurements]),
        "speedup_over_plain": speedup_over(PLAIN, batch_size),
        "speedup_over_plain_batch_1": speedup_over(PLAIN, 1),
        "speedup_over_oracle": speedup_over(f"oracle-{name}", batch_size, k) if setting.acceptance is None else None,
        "speedup_over_transformers": speedup_over(TRANSFORMERS, batch_size),
        "mean_acceptance_length": decoding.mean_acceptance_length if decoding else None,
        "accepted_histogram": accepted_histogram(decoding, k if isinstance(k, int) else 0) if decoding else None,
        "latency_seconds": latency_percentiles(measurements),
        "stage_shares": stage_shares(measurements),
        "outside_forwards": _median([m.outside_forwards for m in measurements]),
        "moved_bytes": first.moved_bytes,
        "kv_bytes": first.kv_bytes,
        "grouping_rate": first.grouping_rate,
        "equal_length_steps": first.equal_length_steps,
        "num_steps": first.num_steps,
        "equal_share": min(m.equal_share for m in measurements),
        "own_batch_1_share": own_batch_1_share(setting, runs),
        "gated": setting.gated,
    }


def own_batch_1_share(setting: MethodSetting, runs: Runs) -> float | None:
    """Return the least share of outputs, over repeats, that equal the method's at batch 1; None without such a run."""
    key = (setting.name, setting.num_draft_tokens, setting.acceptance, 1)
    same = ((c.name, c.num_draft_tokens, c.acceptance, c.batch_size) for c in runs)
    alone = next((ms[0] for found, ms in zip(same, runs.values(), strict=True) if found == key), None)
    if alone is None:
        return None
    equal = [[a == b for a, b in zip(m.outputs, alone.outputs, strict=True)] for m in runs[setting]]
    return min(sum(each) / max(1, len(each)) for each in equal)


def _median(values: list[float | None]) -> float | None:
    return None if None in values else float(np.median(values))


def latency_percentiles(measurements: list[Measurement]) -> dict[str, float] | None:
    """Return seconds from the call to a request's last token: percentiles over requests, medians over repeats."""
    if any(m.latencies is None for m in measurements):
        return None
    each = [np.percentile(m.latencies, PERCENTILES) for m in measurements]
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, np.median(each, axis=0), strict=True)}


def stage_shares(measurements: list[Measurement]) -> dict[str, float] | None:
    """Return each stage's share of the time, as a median over repeats; ``host`` is the time outside of all stages."""
    if not all(m.stage_seconds for m in measurements):
        return None
    shares = [{s: m.stage_seconds.get(s, 0.0) / m.seconds for s in STAGES} for m in measurements]
    for share in shares:
        share["host"] = 1 - sum(share.values())
    return {stage: float(np.median([share[stage] for share in shares])) for stage in STAGES}


def print_tables(rows: list[Row]) -> None:
    """Print speeds, then time and memory, then accepted tokens."""
    keys = ("method", "K", *(["replayed"] if any(row["acceptance"] is not None for row in rows) else []), "batch")
    ratios = ("x plain", "x plain, batch 1", "x same oracle", "x transformers")
    latencies = tuple(f"P{p} s" for p in PERCENTILES)
    print(
        format_table(
            (*keys, "tokens/s", *ratios, "acc. length", *latencies, "equal", "own batch 1"),
            [(*_key(row, keys), *_speeds(row)) for row in rows],
        )
    )
    staged = [row for row in rows if row["stage_shares"]]
    if not staged:
        return
    print("\nshare of time per stage; KV\n")
    kv = ("MB moved", "MB of KV", "grouped", "equal-length steps")
    print(
        format_table(
            (*keys, *STAGES, "outside forwards", *kv),
            [(*_key(row, keys), *_costs(row)) for row in staged],
        )
    )
    histograms = [(row, row["accepted_histogram"]) for row in staged if len(row["accepted_histogram"]) > 1]
    width = max((len(counts) for _, counts in histograms), default=0)
    if width:
        print("\nsequence-steps by draft tokens accepted\n")
        lines = [(*_key(row, keys), *counts, *[""] * (width - len(counts))) for row, counts in histograms]
        print(format_table((*keys, *map(str, range(width))), lines))
    print()


def _key(row: Row, keys: tuple[str, ...]) -> tuple[Any, ...]:
    named = {"method": row["method"], "K": row["num_draft_tokens"], "batch": row["batch_size"]}
    named["replayed"] = row["acceptance"]
    return tuple("-" if named[key] is None else named[key] for key in keys)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _speeds(row: Row) -> tuple[str, ...]:
    over = ("plain", "plain_batch_1", "oracle", "transformers")
    latency = row["latency_seconds"] or {}
    return (
        f"{row['tokens_per_second']:.1f}",
        *(_shown(row[f"speedup_over_{other}"], ".2f") for other in over),
        _shown(row["mean_acceptance_length"], ".2f"),
        *(_shown(latency.get(f"p{p}"), ".2f") for p in PERCENTILES),
        f"{row['equal_share']:.1%}" + ("" if row["gated"] else "*"),
        _shown(row["own_batch_1_share"], ".1%"),
    )


def _costs(row: Row) -> tuple[str, ...]:
    return (
        *(f"{row['stage_shares'][stage]:.1%}" for stage in STAGES),
        _shown(row["outside_forwards"], ".1%"),
        f"{row['moved_bytes'] / 1e6:.1f}",
        "-" if row["kv_bytes"] is None else f"{row['kv_bytes'] / 1e6:.1f}",
        _shown(row["grouping_rate"], ".1%"),
        _shown(row["equal_length_steps"], ".1%"),
    )
