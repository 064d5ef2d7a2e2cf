"""The share of each realign method in a whole decoding step, on a pair that really decodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any

from bench.common.measurement import Measurement, MethodSetting, accepted_histogram, measure
from bench.engine_.methods import TRANSFORMERS, Bench
from specdec_fast.oracle.dense import Repad

ACCEPTANCE_BATCH_SIZE = 8  # acceptance does not depend on the batch size (I6)


def accepted_counts(bench: Bench, num_draft_tokens: int) -> list[int]:
    """Decode all prompts; return the number of sequence-steps that accepted a draft tokens, at index a (0 to K)."""
    run = bench.run_oracle_exspec(ACCEPTANCE_BATCH_SIZE, num_draft_tokens)
    return accepted_histogram(run.decoding, num_draft_tokens)


def method_settings(
    bench: Bench, repads: Mapping[str, Repad], batch_sizes: list[int], num_draft_tokens: int
) -> Iterator[MethodSetting]:
    """Yield the reference, then at every batch size the oracle with every repad, and the engine."""
    yield bench.method_setting(TRANSFORMERS, 1)
    for batch_size in batch_sizes:
        for name, run in (("eqspec", bench.run_oracle_eqspec), ("exspec", bench.run_oracle_exspec)):
            for repad_name, repad in repads.items():
                decode = partial(run, batch_size, num_draft_tokens, repad)
                yield MethodSetting(f"oracle-{name}-{repad_name}", batch_size, decode)
        for method in ("eqspec", "exspec"):
            yield MethodSetting(
                f"engine-{method}", batch_size, bench.engine_runner(batch_size, method, num_draft_tokens)
            )


def step_rows(settings: list[MethodSetting], repeats: int) -> list[dict[str, Any]]:
    """Decode with every setting, interleaved; exit if an output differs from transformers at batch 1.

    Returns:
        One row per method and batch size. A step is everything except the prefill. Realignment moves the KV of both
        models; assembling (oracle-exspec only) stacks a group's KV before the step and splits it afterwards.

    """
    runs = measure(settings, repeats)
    return [_row(c, measurements) for c, measurements in runs.items() if c.name != TRANSFORMERS]


def _row(setting: MethodSetting, measurements: list[Measurement]) -> dict[str, Any]:
    num_steps = measurements[0].num_steps
    stepping = [m.seconds - m.stage_seconds.get("prefill", 0.0) for m in measurements]

    def share(stage: str) -> float:
        pairs = zip(measurements, stepping, strict=True)
        return median(m.stage_seconds.get(stage, 0.0) / seconds for m, seconds in pairs)

    return {
        "method": setting.name,
        "batch": setting.batch_size,
        "steps": num_steps,
        "milliseconds_per_step": 1e3 * median(stepping) / num_steps,
        "realign_milliseconds_per_step": 1e3
        * median(m.stage_seconds.get("realign", 0.0) for m in measurements)
        / num_steps,
        "realign_share": share("realign"),
        "assemble_share": share("assemble"),
        "moved_bytes_per_step": measurements[0].moved_bytes / num_steps,
    }
