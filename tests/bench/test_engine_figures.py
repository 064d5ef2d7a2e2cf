"""The figures of bench.engine, from measurements made up for the test."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from bench.common.measurement import (
    Measurement,
    MethodSetting,
    accepted_histogram,
    equal_length_steps,
    grouping_rate,
)
from bench.engine_.summary import latency_percentiles, stage_shares, summarise
from specdec_fast import DecodingStats


def measurement(seconds=1.0, outputs=((0,) * 10,), **fields):
    return Measurement([list(o) for o in outputs], seconds, fields.pop("stages", {}), 0, 1, **fields)


def test_latency_percentiles():
    hundred = [float(i) for i in range(1, 102)]  # 1 to 101: the n-th percentile is n + 1
    found = latency_percentiles([measurement(latencies=[x + shift for x in hundred]) for shift in (0, 7, 1)])
    assert found == {"p50": 52, "p90": 92, "p99": 101}  # of the median repeat: shifted by 1
    assert latency_percentiles([measurement(latencies=[0.25])]) == {"p50": 0.25, "p90": 0.25, "p99": 0.25}
    assert latency_percentiles([measurement()]) is None


def test_host_is_what_no_stage_covers():
    stages = [{"prefill": 1.0, "verify": 2.0}, {"prefill": 3.0, "verify": 4.0}, {"prefill": 2.0, "verify": 2.0}]
    shares = stage_shares([measurement(10.0, stages=s) for s in stages])
    assert shares["prefill"] == 0.2
    assert shares["verify"] == 0.2
    assert shares["host"] == pytest.approx(0.6)
    assert stage_shares([measurement()]) is None


def test_grouping_rate():
    steps = [[5, 5, 7], [6], [8, 8, 9, 9], [1, 2, 3]]  # 2 + 0 + 4 + 0 of 11
    assert grouping_rate(steps) == 6 / 11
    assert equal_length_steps([[5, 5], [6], [8, 9]]) == pytest.approx(2 / 3)
    assert grouping_rate([]) == equal_length_steps([]) == 0


def test_histogram_of_accepted_tokens():
    stats, counted, draws = DecodingStats(), Counter(), random.Random(0)
    for _ in range(200):
        drafted = draws.randint(0, 5)
        accepted = draws.randint(0, drafted)
        stats.record(drafted, accepted, accepted + 1)
        counted[accepted] += 1
    assert accepted_histogram(stats, 5) == [counted[a] for a in range(6)]
    assert accepted_histogram(stats, 7) == [*(counted[a] for a in range(6)), 0, 0]
    assert accepted_histogram(stats, 0) == [counted[a] for a in range(6)], "K auto: as wide as what was drafted"


def test_speedups_are_medians_of_ratios_within_a_repeat():
    def method_setting(name, batch_size, k=None, acceptance=None):
        return MethodSetting(name, batch_size, lambda: None, k, acceptance)

    runs = {
        method_setting("autoregressive", 1): [measurement(8.0), measurement(8.0), measurement(8.0)],
        method_setting("autoregressive", 4): [measurement(4.0), measurement(2.0), measurement(4.0)],
        method_setting("oracle-eqspec", 4, 5): [measurement(3.0), measurement(3.0), measurement(3.0)],
        method_setting("oracle-eqspec", 4, 3): [measurement(9.0), measurement(9.0), measurement(9.0)],
        # half of the tokens: the speed is in tokens, not in runs
        method_setting("transformers", 4): [measurement(5.0, [(0,) * 5])] * 3,
        method_setting("eqspec", 4, 5): [measurement(1.0), measurement(1.0), measurement(2.0)],
        method_setting("eqspec", 4, 5, 0.8): [measurement(1.0)] * 3,
        method_setting("eqspec", 8, 5): [measurement(1.0)] * 3,
    }
    *_, row, replayed, alone = summarise(runs)
    assert row["tokens_per_second"] == 10
    assert row["speedup_over_plain"] == 2  # the median of 4, 2 and 2
    assert row["speedup_over_plain_batch_1"] == 8
    assert row["speedup_over_oracle"] == 3
    assert row["speedup_over_transformers"] == 10
    assert replayed["speedup_over_plain"] == 4
    assert replayed["speedup_over_oracle"] is None, "the oracle ran the draft as it is"
    assert alone["speedup_over_plain"] is alone["speedup_over_transformers"] is None
    assert alone["speedup_over_plain_batch_1"] == 8
