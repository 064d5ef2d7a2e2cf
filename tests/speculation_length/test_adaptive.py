"""The choice of K over whole runs in simulated time, and what it rests on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specdec_fast.speculation_length import StepObservation
from specdec_fast.speculation_length.acceptance import Acceptance
from specdec_fast.speculation_length.base import num_at_least
from specdec_fast.speculation_length.cost_model import CostCurve
from specdec_fast.speculation_length.fixed import FixedLength
from support.grids import diagonal, grid
from support.simulated import MOST, World, best_fixed, speed, tokens_per_second

# Verifying is bound by memory with a cheap and with a costly draft, by arithmetic, by one and then the other, by what a
# step does besides forwards, and by contexts that grow beyond what was measured.
REGIMES = {
    "flat": {"verify": lambda n: 1e-2 * (1 + 0.002 * n), "draft": lambda n: 1e-3 * (1 + 0.002 * n)},
    "costly draft": {"verify": lambda n: 1e-2 * (1 + 0.002 * n), "draft": lambda n: 4e-3 * (1 + 0.002 * n)},
    "linear": {"verify": lambda n: 1e-2 * (0.3 + 0.1 * n), "draft": lambda n: 1e-3 * (0.3 + 0.1 * n)},
    "roofline": {"verify": lambda n: 1e-2 * max(1, n / 24), "draft": lambda n: 1e-3 * max(1, n / 24)},
    "overhead": {
        "verify": lambda n: 1e-3 * (1 + 0.02 * n),
        "draft": lambda n: 5e-4 * (1 + 0.02 * n),
        "overhead": 1e-3,
        "once": 1e-3,
    },
    "long contexts": {
        "verify": lambda n: 1e-2 * (1 + 0.002 * n),
        "draft": lambda n: 1e-3 * (1 + 0.002 * n),
        "growth": 5e-6,
    },
}


# Steps that take no longer than a few choices: the bundled pair on two cores, and a model bound by launching kernels.
SHORT = {
    "short steps": {
        "verify": lambda n: 6e-5 + 2.5e-5 * n,
        "draft": lambda n: 1.7e-5 + 4e-6 * n,
        "once": 2e-5,
        "overhead": 4e-5,
        "choice": 8e-5,
        "observation": 3e-5,
    },
    "short flat steps": {
        "verify": lambda n: 2e-4 * (1 + 0.002 * n),
        "draft": lambda n: 2e-5 * (1 + 0.002 * n),
        "overhead": 5e-5,
        "choice": 1e-4,
        "observation": 3e-5,
    },
}


def world(regime, acceptance, batch_size, **options):
    constant = acceptance if callable(acceptance) else lambda number, emitted: acceptance
    return World(acceptance=constant, batch_size=batch_size, **{**REGIMES, **SHORT}[regime] | options)


ACCEPTANCES = (0.0, 0.2, 0.5, 0.8, 0.95, 1.0)


@diagonal(regime=list(REGIMES), batch_size=[1, 4, 32])
def test_auto_reaches_the_best_fixed_k(regime, batch_size):
    """From the first token on never under 0.97 of plain decoding; once warm 0.95 of the best fixed K, over three runs.

    Steps are timed with noise, and one of a hundred takes five times as long.
    """
    for acceptance in ACCEPTANCES:
        run = world(regime, acceptance, batch_size, num_sequences=max(6, 2 * batch_size))
        runs = [replace(run, seed=seed) for seed in range(3 if batch_size < 32 else 1)]
        plain = speed(runs, lambda run: FixedLength(0))
        assert speed(runs, World.adaptive) >= 0.97 * plain, f"cold, acceptance {acceptance}"
        assert speed(runs, World.warm) >= 0.95 * best_fixed(runs), f"acceptance {acceptance}"


@diagonal(regime=list(SHORT), batch_size=[4, 32, 1])
def test_choosing_is_charged_where_steps_are_short(regime, batch_size):
    """Choosing and observing are charged, the more the larger the batch; what holds for longer steps holds here."""
    for acceptance in ACCEPTANCES:
        run = world(regime, acceptance, batch_size, num_sequences=max(64, 8 * batch_size))
        run = replace(
            run, choice=run.choice * (1 + batch_size / 8), observation=run.observation * (1 + batch_size / 32)
        )
        runs = [replace(run, seed=seed) for seed in range(2 if batch_size < 32 else 1)]
        plain = speed(runs, lambda run: FixedLength(0))
        assert speed(runs, World.adaptive) >= 0.97 * plain, f"cold, acceptance {acceptance}"
        assert speed(runs, World.warm) >= 0.95 * best_fixed(runs), f"acceptance {acceptance}"


@pytest.mark.parametrize("acceptance", [0.0, 0.6])
def test_choosing_takes_about_a_percent(acceptance):
    run = world("short steps", acceptance, 4, num_sequences=96)
    lengths = run.warm()
    before = run.choosing_seconds(lengths)
    seconds = 96 * run.new_tokens / tokens_per_second(run, lengths)
    assert 0.001 < (run.choosing_seconds(lengths) - before) / seconds < 0.02


@pytest.mark.parametrize("regime", ["flat", "costly draft"])
def test_acceptance_that_changes_is_tracked(regime):
    """Useless drafts become good ones and useless again, in the middle of a call: all sequences are new or old."""
    bad, good = (world(regime, a, 4, num_sequences=8, new_tokens=512) for a in (0.0, 0.95))
    lengths = bad.adaptive()
    plain = tokens_per_second(bad, FixedLength(0))
    assert tokens_per_second(bad, lengths) >= 0.97 * plain
    assert tokens_per_second(good, lengths) >= 1.2 * plain
    assert tokens_per_second(good, lengths) >= 0.95 * best_fixed([good])
    assert tokens_per_second(bad, lengths) >= 0.95 * plain
    turning = world(regime, lambda number, emitted: 0.95 * (emitted >= 256), 1, num_sequences=4, new_tokens=512)
    assert tokens_per_second(turning, turning.adaptive()) >= 1.1 * tokens_per_second(turning, FixedLength(0))


def test_sequences_of_one_batch_get_different_k():
    """Every second sequence is hard to draft for: no single K suits both."""
    run = world("linear", lambda number, emitted: 0.95 if number % 2 else 0.1, 2, num_sequences=12, new_tokens=256)
    assert tokens_per_second(run, run.adaptive()) > best_fixed([run])


# Rows and milliseconds of Qwen3-0.6B's shape on two cores, and of its draft.
TWO_CORES = [1, 3, 5, 8, 16, 24, 32, 48, 64, 128, 300], [44, 53, 59, 76, 112, 129, 170, 230, 282, 530, 1200]


def on_two_cores(acceptance, batch_size, **options):
    return World(
        verify=lambda n: float(np.interp(n, *TWO_CORES)) / 1e3,
        draft=lambda n: (4.5e-3 + 4.2e-4 * n) if n else 0.0,
        acceptance=lambda number, emitted: acceptance,
        batch_size=batch_size,
        prompt_length=16,
        num_sequences=64,
        **options,
    )


@diagonal(batch_size=[4, 16, 32], new_tokens=[32, 128])
def test_batch_that_no_sequence_joins(batch_size, new_tokens):
    """The steps of the last ones cost much for few rows: where drafting gains little, it must even out the ends."""
    for acceptance in ACCEPTANCES[:-1]:
        run = on_two_cores(acceptance, batch_size, new_tokens=new_tokens, is_refilled=False)
        runs = [replace(run, seed=seed) for seed in range(3)]
        plain, fixed, warm = speed(runs, lambda run: FixedLength(0)), best_fixed(runs), speed(runs, World.warm)
        assert speed(runs, World.adaptive) >= 0.97 * plain, f"cold, acceptance {acceptance}"
        assert warm >= 0.97 * fixed, f"acceptance {acceptance}"
        if (batch_size, new_tokens, acceptance) == (16, 128, 0.8):
            assert warm >= 1.01 * fixed  # which every sequence's token counting the same does not reach


@pytest.mark.parametrize("batch_size", grid([4, 16, 32], keep=[4]))
def test_forwards_that_were_measured_once(batch_size):
    """Each measurement is wrong by a tenth: no engine of six may draft where it does not pay, nor lose its gain."""
    for acceptance in ACCEPTANCES[:-1]:
        run = on_two_cores(acceptance, batch_size, mismeasured=0.1)
        runs = [replace(run, seed=seed) for seed in range(6)]
        plain = speed(runs, lambda run: FixedLength(0))
        speeds = [tokens_per_second(run, run.warm()) for run in runs]
        assert min(speeds) >= 0.97 * plain, f"acceptance {acceptance}"
        assert np.mean(speeds) >= 0.95 * best_fixed(runs[:2]), f"acceptance {acceptance}"


@pytest.mark.parametrize("acceptance", [0.0, 0.7])
def test_drafter_of_unknown_cost_is_measured_at_work(acceptance):
    run = world("flat", acceptance, 4, num_sequences=12)
    lengths = run.adaptive(is_measured=False)
    tokens_per_second(run, lengths)
    assert tokens_per_second(run, lengths) >= 0.95 * best_fixed([run])


def test_drafter_that_rarely_proposes():
    run = world("flat", 0.8, 4, num_sequences=12, proposes=0.3)
    assert tokens_per_second(run, run.adaptive()) >= 0.95 * best_fixed([run])


def test_long_prompt_with_few_tokens_to_come_is_not_worth_a_prefill():
    run = world("linear", 0.8, 1, num_sequences=6, prompt_length=2000, new_tokens=4)
    plain, fixed = (tokens_per_second(run, FixedLength(k)) for k in (0, 3))
    assert fixed < 0.97 * plain
    assert tokens_per_second(run, run.adaptive()) >= 0.99 * plain


@pytest.mark.parametrize("batch_size", grid([1, 4], keep=[1]))
def test_short_texts_and_a_draft_model_that_is_dear_to_prefill(batch_size):
    """Two cores, Qwen3-1.7B's shape and Qwen3-0.6B's as its draft: if drafting pays, then only from a text's start.

    Sequences that the draft model has prefilled must not make others draft where that does not pay from a text's start.
    """
    costs = {"verify": lambda n: 0.112 + 0.005 * (n - 1), "draft": lambda n: 0.0436 + 0.0046 * (n - 1)}
    for acceptance in ACCEPTANCES:
        options = {"num_sequences": 60, "prompt_length": 32, "new_tokens": 32}
        run = World(**costs, acceptance=lambda i, e, a=acceptance: a, batch_size=batch_size, **options)
        runs = [replace(run, seed=seed) for seed in range(4)]
        plain = speed(runs, lambda run: FixedLength(0))
        assert speed(runs, World.adaptive) >= 0.97 * plain, f"cold, acceptance {acceptance}"
        assert speed(runs, World.warm) >= 0.95 * best_fixed(runs), f"acceptance {acceptance}"


def test_forwards_that_were_measured_on_a_busy_machine():
    """What verifications show to be wrong is corrected for drafting as well, which is not tried at such a cost."""
    run = world("flat", 0.9, 4, num_sequences=24)
    busy = replace(run, verify=lambda n: 100 * run.verify(n), draft=lambda n: 100 * run.draft(n))
    lengths = busy.adaptive()
    tokens_per_second(run, lengths)
    assert tokens_per_second(run, lengths) >= 0.95 * best_fixed([run])


def test_cost_curve_follows_what_steps_take():
    curve = CostCurve({1: 1.0, 4: 1.0, 8: 2.0})
    assert curve([0, 1, 4, 5, 8, 12]) == pytest.approx([0, 1, 1, 1.25, 2, 3])
    for _ in range(60):
        curve.observe(4, 2.0)
    assert curve([4, 8]) == pytest.approx([2, 4], rel=0.2)
    (before,) = curve([4])
    curve.observe(4, 500.0)  # the machine was busy
    assert curve([4])[0] / before < 1.1


def test_largest_count_is_corrected_though_it_was_measured_to_cost_no_more_than_the_one_before():
    curve = CostCurve({1: 1.0, 4: 2.0, 8: 2.0})
    for _ in range(100):
        curve.observe(4, 1.0)
        curve.observe(8, 1.5)
    assert curve([8]) == pytest.approx([3.0], rel=0.1)


def test_more_rows_never_look_cheaper():
    curve = CostCurve({1: 1.0, 2: 1.3, 4: 1.2, 8: 2.0})  # a slow moment at 2
    for _ in range(30):
        curve.observe(4, 0.5)
    assert (np.diff(curve(range(1, 20))) >= 0).all()


def test_acceptance_is_that_of_the_past():
    """The estimate is accepted over tried, where tokens after a rejection were not tried."""
    acceptance = Acceptance(MOST)
    first, second = object(), object()
    before = acceptance.probabilities([first])[0][0]
    for _ in range(40):
        acceptance.observe(StepObservation([first, second], [4, 4], [4, 4], [4, 0], 1.0, 1.0, 1.0))
    of_first, of_second, of_new = (row[0] for row in acceptance.probabilities([first, second, object()]))
    assert of_second < 0.4 < of_new < 0.7 < of_first
    assert acceptance.probabilities([second])[0][3] < 0.1
    assert before > 0.9, "an optimistic prior"
    acceptance.forget(first)
    assert acceptance.probabilities([first])[0][0] == pytest.approx(of_new)


def test_num_at_least():
    assert num_at_least([3, 0, 1, 3, 2], 4) == [4, 3, 2, 0]
    assert num_at_least([], 2) == [0, 0]
