"""The figure of ``bench.laws``: accepted tokens by training tokens and by layers, and the best K by batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.common import report
from specdec_fast.planner.laws import BATCH_SIZES, LAYERS, TRAINING
from specdec_fast.planner.scylla import Fit

_PANELS = (
    ("training", "training tokens", "accepted tokens per step", TRAINING),
    ("layers", "layers of the drafter", "accepted tokens per step", LAYERS),
    ("batch size", "batch size", "best number of draft tokens", BATCH_SIZES),
)
_POINTS_OF_A_LINE = 50


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw measured points, those held out hollow, and the lines fitted to the others."""
    plt = report.pyplot()
    figure, axes = plt.subplots(1, len(_PANELS), figsize=(15, 4.5))
    for axis, (name, xlabel, ylabel, law) in zip(axes, _PANELS, strict=True):
        for i, row in enumerate(row for row in rows if row["law"] == name):
            color = f"C{i}"
            xs = [x for x, _ in row["curve"]]
            fitted = [(x, y) for x, y in row["curve"] if x not in row["held_out"]]
            axis.plot(*zip(*fitted, strict=True), "o", color=color, label=row["at"])
            axis.plot(row["held_out"], row["measured"], "o", color=color, markerfacecolor="none")
            part = Fit(**row["part"])
            ratio = (xs[-1] / xs[0]) ** (1 / (_POINTS_OF_A_LINE - 1))
            line = [xs[0] * ratio**step for step in range(_POINTS_OF_A_LINE)]
            axis.plot(line, [law.predicted(part, x) for x in line], "-", color=color, linewidth=1)
        axis.set(xscale="log", xlabel=xlabel, ylabel=ylabel)
        if axis.lines:
            axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)
