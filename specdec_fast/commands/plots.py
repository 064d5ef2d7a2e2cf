"""Figures of the command line's reports; needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.backend_bases import FigureCanvasBase

from specdec_fast.commands.speed import PLAIN, Speed
from specdec_fast.equivalence.compare import Comparison
from specdec_fast.equivalence.report import Report

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # after the choice of a backend that needs no display


def formats() -> list[str]:
    """Return the file name extensions of figures, without the dot."""
    return sorted(FigureCanvasBase.get_supported_filetypes())


def draw_exactness(report: Report, path: Path) -> None:
    """Draw the worst share of identical outputs per dtype and batch size: settings, control, noise floor."""
    series = {
        "specdec_fast, every setting": report.comparisons,
        "specdec_fast, determinism off": report.control,
        "transformers, plain batches": report.noise_floor,
    }
    dtypes = list(dict.fromkeys(c.setting.dtype for c in report.comparisons))
    figure, axes = plt.subplots(1, len(dtypes), figsize=(1 + 4 * len(dtypes), 4), squeeze=False, sharey=True)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        for width, (name, comparisons) in zip(
            (7, 3, 2), series.items(), strict=True
        ):  # widths differ, because lines may coincide
            worst = _worst([c for c in comparisons if c.setting.dtype == dtype])
            shares = [100 * share for share in worst.values()]
            axis.plot([str(size) for size in worst], shares, "o-", linewidth=width, label=name)
        axis.set_title(dtype)
        axis.set_xlabel("batch size")
        axis.set_ylim(0, 103)
    axes[0][0].set_ylabel("outputs identical to batch 1, %")
    axes[0][-1].legend(loc="lower left", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_speeds(speeds: list[Speed], path: Path) -> None:
    """Draw tokens per second over the batch size, a line for every drafter and K."""
    figure, axis = plt.subplots(figsize=(6, 4))
    for setting in dict.fromkeys(speed.setting for speed in speeds):
        measured = [speed for speed in speeds if speed.setting == setting and speed.problem is None]
        sizes = [str(speed.batch_size) for speed in measured]
        draft, k = setting
        name = "plain decoding" if setting == PLAIN else f"{Path(draft).name}, K {k}"
        axis.plot(sizes, [speed.tokens_per_second for speed in measured], "o-", label=name)
    axis.set_xlabel("batch size")
    axis.set_ylabel("tokens/s")
    axis.set_ylim(0)
    axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _worst(comparisons: list[Comparison]) -> dict[int, float]:
    sizes = sorted({c.setting.batch_size for c in comparisons})
    return {n: min(c.exact_match for c in comparisons if c.setting.batch_size == n) for n in sizes}
