"""What ``plan`` found, as a table or for JSON."""

from __future__ import annotations

from typing import Any, NamedTuple

from specdec_fast.commands.common import format_table
from specdec_fast.planner.budget import EngineMemory, shown
from specdec_fast.planner.choice import PlannedSetting, Traffic
from specdec_fast.planner.costs import StepTimes
from specdec_fast.planner.scylla import best_draft_tokens, fit_batch_sizes


class PlanReport(NamedTuple):
    """What was planned: the best settings by batch size, and what they rest on."""

    memory_bytes: int
    traffic: Traffic
    acceptance: list[float]
    is_measured: bool
    memory: EngineMemory
    times: StepTimes
    batch_sizes: list[int]
    choices: list[PlannedSetting | None]
    given: dict[str, Any]  # fields of an EngineConfig, of plain values: those that the command line sets

    @property
    def best(self) -> PlannedSetting:
        """The setting with the most expected tokens per second; at least one fits."""
        return max(filter(None, self.choices), key=lambda choice: choice.tokens_per_second)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        balance = self.times.balance()
        limits = self.batch_sizes
        best_k = {size: best_draft_tokens(balance, size) for size in limits}
        has_fit = len(limits) > 1 and balance != float("inf")
        return {
            "memory_bytes": self.memory_bytes,
            "prompt_tokens": self.traffic.prompt_tokens,
            "new_tokens": self.traffic.new_tokens,
            "acceptance": self.acceptance,
            "measured": self.is_measured,
            "is_estimate": self.memory.is_estimate,
            "batches": [
                {"batch_size": size, "fits": False} if choice is None else {"fits": True, **self._of(choice)}
                for size, choice in zip(self.batch_sizes, self.choices, strict=True)
            ],
            "best": self._of(self.best),
            "rows_at_balance": balance if balance != float("inf") else None,
            "draft_tokens_at_balance": best_k if has_fit else {},
            "fit": fit_batch_sizes(limits, list(best_k.values()))._asdict() if has_fit else None,
        }

    def _of(self, choice: PlannedSetting) -> dict[str, Any]:
        return {
            "batch_size": choice.setting.batch_size,
            "num_draft_tokens": choice.setting.num_draft_tokens,
            "tokens_per_second": choice.tokens_per_second,
            "plain_tokens_per_second": choice.plain_tokens_per_second,
            "tokens_per_step": choice.expected_tokens,
            "seconds_per_step": choice.seconds,
            "limit": self.times.limit(choice.setting.num_rows),
            "bytes": choice.total_bytes,
            "largest_term": choice.largest_term,
            "terms": choice.terms,
            "config": choice.config(self.memory_bytes, self.given),
        }


def print_plan(plan: PlanReport) -> None:
    """Print a table with a line per batch size, the settings of the best one, and its bytes by term."""
    times = "measured here over short contexts" if plan.is_measured else "computed from --bandwidth and --peak"
    print(
        f"Budget {shown(plan.memory_bytes)}; requests of {plan.traffic.prompt_tokens} prompt and "
        f"{plan.traffic.new_tokens} new tokens; acceptance {', '.join(f'{p:.2f}' for p in plan.acceptance)}.\n"
        f"Times are {times}; prefill is not counted. Bytes are "
        f"{'partly estimated' if plan.memory.is_estimate else 'exact'}.\n"
    )
    header = ["batch", "K", "tokens/s", "over plain", "tokens/step", "memory", "largest term", "limit"]
    rows = []
    for size, choice in zip(plan.batch_sizes, plan.choices, strict=True):
        if choice is None:
            rows.append([size, *["-"] * 4, "does not fit", "-", "-"])
            continue
        gain = choice.tokens_per_second / choice.plain_tokens_per_second
        speed = f"{choice.tokens_per_second:.4g}"
        limit = plan.times.limit(choice.setting.num_rows)
        cells = [size, choice.setting.num_draft_tokens, speed, f"{gain:.2f}x", f"{choice.expected_tokens:.2f}"]
        rows.append([*cells, shown(choice.total_bytes), choice.largest_term, limit])
    print(format_table(header, rows))
    best = plan.best.config(plan.memory_bytes, plan.given)
    settings = ", ".join(f"{name}={value!r}" for name, value in best.items())
    print(f"\nBest: EngineConfig({settings})\n")
    print(format_table(["term", "bytes"], [*plan.best.terms.items(), ("sum", plan.best.total_bytes)]))
    print(f"\nA forward of up to R* = {plan.times.balance():.4g} rows takes about as long as one of a single row.")
