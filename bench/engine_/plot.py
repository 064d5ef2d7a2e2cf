"""The figure of ``bench.engine``: speeds, speed-ups of speculation, and time per stage; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.common import report
from bench.engine_.summary import STAGES, Row

PANELS = (
    ("tokens_per_second", "tokens/s", "log"),
    ("speedup_over_plain", "x plain decoding at the same batch", "linear"),
)


def _label(row: Row) -> str:
    k = "" if row["num_draft_tokens"] is None else f", K {row['num_draft_tokens']}"
    return row["method"] + k + ("" if row["acceptance"] is None else f", {row['acceptance']:g} replayed")


def draw(rows: list[Row], path: Path) -> None:
    """Draw each method over the batch size, and its stages at the largest batch, in one file."""
    plt = report.pyplot()
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(_label(row), []).append(row)
    sizes = sorted({row["batch_size"] for row in rows})
    figure, axes = plt.subplots(1, 3, figsize=(19, 5))
    for axis, (key, title, scale) in zip(axes, PANELS, strict=False):
        for label, own in series.items():
            points = [(row["batch_size"], row[key]) for row in own if row[key] is not None]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=label)
        axis.set(xscale="log", yscale=scale, xlabel="batch", ylabel=title)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.xaxis.minorticks_off()
    axes[0].legend(fontsize="small")
    _draw_stages(axes[2], [row for row in rows if row["batch_size"] == sizes[-1] and row["stage_shares"]])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_stages(axis: Any, rows: list[Row]) -> None:
    labels, left = [_label(row) for row in rows], [0.0] * len(rows)
    for stage in STAGES:
        shares = [row["stage_shares"][stage] for row in rows]
        axis.barh(labels, shares, left=left, label=stage)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.invert_yaxis()
    axis.set(xlabel="share of time, largest batch", xlim=(0, 1))
    axis.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)
