"""``num_draft_tokens="auto"`` beside fixed K, over the same prompts.

One engine decodes with every policy in turn, so that all of them have the same programs, pools and profile. A policy
keeps what it learned: its first five runs are not measured, so the figures are those of warm engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from statistics import median
from typing import Any

from bench.common.measurement import Measurement, MethodSetting, Runs
from bench.common.replay import ReplayDrafter
from bench.common.timing import median_ratio
from bench.common.workload import Workload
from bench.engine_.methods import Bench, EngineRunner
from specdec_fast import Engine, LengthPolicy
from specdec_fast.commands.common import format_table
from specdec_fast.drafters import Drafter
from specdec_fast.runner.profiling import forward_seconds
from specdec_fast.speculation_length import Profiler
from specdec_fast.speculation_length.adaptive import AdaptiveLength
from specdec_fast.speculation_length.fixed import FixedLength

FULL = "auto"
FIXED = {f"K {k}": k for k in (0, 3, 5)}
WARM_UPS = 4  # runs of a policy that learns before its first, which is not measured either
POLICIES: dict[str, Callable[[], LengthPolicy]] = {
    **{name: partial(FixedLength, k) for name, k in FIXED.items()},
    FULL: AdaptiveLength,
}


class PolicyRunner(EngineRunner):
    """An engine that decodes all prompts with a policy of its own."""

    def __init__(self, engine: Engine, drafter: Drafter, workload: Workload, policy: LengthPolicy) -> None:
        super().__init__(engine, drafter, workload)
        self.policy = policy
        self._warm_ups = 0 if isinstance(policy, FixedLength) else WARM_UPS

    def __call__(self) -> Measurement:
        """Decode."""
        self.engine.core.drafting.length_policy = self.policy
        for _ in range(self._warm_ups):
            super().__call__()
        self._warm_ups = 0
        return super().__call__()


def settings_of(
    bench: Bench,
    method: str,
    batch_sizes: list[int],
    acceptances: list[tuple[float, ...] | None],
) -> Iterator[MethodSetting]:
    """Yield every policy at every batch size and acceptance.

    Args:
        bench: the models and the prompts.
        method: scheduler.
        batch_sizes: largest batches of the engines.
        acceptances: of replayed drafts: one probability, or those of equal shares of the prompts, one after the other;
            None lets the draft model propose.

    """
    for batch_size in batch_sizes:
        engine = Engine(bench.target, bench.draft, method=method, max_batch_size=batch_size, num_draft_tokens=5)
        profiler = Profiler(
            batch_size,
            engine.target.layout.device.type != "cpu",
            _once(partial(forward_seconds, engine.target, most_sequences=batch_size)),
            _once(engine.drafter.forward_seconds),
        )
        for acceptance in acceptances:
            drafter = engine.drafter if acceptance is None else _replayed(bench, engine, acceptance)
            for name, make in POLICIES.items():
                policy = make()
                policy.prepare(profiler)
                label = name if acceptance is None else f"{name} ({':'.join(map(str, acceptance))})"
                yield MethodSetting(label, batch_size, PolicyRunner(engine, drafter, bench.workload, policy))


def _once(measure: Callable[[list[int]], Any]) -> Callable[[list[int]], Any]:
    """Measure each list of counts once; who asks may change what it gets."""
    kept = cache(lambda counts: measure(list(counts)))
    return lambda counts: dict(kept(tuple(counts)))


def _replayed(bench: Bench, engine: Engine, acceptance: tuple[float, ...]) -> Drafter:
    num = len(bench.transcripts)
    each = [acceptance[index * len(acceptance) // num] for index in range(num)]
    layout = engine.target.layout
    return ReplayDrafter(engine.drafter, bench.transcripts, each, engine.target.vocab_size, layout.device)


def rows_of(runs: Runs) -> list[dict[str, Any]]:
    """Return one row per policy, batch size and acceptance, with its speed over those of fixed K."""
    groups: dict[tuple[int, str], dict[str, list[Measurement]]] = {}
    for setting, measurements in runs.items():
        name, _, acceptance = setting.name.partition(" (")
        groups.setdefault((setting.batch_size, acceptance.rstrip(")")), {})[name] = measurements
    rows = []
    for (batch_size, acceptance), group in groups.items():
        speeds = {name: [m.tokens_per_second for m in measurements] for name, measurements in group.items()}
        best = max(FIXED, key=lambda name: median(speeds[name]))
        for name, measurements in group.items():
            decoding = measurements[-1].decoding
            rows.append({
                "policy": name,
                "batch_size": batch_size,
                "acceptance": acceptance or None,
                "tokens_per_second": median(speeds[name]),
                "over_plain": median_ratio(speeds[name], speeds["K 0"]),
                "over_best_fixed": median_ratio(speeds[name], speeds[best]),
                "best_fixed": best,
                "draft_tokens_per_step": decoding.num_draft_tokens / max(1, decoding.num_steps) if decoding else 0.0,
            })  # fmt: skip
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per row."""
    header = ("policy", "batch", "acceptance", "tokens/s", "x plain", "x best fixed", "drafted a step")
    keys = ("over_plain", "over_best_fixed", "draft_tokens_per_step")
    print(format_table(header, [
        (row["policy"], row["batch_size"], row["acceptance"] or "-", f"{row['tokens_per_second']:.0f}",
         *(f"{row[key]:.3f}" for key in keys))
        for row in rows
    ]))  # fmt: skip
