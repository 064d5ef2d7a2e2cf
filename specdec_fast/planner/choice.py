"""The fastest settings within a budget: batch size, K, drafter or none."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

from specdec_fast.config import EngineConfig
from specdec_fast.errors import ConfigError
from specdec_fast.planner.budget import Ask, EngineMemory, EngineSetting, first_within, halved
from specdec_fast.planner.costs import StepTimes

MOST_DRAFT_TOKENS = 8
DEFAULT_ACCEPTANCE = 0.8  # of every draft token, if nothing was measured


class Traffic(NamedTuple):
    """Requests to plan for: prompt and new tokens of each."""

    prompt_tokens: int
    new_tokens: int

    def positions(self) -> int:
        """Return the KV positions of a sequence: the newest token has none."""
        return self.prompt_tokens + self.new_tokens - 1


class PlannedSetting(NamedTuple):
    """A setting and what is expected of it."""

    setting: EngineSetting  # batch size, K, KV positions and the bound of prefill forwards
    tokens_per_second: float  # expected, prefills not counted
    plain_tokens_per_second: float  # of the same batch size without draft tokens
    expected_tokens: float  # that a sequence emits in a step
    seconds: float  # of a step
    terms: dict[str, int]  # bytes by term

    @property
    def total_bytes(self) -> int:
        """Bytes of all terms."""
        return sum(self.terms.values())

    @property
    def largest_term(self) -> str:
        """The term with most bytes."""
        return max(self.terms, key=self.terms.__getitem__)

    def config(self, memory_bytes: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of an EngineConfig that has this setting, and the fields that were ``given`` to plan it."""
        setting = self.setting
        fields = {
            **given,
            "max_batch_size": setting.batch_size,
            "num_draft_tokens": setting.num_draft_tokens,
            "window_size": setting.num_resident,
            "kv_cache_tokens": setting.num_positions,
            "max_prefill_tokens": setting.max_prefill_tokens,
            "memory_bytes": memory_bytes,
        }
        EngineConfig.from_keywords(fields)
        return fields


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """Return the tokens that a sequence emits in a step, by K: ``1 + sum P`` with ``P`` the probability of each path.

    ``acceptance`` is, for each position of a draft, the probability that its token is accepted if those before it are
    (Leviathan et al., arXiv 2211.17192, section 3.1).
    """
    return list(accumulate(accumulate(acceptance, mul), initial=1.0))


def read_acceptance(source: str, most: int = MOST_DRAFT_TOKENS) -> list[float]:
    """Return the acceptance of each of ``most`` positions of a draft, as ``expected_tokens`` takes it.

    ``source`` is a probability, for all positions; or a JSON file: a report of ``bench.engine``, of whose rows the one
    with the largest fixed K counts; statistics with ``num_drafts`` and ``accepted_per_position``; or an object with
    ``acceptance``, a probability or one per position. The last position stands for those beyond. Raises ConfigError if
    the file cannot be read, or is none of these.
    """
    number = _number(source)
    if number is not None:
        return _probabilities(number, most)
    try:
        data = json.loads(Path(source).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"acceptance {source}: neither a probability nor a JSON file: {error}.") from None
    try:
        values = _acceptance_of(data)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError):  # JSON of another shape
        values = None
    if values is None:
        raise ConfigError(
            f"acceptance {source}: expected a report of bench.engine with a fixed K, statistics with num_drafts and "
            "accepted_per_position, or an object with acceptance."
        )
    return _probabilities(values, most)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _acceptance_of(data: Any) -> float | list[float] | None:
    if not isinstance(data, Mapping):
        return None
    if "acceptance" in data and "rows" not in data:
        return data["acceptance"]
    if data.get("num_drafts") and data.get("accepted_per_position"):
        return _conditional([data["num_drafts"], *data["accepted_per_position"]])
    rows = [
        row
        for row in data.get("rows") or ()
        if isinstance(row.get("num_draft_tokens"), int) and len(row.get("accepted_histogram") or ()) > 1
    ]
    if not rows:
        return None
    histogram = max(rows, key=lambda row: row["num_draft_tokens"])["accepted_histogram"]
    return _conditional(list(accumulate(reversed(histogram)))[::-1])


def _conditional(reached: Sequence[float]) -> list[float]:
    """Return how likely the next token is accepted, from how many drafts had so many accepted or more."""
    return [after / before if before else 0.0 for before, after in pairwise(reached)]


def _probabilities(value: Any, most: int) -> list[float]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(type(p) in (int, float) and 0 <= p <= 1 for p in values):
        shown = reprlib.repr(value)
        raise ConfigError(f"acceptance {shown}: expected a probability from 0 to 1, or one for each position.")
    return [float(p) for p in (*values, *[values[-1]] * most)][:most]


def choose(
    memory: EngineMemory,
    budget: int,
    batch_sizes: Sequence[int],
    traffic: Traffic,
    acceptance: Sequence[float],
    times: StepTimes,
    most_prefill_rows: int,
) -> list[PlannedSetting | None]:
    """Return, for every batch size, the K with the most expected tokens per second; None if no K fits.

    It maximises ``B (1 + sum P) / (verify + draft)`` over K from 0 to the number of positions of ``acceptance``. The
    memory of K 0 is without the drafter. A window of twice the batch is taken if it fits.

    ``memory`` is that of the engine, with the drafter if there is one; ``acceptance`` the probability of each position
    of a draft; ``most_prefill_rows`` the rows of a prefill forward without a bound.
    """
    emitted = expected_tokens(acceptance if memory.drafter is not None else [])
    choices: list[PlannedSetting | None] = []
    for size in batch_sizes:
        plain = size / times.seconds(size, 0)
        options = []
        for k, tokens in enumerate(emitted):
            setting = first_within(memory, budget, _ask(memory, size, k, traffic, most_prefill_rows).settings(size))
            if setting is not None:
                seconds = times.seconds(size, k)
                options.append(
                    PlannedSetting(
                        setting=setting,
                        tokens_per_second=size * tokens / seconds,
                        plain_tokens_per_second=plain,
                        expected_tokens=tokens,
                        seconds=seconds,
                        terms=memory.terms(setting),
                    )
                )
        choices.append(max(options, key=lambda choice: choice.tokens_per_second, default=None))
    return choices


def least_setting(memory: EngineMemory, traffic: Traffic) -> EngineSetting:
    """Return a plain step of one sequence of the traffic, prefilled row by row: what a budget must hold at least."""
    return EngineSetting(1, 0, 1, memory.rounded(traffic.positions()), 1)


def _ask(memory: EngineMemory, size: int, k: int, traffic: Traffic, most_prefill_rows: int) -> Ask:
    each = memory.rounded(traffic.positions())
    return Ask(size, [k], lambda b: [2 * b, b], lambda resident, _: resident * each, halved(None, most_prefill_rows))
