"""How fast each drafter decodes the same prompts: interleaved runs, medians, and ratios taken within a repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import geometric_mean, median, quantiles
from time import perf_counter
from typing import Any

from specdec_fast.drafters import NO_DRAFT
from specdec_fast.engine.engine import Engine
from specdec_fast.errors import SpecDecError
from specdec_fast.sampling_params import SamplingParams

PLAIN = (NO_DRAFT, 0)


@dataclass(frozen=True)
class Job:
    """What every run decodes.

    Attributes:
        prompts: as ``Engine.generate`` expects them.
        params: the parameters of each prompt.
        options: how prompts become token ids.
    """

    prompts: list[Any]
    params: list[SamplingParams]
    options: Mapping[str, Any]


@dataclass
class Run:
    """One decoding of all prompts.

    Attributes:
        tokens: the tokens of each prompt.
        seconds: from the call to the last token.
        token_seconds: of each prompt with tokens after its first chunk: seconds per token after that chunk.
        mean_acceptance_length: tokens per sequence and step with draft tokens.
        acceptance_rate: share of draft tokens that were accepted.
    """

    tokens: list[list[int]]
    seconds: float
    token_seconds: list[float]
    mean_acceptance_length: float
    acceptance_rate: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all prompts, by the seconds of the run, prompts included."""
        return sum(map(len, self.tokens)) / self.seconds


def decode(engine: Engine, job: Job) -> Run:
    """Decode all prompts. Raises the error of the first request that could not be served."""
    tokens: list[list[int]] = [[] for _ in job.prompts]
    first: dict[int, tuple[float, int]] = {}  # when the first tokens came, and how many they were
    token_seconds = {}
    started = perf_counter()
    for chunk in engine.stream(job.prompts, job.params, **job.options):
        now = perf_counter()
        if chunk.error is not None:
            raise chunk.error
        mine = tokens[chunk.index]
        mine += chunk.token_ids
        since, num_first = first.setdefault(chunk.index, (now, len(mine)))
        if len(mine) > num_first:
            token_seconds[chunk.index] = (now - since) / (len(mine) - num_first)
    counts = engine.last_run.decoding
    seconds = perf_counter() - started
    return Run(tokens, seconds, [*token_seconds.values()], counts.mean_acceptance_length, counts.acceptance_rate)


@dataclass
class Speed:
    """What was measured of one drafter with one K at one batch size; plain decoding is ``NO_DRAFT`` with K 0."""

    draft: str
    num_draft_tokens: int | str
    batch_size: int
    runs: list[Run] = field(default_factory=list)
    problem: str | None = None  # why it could not be measured

    @property
    def setting(self) -> tuple[str, int | str]:
        """The drafter and its K."""
        return self.draft, self.num_draft_tokens

    @property
    def tokens_per_second(self) -> float:
        """The median of the runs."""
        return median(run.tokens_per_second for run in self.runs)

    @property
    def token_milliseconds(self) -> tuple[float, float] | None:
        """Median and 95th percentile over all requests of milliseconds per token; None if all ended in one step."""
        times = [1e3 * seconds for run in self.runs for seconds in run.token_seconds]
        if not times:
            return None
        return median(times), quantiles(times, n=20, method="inclusive")[-1] if len(times) > 1 else times[0]

    def speedup(self, plain: Speed) -> float:
        """Return the median of the ratios to plain decoding, each within one repeat."""
        pairs = zip(self.runs, plain.runs, strict=True)
        return median(mine.tokens_per_second / others.tokens_per_second for mine, others in pairs)

    def different_lines(self, plain: Speed) -> list[int]:
        """Return the numbers of the prompts, from 1, whose tokens differ from those of plain decoding in any run."""
        pairs = [
            zip(mine.tokens, others.tokens, strict=True) for mine, others in zip(self.runs, plain.runs, strict=True)
        ]
        return sorted({i for pair in pairs for i, (mine, others) in enumerate(pair, start=1) if mine != others})

    def as_dict(self, plain: Speed) -> dict[str, Any]:
        """Return plain values for JSON."""
        values: dict[str, Any] = {
            "batch_size": self.batch_size,
            "draft": self.draft,
            "num_draft_tokens": self.num_draft_tokens,
        }
        if self.problem is not None:
            return values | {"problem": self.problem}
        milliseconds = self.token_milliseconds
        return values | {
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.speedup(plain),
            "mean_acceptance_length": self.runs[-1].mean_acceptance_length,
            "acceptance_rate": self.runs[-1].acceptance_rate,
            "token_milliseconds": milliseconds and milliseconds[0],
            "token_milliseconds_p95": milliseconds and milliseconds[1],
            "different_lines": self.different_lines(plain),
        }


def measure(
    settings: list[tuple[str, int | str]],
    batch_size: int,
    repeats: int,
    make: Callable[[str, int | str], Engine],
    job: Job,
) -> Iterator[list[Speed]]:
    """Measure every setting at one batch size: one run of each to warm up, then ``repeats`` interleaved runs.

    Args:
        settings: drafters with their K, plain decoding first. One that cannot be made or run, plain decoding aside, is
            left out of the rest, with its problem.
        batch_size: sequences per step.
        repeats: measured runs of every setting.
        make: returns an engine for a drafter and a K.
        job: what is decoded.

    Yields:
        The list of all speeds, after every run; the same list each time, plain decoding first.
    """
    speeds = [Speed(draft, k, batch_size) for draft, k in settings]
    engines: dict[int, Engine] = {}

    def run(i: int, speed: Speed, counts: bool) -> None:
        try:
            engine = engines.get(i) or engines.setdefault(i, make(speed.draft, speed.num_draft_tokens))
            found = decode(engine, job)
        except SpecDecError as error:
            if i == 0:
                raise
            speed.problem = f"{type(error).__name__}: {error}"
            engines.pop(i, None)
            speed.runs.clear()
            return
        if counts:
            speed.runs.append(found)

    for repeat in range(repeats + 1):
        for i, speed in enumerate(speeds):
            if speed.problem is None:
                run(i, speed, counts=repeat > 0)
            yield speeds


def recommended(speeds: list[Speed]) -> tuple[tuple[str, int | str], dict[int, float]]:
    """Return the drafter and K with the largest geometric mean of speedups over the batch sizes, and those speedups.

    Plain decoding has a speedup of 1. A setting that could not be measured at some batch size is left out.
    """
    plain = {speed.batch_size: speed for speed in speeds if speed.setting == PLAIN}
    found: dict[tuple[str, int | str], dict[int, float]] = {}
    for speed in speeds:
        if speed.problem is None:
            gains = found.setdefault(speed.setting, {})
            gains[speed.batch_size] = speed.speedup(plain[speed.batch_size])
    everywhere = {setting: gains for setting, gains in found.items() if len(gains) == len(plain)}
    best = max(everywhere, key=lambda setting: geometric_mean(everywhere[setting].values()))
    return best, everywhere[best]
