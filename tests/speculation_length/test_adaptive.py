"""The adaptive policy over whole runs in simulated time."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from bench.common.simulation import World, best_fixed, speed, tokens_per_second
from specdec_fast.speculation_length.adaptive import AdaptiveLength
from specdec_fast.speculation_length.fixed import FixedLength
from support.grids import combinations, grid

# Verifying is bound by memory with a cheap and with a costly draft, by arithmetic, by one and then the other, by
# contexts that grow beyond what was profiled, and by short steps.
REGIMES = {
    "flat": {"verify": lambda n: 1e-2 * (1 + 0.002 * n), "draft": lambda n: 1e-3 * (1 + 0.002 * n)},
    "costly draft": {"verify": lambda n: 1e-2 * (1 + 0.002 * n), "draft": lambda n: 4e-3 * (1 + 0.002 * n)},
    "linear": {"verify": lambda n: 1e-2 * (0.3 + 0.1 * n), "draft": lambda n: 1e-3 * (0.3 + 0.1 * n)},
    "roofline": {"verify": lambda n: 1e-2 * max(1, n / 24), "draft": lambda n: 1e-3 * max(1, n / 24)},
    "long contexts": {
        "verify": lambda n: 1e-2 * (1 + 0.002 * n),
        "draft": lambda n: 1e-3 * (1 + 0.002 * n),
        "growth": 5e-6,
    },
    "short steps": {
        "verify": lambda n: 6e-5 + 2.5e-5 * n,
        "draft": lambda n: 1.7e-5 + 4e-6 * n,
        "once": 2e-5,
        "overhead": 4e-5,
    },
}
PLAIN_OR_USUAL = (0, 3, 5)
ACCEPTANCES = (0.0, 0.2, 0.5, 0.8, 0.95, 1.0)


def world(regime, acceptance, batch_size, **options):
    constant = acceptance if callable(acceptance) else lambda number, position: acceptance
    return World(acceptance=constant, batch_size=batch_size, **(REGIMES[regime] | options))


def warm(run):
    return run.warmed(AdaptiveLength())


def plain(runs):
    return best_fixed(runs, (0,))


@pytest.mark.parametrize(
    ("regime", "batch_size", "acceptance"),
    grid(product(REGIMES, [1, 4, 32], ACCEPTANCES), keep=[("flat", 32, 0.8), ("roofline", 4, 0.0)]),
)
def test_auto_reaches_the_best_fixed_k(regime, batch_size, acceptance):
    """Once warm 0.93 of the best fixed K; a first call pays for the first race, and reaches 0.9 of plain decoding; 0.8
    of it where the call is hardly longer than the race, at batch 32.

    Each figure is the mean of three runs. Steps are timed with noise, and one of a hundred takes five times as long.
    """
    least = 48 if regime == "short steps" else 12
    run = world(regime, acceptance, batch_size, num_sequences=max(least, 2 * batch_size))
    runs = [replace(run, seed=seed) for seed in range(3)]
    cold = speed(runs, lambda run: run.prepared(AdaptiveLength()))
    assert cold >= (0.9 if batch_size < 32 else 0.8) * plain(runs), "cold"
    assert speed(runs, warm) >= 0.93 * best_fixed(runs)


def test_a_fixed_k_would_fail_that():
    """No K is within 0.93 of the best everywhere, so the test above can fail."""
    runs = [[world("costly draft", acceptance, 4, num_sequences=12)] for acceptance in (0.0, 0.95)]
    for k in PLAIN_OR_USUAL:
        assert any(best_fixed(each, (k,)) < 0.93 * best_fixed(each, PLAIN_OR_USUAL) for each in runs)


@pytest.mark.parametrize("regime", ["flat", "costly draft"])
def test_acceptance_that_changes_is_followed(regime):
    """Useless drafts become good ones and useless again while the engine is kept; a later race notices it."""
    bad, good = (world(regime, acceptance, 4, num_sequences=12, new_tokens=512) for acceptance in (0.0, 0.95))
    policy = bad.prepared(AdaptiveLength())
    assert tokens_per_second(bad, policy) >= 0.97 * plain([bad])
    assert tokens_per_second(good, policy) >= 1.1 * plain([good]), "a race notices it during this call"
    assert tokens_per_second(good, policy) >= 0.9 * best_fixed([good], PLAIN_OR_USUAL)
    assert tokens_per_second(bad, policy) >= 0.95 * plain([bad])


def test_acceptance_that_turns_too_often_to_follow():
    """Within every text: what a race found is over before the next one is paid for."""
    turning = world("costly draft", lambda number, position: 0.95 * (position >= 256), 1, num_sequences=4)
    runs = [replace(turning, seed=seed, new_tokens=512) for seed in range(4)]
    assert speed(runs, lambda run: run.prepared(AdaptiveLength())) >= 0.97 * plain(runs)


# Rows and milliseconds of Qwen3-0.6B's shape on two cores, and of its draft.
TWO_CORES = [1, 3, 5, 8, 16, 24, 32, 48, 64, 128, 300], [44, 53, 59, 76, 112, 129, 170, 230, 282, 530, 1200]


def on_two_cores(acceptance, batch_size, **options):
    return World(
        verify=lambda n: float(np.interp(n, *TWO_CORES)) / 1e3,
        draft=lambda n: (4.5e-3 + 4.2e-4 * n) if n else 0.0,
        acceptance=lambda number, position: acceptance,
        batch_size=batch_size,
        num_sequences=64,
        prompt_length=16,
        **options,
    )


@pytest.mark.parametrize("acceptance", grid(ACCEPTANCES[:-1], keep=[0.8]))
@combinations(batch_size=[4, 16, 32], new_tokens=[32, 128])
def test_a_batch_that_no_sequence_joins(batch_size, new_tokens, acceptance):
    """The steps of the last sequences cost much for few rows. A first call pays for the first race."""
    run = on_two_cores(acceptance, batch_size, new_tokens=new_tokens, is_refilled=False)
    runs = [replace(run, seed=seed) for seed in range(3)]
    cold = speed(runs, lambda run: run.prepared(AdaptiveLength()))
    assert cold >= (0.9 if batch_size < 32 else 0.85) * plain(runs), "cold"
    assert speed(runs, warm) >= 0.93 * best_fixed(runs)


@pytest.mark.parametrize("acceptance", grid(ACCEPTANCES[:-1], keep=[0.2, 0.8]))
@pytest.mark.parametrize("batch_size", grid([4, 16, 32], keep=[16]))
def test_a_profile_that_is_wrong_by_a_tenth(batch_size, acceptance):
    """No engine of six goes on with what does not pay, nor loses its gain."""
    runs = [replace(on_two_cores(acceptance, batch_size, mismeasured=0.1), seed=seed) for seed in range(6)]
    speeds = [tokens_per_second(run, warm(run)) for run in runs]
    assert min(speeds) >= 0.93 * plain(runs)
    assert np.mean(speeds) >= 0.93 * best_fixed(runs[:2])


@pytest.mark.parametrize("batch_size", grid([1, 4], keep=[4]))
def test_a_draft_model_that_is_slow_to_prefill(batch_size):
    """Short texts, the shape of Qwen3-1.7B with Qwen3-0.6B as its draft: a prompt's prefill takes two plain steps."""
    costs = {"verify": lambda n: 0.112 + 0.005 * (n - 1), "draft": lambda n: 0.0436 + 0.0046 * (n - 1)}
    for acceptance in (0.0, 0.5, 0.8, 0.95):
        options = {"num_sequences": 60, "prompt_length": 32, "new_tokens": 32}
        run = World(**costs, acceptance=lambda i, p, a=acceptance: a, batch_size=batch_size, **options)
        runs = [replace(run, seed=seed) for seed in range(2)]
        assert speed(runs, lambda run: run.prepared(AdaptiveLength())) >= 0.9 * plain(runs), "the first race"
        assert speed(runs, warm) >= 0.95 * best_fixed(runs), f"acceptance {acceptance}"


@pytest.mark.parametrize("options", [{"is_profiled": False}, {"proposes": 0.3}], ids=["no profile", "rarely proposes"])
def test_a_drafter_that_the_profile_does_not_show(options):
    """An unknown drafter cost counts as zero until it is measured; what is not proposed is not counted on."""
    run = world("flat", 0.8, 4, num_sequences=12, **options)
    runs = [replace(run, seed=seed) for seed in range(6)]
    assert speed(runs, warm) >= 0.93 * best_fixed(runs, PLAIN_OR_USUAL)


def test_a_profile_from_a_busy_machine():
    """Steps correct it for drafting as well, which is never tried at such a price."""
    run = world("flat", 0.9, 4, num_sequences=24)
    busy = replace(run, verify=lambda n: 100 * run.verify(n), draft=lambda n: 100 * run.draft(n))
    policy = busy.prepared(AdaptiveLength())
    tokens_per_second(run, policy)
    assert tokens_per_second(run, policy) >= 0.95 * best_fixed([run], PLAIN_OR_USUAL)


@pytest.mark.parametrize("batch_size", grid([4, 16], keep=[4]))
def test_a_profile_that_shows_drafting_as_too_slow(batch_size):
    """Plain decoding seems faster, but the race does not believe the profile."""
    run = world("flat", 0.5, batch_size, num_sequences=12 * batch_size)
    slow = replace(run, draft=lambda n: 4.5 * run.draft(n))
    policy = slow.prepared(AdaptiveLength())
    tokens_per_second(run, policy)
    assert best_fixed([run], (3,)) > 1.2 * plain([run])
    assert best_fixed([slow], PLAIN_OR_USUAL) == plain([slow])
    assert tokens_per_second(run, policy) >= 0.95 * best_fixed([run], PLAIN_OR_USUAL)


class FakeSequence:
    length = prompt_length = 10
    max_length, num_remaining, is_admitted = 100, 90, True


def test_a_sequence_that_joins_gets_the_k_of_the_others():
    run = world("flat", 0.95, 2)
    policy = warm(run)
    tokens_per_second(run, policy)
    first, second, third = (FakeSequence() for _ in range(3))
    k = policy.limits([first, second])[0]
    assert k > 0
    assert policy.limits([first, third]) == [k, k]
    third.num_remaining = 2
    assert policy.limits([first, third]) == [k, 1]


def test_fixed_k():
    assert FixedLength(3).limits([FakeSequence()]) == [3]
