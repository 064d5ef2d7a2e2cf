"""How well the laws hold on a table: every curve's fit, and the points that it predicts without having seen them."""

from __future__ import annotations

from typing import Any

from specdec_fast.commands.common import format_table
from specdec_fast.planner.law_table import Curve, LawTable
from specdec_fast.planner.laws import BATCH_SIZES, LAYERS, TRAINING, Law

_HEADER = ("law", "at", "slope", "intercept", "R^2", "held out", "predicted", "measured", "RMS error", "unchanged")


def law_rows(table: LawTable, batch_sizes: list[int]) -> list[dict[str, Any]]:
    """Return one row per curve: of the training and the layers the last point is held out, of batch sizes the half."""
    rows = [_row("training", f"{n} layers", TRAINING, table.by_tokens(n), 1) for n in table.layers]
    rows += [_row("layers", f"{n} tokens", LAYERS, table.by_layers(n), 1) for n in table.training_tokens]
    for layers in table.layers:
        if layers in table.costs:
            curve = table.best_draft_tokens(layers, batch_sizes)
            rows.append(_row("batch size", f"{layers} layers", BATCH_SIZES, curve, len(curve) // 2))
    return [row for row in rows if row]


def _row(name: str, at: str, law: Law, curve: Curve, num_held_out: int) -> dict[str, Any]:
    held_out = law.held_out(curve, num_held_out)
    if held_out is None:
        return {}
    return {
        "law": name,
        "at": at,
        "formula": law.formula,
        "curve": list(curve.items()),
        **held_out.whole._asdict(),
        "part": held_out.part._asdict(),
        "held_out": held_out.xs,
        "predicted": held_out.predicted,
        "measured": held_out.measured,
        "error": held_out.error,
        "unchanged_error": held_out.unchanged_error,
    }


def print_laws(rows: list[dict[str, Any]], seed_deviation: float | None) -> None:
    """Print one line per curve. "unchanged" is the error of predicting what the last fitted point has."""
    lines = [
        (
            row["law"],
            row["at"],
            f"{row['slope']:.4g}",
            f"{row['intercept']:.4g}",
            f"{row['r_squared']:.3f}",
            _listed(row["held_out"], "d"),
            _listed(row["predicted"], ".2f"),
            _listed(row["measured"], ".2f"),
            f"{row['error']:.3f}",
            f"{row['unchanged_error']:.3f}",
        )
        for row in rows
    ]
    print(format_table(_HEADER, lines))
    if seed_deviation is not None:
        print(f"\nstandard deviation of accepted tokens over seeds: {seed_deviation:.3f}")


def _listed(numbers: tuple[float, ...], style: str) -> str:
    return ",".join(format(number, style) for number in numbers)
