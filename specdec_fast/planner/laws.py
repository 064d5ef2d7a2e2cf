"""Curves through trained drafters (Scylla's laws), and what they predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import log, log10, sqrt
from operator import mul
from statistics import mean
from typing import NamedTuple

from specdec_fast.errors import ConfigError
from specdec_fast.planner.choice import expected_tokens
from specdec_fast.planner.law_table import Curve, LawTable, most_tokens_per_second
from specdec_fast.planner.scylla import Fit, fit_batch_sizes, fit_layers, fit_training

_LEAST_FITTED = 2  # points of a curve
_BISECTIONS = 50
_ACCEPTANCES = (1e-3, 1 - 1e-3)  # the least and the largest that is changed by an exponent


class HeldOut(NamedTuple):
    """A curve whose last points, those with the largest x, were predicted from the others."""

    whole: Fit  # of all points
    part: Fit  # of those not held out
    xs: tuple[int, ...]  # held out
    measured: tuple[float, ...]
    predicted: tuple[float, ...]  # by ``part``
    last: float  # y at the largest x that is not held out: the prediction without a law

    @property
    def error(self) -> float:
        """The root mean square of predicted minus measured."""
        return _root_mean_square([a - b for a, b in zip(self.predicted, self.measured, strict=True)])

    @property
    def unchanged_error(self) -> float:
        """The same of the prediction without a law."""
        return _root_mean_square([self.last - measured for measured in self.measured])


class Law(NamedTuple):
    """One of Scylla's laws: y is linear in a function of x."""

    formula: str
    fit: Callable[[Sequence[float], Sequence[float]], Fit]  # by least squares
    of_x: Callable[[float], float]  # the function of x

    def of(self, curve: Curve) -> Fit:
        """Fit a curve."""
        return self.fit(list(curve), list(curve.values()))

    def predicted(self, fitted: Fit, x: float) -> float:
        """Return y at x: a number of tokens, so 0 where the line is below."""
        return max(0.0, fitted.slope * self.of_x(x) + fitted.intercept)

    def held_out(self, curve: Curve, num_points: int = 1) -> HeldOut | None:
        """Fit all but the last points of a curve and predict these; None if fewer than two would be left."""
        xs = tuple(curve)
        if len(xs) - num_points < _LEAST_FITTED:
            return None
        before = xs[:-num_points]
        held_out = xs[-num_points:]
        part = self.of({x: curve[x] for x in before})
        predicted = tuple(self.predicted(part, x) for x in held_out)
        return HeldOut(
            whole=self.of(curve),
            part=part,
            xs=held_out,
            measured=tuple(curve[x] for x in held_out),
            predicted=predicted,
            last=curve[before[-1]],
        )


TRAINING = Law("a ln(training tokens) + b", fit_training, log)
LAYERS = Law("a log10(layers) + b", fit_layers, log10)
BATCH_SIZES = Law("C / batch size + c0", fit_batch_sizes, lambda b: 1 / b)


class Forecast(NamedTuple):
    """What is expected of a drafter at one batch size."""

    layers: int
    accepted_tokens: float  # per step, with the K of the table
    num_draft_tokens: int | None = None  # the K with the most tokens per second; None if no forwards were timed
    tokens_per_step: float | None = None  # with that K, for one sequence
    tokens_per_second: float | None = None
    plain_tokens_per_second: float | None = None


def forecast(table: LawTable, layers: int, training_tokens: int, batch_size: int) -> Forecast:
    """Predict a drafter of so many layers after so many training tokens.

    Accepted tokens are those of the training law, within 0 and K. How they are spread over the positions of a draft is
    taken from the measured drafter of as many layers whose training tokens are nearest (``acceptance_like``).

    Raises:
        ConfigError: the table has no such drafter, or only one number of training tokens of it.
    """
    if layers not in table.layers:
        raise ConfigError(f"the table has drafters of {', '.join(map(str, table.layers))} layers, not of {layers}.")
    curve = table.by_tokens(layers)
    most = table.num_draft_tokens
    accepted = min(TRAINING.predicted(TRAINING.of(curve), training_tokens), float(most))
    if layers not in table.costs:
        return Forecast(layers, accepted)
    emitted = expected_tokens(acceptance_like(table.nearest(layers, training_tokens).acceptance(), accepted))
    seconds = table.costs[layers].profile(batch_size)
    k = most_tokens_per_second(emitted, seconds)
    return Forecast(
        layers=layers,
        accepted_tokens=accepted,
        num_draft_tokens=k,
        tokens_per_step=emitted[k],
        tokens_per_second=batch_size * emitted[k] / seconds[k],
        plain_tokens_per_second=batch_size / seconds[0],
    )


def acceptance_like(shape: Sequence[float], accepted: float) -> list[float]:
    """Return the acceptance of each position of a draft, for ``expected_tokens``, with so many accepted tokens in all.

    They are powers, with one exponent, of the acceptances ``shape`` of another drafter, so that positions at which that
    one is worse stay worse. ``accepted`` is from 0 to the number of positions.
    """
    within = [min(max(p, _ACCEPTANCES[0]), _ACCEPTANCES[1]) for p in shape]
    low = 0.0
    high = 1.0  # of e / (1 + e) for the exponent e
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found = [p ** (middle / (1 - middle)) for p in within]
        if sum(accumulate(found, mul)) > accepted:
            low = middle
        else:
            high = middle
    return found


def _root_mean_square(errors: Sequence[float]) -> float:
    return sqrt(mean(error * error for error in errors))
