"""Rows that a forward takes without taking longer, and fits of acceptance: the analysis of Scylla.

A forward reads its weights once, whatever its rows, so up to some number of rows R* it takes as long as with one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specdec_fast.errors import ConfigError

_LEAST_POINTS = 2
_ROUNDING = 1e-28  # share of the squares of equal numbers that subtracting their mean may leave


class Fit(NamedTuple):
    """``y = slope * f(x) + intercept``, by least squares."""

    slope: float  # factor of f(x)
    intercept: float  # the constant
    r_squared: float  # share of the variance of y that the fit explains; 1 if y does not vary


def rows_at_balance(weight_bytes: float, flops_per_row: float, bandwidth: float, peak: float) -> float:
    """Return R*, at which reading ``weight_bytes`` takes as long as computing the rows.

    A row takes two floating-point operations per parameter. ``bandwidth`` is in bytes/s, ``peak`` in operations/s.
    """
    return (weight_bytes / bandwidth) / (flops_per_row / peak)


def best_draft_tokens(rows: float, batch_size: int) -> float:
    """Return ``k_opt = max(0, R* / B - 1)``: the draft tokens per sequence that B sequences verify in R* rows."""
    return max(0.0, rows / batch_size - 1)


def fit_batch_sizes(batch_sizes: Sequence[float], draft_tokens: Sequence[float]) -> Fit:
    """Fit ``k_opt = c0 + C / b``; the slope is C, the intercept c0."""
    return fit(batch_sizes, draft_tokens, lambda b: 1 / b)


def fit_training(training_tokens: Sequence[float], accepted_tokens: Sequence[float]) -> Fit:
    """Fit accepted tokens = a ln(training tokens) + b."""
    return fit(training_tokens, accepted_tokens, np.log)


def fit_layers(num_layers: Sequence[float], accepted_tokens: Sequence[float]) -> Fit:
    """Fit accepted tokens = a log10(layers of the drafter) + b."""
    return fit(num_layers, accepted_tokens, np.log10)


def fit(x: Sequence[float], y: Sequence[float], transform: Callable[[np.ndarray], np.ndarray]) -> Fit:
    """Fit ``y = slope * transform(x) + intercept`` by least squares.

    Raises ConfigError if there are fewer than two different x, an x is not positive, or a number is not finite, or so
    large that the fit is not.
    """
    xs = np.asarray(x, np.float64)
    ys = np.asarray(y, np.float64)
    is_usable = xs.shape == ys.shape and xs.ndim == 1 and np.isfinite(xs).all() and np.isfinite(ys).all()
    if not is_usable or (xs <= 0).any() or len(np.unique(xs)) < _LEAST_POINTS:
        raise ConfigError(
            f"a fit needs pairs of finite numbers with at least {_LEAST_POINTS} different positive x; got x={list(x)}, "
            f"y={list(y)}."
        )
    with np.errstate(all="ignore"):
        fitted = _least_squares(transform(xs), ys)
    if fitted is None or not np.isfinite(fitted).all():
        raise ConfigError(f"no line can be fitted to x={list(x)}, y={list(y)}; expected numbers of usual sizes.")
    return fitted


def _least_squares(xs: np.ndarray, ys: np.ndarray) -> Fit | None:
    if not np.isfinite(xs).all():
        return None
    matrix = np.stack([xs, np.ones_like(xs)], axis=1)
    (slope, intercept), *_ = np.linalg.lstsq(matrix, ys, rcond=None)
    residual = float(((ys - matrix @ np.array([slope, intercept])) ** 2).sum())
    variance = float(((ys - ys.mean()) ** 2).sum())
    varies = variance > _ROUNDING * float((ys**2).sum())
    return Fit(float(slope), float(intercept), 1 - residual / variance if varies else 1.0)


def fits_of(data: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Fit]:
    """Fit the curves of a file: accepted tokens by ``"training_tokens"`` and ``"layers"``, K by ``"batch_sizes"``.

    Raises ConfigError for another name, or something that is not pairs of numbers. K is the best one of the batch size.
    """
    curves = {"training_tokens": fit_training, "layers": fit_layers, "batch_sizes": fit_batch_sizes}
    if not isinstance(data, Mapping) or not data or not set(data) <= set(curves):
        raise ConfigError(f"expected an object with pairs under some of {', '.join(curves)}.")
    fits = {}
    for name, pairs in data.items():
        try:
            x, y = zip(*((float(first), float(second)) for first, second in pairs), strict=True)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{name}: expected pairs of numbers, such as [[1e9, 2.1], [1e10, 2.6]].") from None
        fits[name] = curves[name](x, y)
    return fits
