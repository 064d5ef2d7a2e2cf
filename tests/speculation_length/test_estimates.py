"""What the adaptive policy estimates: the costs of steps, and acceptance."""

from __future__ import annotations

import pytest

import specdec_fast as sd
from specdec_fast.runner import profiling
from specdec_fast.speculation_length.acceptance import Acceptance
from specdec_fast.speculation_length.step_costs import StepCosts
from support.models import tiny_model


def test_seconds_between_profiled_counts():
    costs = StepCosts({1: 1.0, 4: 1.0, 8: 2.0}, {0: 0.5, 1: 0.1, 2: 0.2})
    assert [costs.profile(size)[0] for size in (1, 4, 5, 8, 12)] == pytest.approx([1, 1, 1.25, 2, 3])
    assert costs.profile(2)[3] == pytest.approx(2 + 3 * 0.2 + 0.5)


@pytest.mark.parametrize("disturbed", [2, 8])
def test_a_disturbed_measurement_is_bounded_by_the_counts_beside_it(disturbed):
    """A row costs no more among more rows, and more rows cost no less."""
    seconds = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4} | {disturbed: 300.0}
    costs = StepCosts(seconds, None)
    assert all(costs.profile(size)[0] <= size for size in range(1, 9))
    assert costs.profile(8)[0] <= 2.4
    assert costs.profile(2)[0] <= 1.2


def test_acceptance_counts_what_was_tried():
    """Accepted over tried, where tokens after a rejection were not tried."""
    acceptance = Acceptance()
    assert acceptance.expected_tokens(1) == pytest.approx([1.0, 1.7]), "the prior"
    for _ in range(40):  # of 32 sequences half accept both tokens, half reject the first
        acceptance.add([(2, 2), (2, 0)] * 16)
    assert acceptance.expected_tokens(2) == pytest.approx([1, 1 + 2 / 3, 1 + 2 / 3 + 4 / 9], abs=0.05)


def test_acceptance_of_a_drafter_that_is_silent():
    acceptance = Acceptance()
    acceptance.add([(0, 0)] * 9)
    assert acceptance.expected_tokens(1)[1] == pytest.approx(1.7), "nothing was asked for"
    acceptance.add([(4, 0)] * 5000)
    assert acceptance.expected_tokens(4) == pytest.approx([1] * 5, abs=1e-3)


def test_acceptance_follows_the_last_tokens():
    acceptance = Acceptance()
    acceptance.add([(1, 1)] * 500)
    acceptance.add([(1, 0)] * 64)
    assert acceptance.expected_tokens(1)[1] == pytest.approx(1.36, abs=0.02)


def test_a_busy_moment_does_not_end_the_repeats_of_a_profile(monkeypatch):
    """The first forward at 4 rows is disturbed for longer than all repeats may take."""
    clock, calls = [0.0], []

    def forward(model, pool, num_rows, *_):
        calls.append(num_rows)
        seconds = 2.0 if calls.count(4) == 1 and num_rows == 4 else 0.001 * num_rows
        clock[0] += seconds
        return seconds

    monkeypatch.setattr(profiling, "_forward", forward)
    monkeypatch.setattr(profiling, "perf_counter", lambda: clock[0])
    model = sd.Engine(tiny_model("llama"), None).target
    assert profiling.forward_seconds(model, [1, 4, 8], 8) == pytest.approx({1: 0.001, 4: 0.004, 8: 0.008})
