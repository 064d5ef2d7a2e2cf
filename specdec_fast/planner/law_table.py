"""A table of trained drafters of one target, as ``bench.laws`` writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import isfinite, log, sqrt
from statistics import mean
from typing import Any, NamedTuple

from specdec_fast.errors import ConfigError
from specdec_fast.speculation_length.step_costs import StepCosts

Curve = Mapping[int, float]  # y by x, which rises
_LARGEST = 1e15  # of any number in a table
_SHAPE = (
    "expected what bench.laws writes: num_draft_tokens; points with layers, training_tokens, seed, accepted_tokens, "
    "num_drafts and accepted_per_position; and costs with layers, verify and draft"
)


class TrainedDrafter(NamedTuple):
    """One point of a table: a drafter that was trained and evaluated."""

    layers: int  # of the drafter
    training_tokens: int
    seed: int  # of its first weights and of the order of its texts
    accepted_tokens: float  # draft tokens accepted per step, of K
    reached: tuple[float, ...]  # probability that so many draft tokens or more are accepted: [1, of 1, ..., of K]

    def acceptance(self) -> list[float]:
        """Return, for each position, the probability that its token is accepted if those before it are."""
        return [after / before if before else 0.0 for before, after in pairwise(self.reached)]


@dataclass(frozen=True)
class LawTable:
    """Trained drafters of one target, and the costs of their forwards."""

    num_draft_tokens: int  # K of the evaluations
    drafters: tuple[TrainedDrafter, ...]
    costs: Mapping[int, StepCosts]  # by layers; empty if no forwards were timed

    @property
    def layers(self) -> list[int]:
        """The numbers of layers, rising."""
        return sorted({drafter.layers for drafter in self.drafters})

    @property
    def training_tokens(self) -> list[int]:
        """The numbers of training tokens, rising."""
        return sorted({drafter.training_tokens for drafter in self.drafters})

    def since(self, training_tokens: int) -> LawTable:
        """Return the table without drafters of fewer training tokens.

        Raises:
            ConfigError: none is left.
        """
        left = tuple(drafter for drafter in self.drafters if drafter.training_tokens >= training_tokens)
        if not left:
            raise ConfigError(f"no drafter of the table has {training_tokens} training tokens or more.")
        return replace(self, drafters=left)

    def by_tokens(self, layers: int) -> Curve:
        """Return accepted tokens by training tokens, averaged over seeds."""
        return self._curve(lambda d: d.training_tokens if d.layers == layers else None)

    def by_layers(self, training_tokens: int) -> Curve:
        """Return accepted tokens by layers, averaged over seeds."""
        return self._curve(lambda d: d.layers if d.training_tokens == training_tokens else None)

    def _curve(self, x_of: Callable[[TrainedDrafter], int | None]) -> Curve:
        """Average over the seeds that all x have: a seed moves all of them alike. If there are none, over all seeds."""
        values: dict[int, dict[int, float]] = {}
        for drafter in self.drafters:
            if (x := x_of(drafter)) is not None:
                values.setdefault(x, {})[drafter.seed] = drafter.accepted_tokens
        shared = set.intersection(*map(set, values.values())) if values else set()
        return {x: mean(own[seed] for seed in shared or own) for x, own in sorted(values.items())}

    def nearest(self, layers: int, training_tokens: int) -> TrainedDrafter:
        """Return a drafter of so many layers, the one whose training tokens have the least ratio to these."""
        own = [drafter for drafter in self.drafters if drafter.layers == layers]
        return min(own, key=lambda drafter: abs(log(drafter.training_tokens / training_tokens)))

    def seed_deviation(self) -> float | None:
        """Return the standard deviation of accepted tokens over seeds, pooled; None if no point has two seeds."""
        groups: dict[tuple[int, int], list[float]] = {}
        for drafter in self.drafters:
            groups.setdefault((drafter.layers, drafter.training_tokens), []).append(drafter.accepted_tokens)
        squares = sum((value - mean(values)) ** 2 for values in groups.values() for value in values)
        freedom = len(self.drafters) - len(groups)
        return sqrt(squares / freedom) if freedom else None

    def best_draft_tokens(self, layers: int, batch_sizes: Sequence[int]) -> Curve:
        """Return the K with the most expected tokens per second by batch size, of the longest trained drafter.

        The acceptance of each position is the measured one, of its first seed.
        """
        drafter = max((d for d in self.drafters if d.layers == layers), key=lambda d: (d.training_tokens, -d.seed))
        emitted = list(accumulate(drafter.reached))
        return {size: float(most_tokens_per_second(emitted, self.costs[layers].profile(size))) for size in batch_sizes}


def most_tokens_per_second(emitted: Sequence[float], seconds: Sequence[float]) -> int:
    """Return the K with the most tokens per second, from the tokens and the seconds of a step by K."""
    speeds = [tokens / each for tokens, each in zip(emitted, seconds, strict=False)]
    return max(range(len(speeds)), key=speeds.__getitem__)


def read_laws(data: Mapping[str, Any]) -> LawTable:
    """Return the table that ``bench.laws`` has written.

    Raises:
        ConfigError: something is missing, is of another type, or is no finite number from 0 on.
    """
    try:
        most = _integer(data["num_draft_tokens"], "num_draft_tokens")
        drafters = tuple(_drafter(point, most) for point in data["points"])
        costs = _costs(data.get("costs", ()), most)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"no table of laws ({error!r}); {_SHAPE}.") from None
    if not drafters:
        raise ConfigError(f"a table of laws without points; {_SHAPE}.")
    return LawTable(most, drafters, costs)


def _drafter(point: Mapping[str, Any], most: int) -> TrainedDrafter:
    accepted = _number(point["accepted_tokens"], "accepted_tokens")
    if accepted > most:
        raise ConfigError(f"accepted_tokens is {accepted}; expected at most num_draft_tokens, {most}.")
    num_drafts = _integer(point["num_drafts"], "num_drafts")
    counts = [_number(count, "accepted_per_position") for count in point["accepted_per_position"]]
    if len(counts) != most or not all(count <= num_drafts for count in counts):
        raise ConfigError(f"accepted_per_position is {counts}; expected {most} counts up to num_drafts, {num_drafts}.")
    reached = (1.0, *(count / num_drafts for count in counts))
    seed = point["seed"]
    if type(seed) is not int:
        raise ConfigError(f"seed is {seed!r}; expected an integer.")
    layers, tokens = (_integer(point[name], name) for name in ("layers", "training_tokens"))
    return TrainedDrafter(layers, tokens, seed, accepted, reached)


def _costs(entries: Sequence[Mapping[str, Any]], most: int) -> dict[int, StepCosts]:
    """Return costs by layers. The target's forward is the same beside every drafter, so its least seconds count."""
    verify: dict[int, float] = {}
    for each in entries:
        for rows, seconds in each["verify"]:
            known = verify.get(_integer(rows, "verify"), _LARGEST)
            verify[rows] = min(known, _number(seconds, "verify"))
    if entries and not verify:
        raise ConfigError("costs: verify has no seconds; expected pairs of rows and seconds, such as [[1, 0.01]].")
    costs = {}
    for each in entries:
        draft = {_whole(count, "draft"): _number(seconds, "draft") for count, seconds in each["draft"]}
        costs[_integer(each["layers"], "layers")] = StepCosts(verify, draft or None, most)
    return costs


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not isfinite(value) or not 0 <= value <= _LARGEST:
        raise ConfigError(f"{name} is {value!r}; expected a number from 0 to {_LARGEST:g}.")
    return float(value)


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ConfigError(f"{name} has {value!r}; expected an integer from 0 on.")
    return value


def _integer(value: Any, name: str) -> int:
    if (number := _whole(value, name)) == 0:
        raise ConfigError(f"{name} is 0; expected an integer from 1 on.")
    return number
