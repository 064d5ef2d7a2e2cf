"""The choice of K where costs and acceptance are known: against brute force, and over whole runs in simulated time."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import MOST, World, best_fixed, speed, tokens_per_second

from specdec_fast.draft_lengths import StepRecord
from specdec_fast.draft_lengths.acceptance import Acceptance
from specdec_fast.draft_lengths.allocation import Costs, allocate, weights_by_end
from specdec_fast.draft_lengths.base import num_at_least
from specdec_fast.draft_lengths.costs import CostCurve
from specdec_fast.draft_lengths.fixed import FixedLength

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


def expected_speed(lengths, probabilities, costs, share=1.0):
    """Tokens per second of a step, in loops."""
    gained = sum(probabilities[i][j] * share for i, k in enumerate(lengths) for j in range(k))
    drafting = sum(costs.draft[sum(k > j for k in lengths)] for j in range(max(lengths)))
    entering = sum(costs.entry[i] * (1 + share * sum(probabilities[i][:k])) for i, k in enumerate(lengths) if k)
    rows = round(sum(lengths) * share)
    return (len(lengths) + gained) / (costs.verify[rows] + drafting + entering + costs.once * any(lengths))


@st.composite
def choices(draw, most_sequences=3, most=4):
    """Acceptance and costs of a step: rising costs of any shape, some caps, some entries."""
    num, most = draw(st.integers(1, most_sequences)), draw(st.integers(1, most))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    probabilities = np.minimum(rng.random((num, 1)) ** 0.5 * (1 + 0.1 * rng.random((num, most))), 1).cumprod(axis=1)
    verify = 1 + draw(st.floats(0, 1)) * np.sort(rng.random(num * most + 1)).cumsum()
    draft = np.array([0.0, *(draw(st.floats(0.001, 0.6)) * (1 + np.sort(rng.random(num))))])
    entry = rng.random(num) * draw(st.sampled_from([0.0, 0.3]))
    caps = np.minimum(rng.integers(0, most + 3, num), most)
    return probabilities, caps, Costs(verify, draft, entry, float(rng.random() * draw(st.sampled_from([0, 0.5]))))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(choices())
def test_choice_is_close_to_the_best_of_all_vectors(choice):
    """Never worse than any uniform K; within 5% of the best vector of K (which costs and ties decide, no greedy)."""
    probabilities, caps, costs = choice
    found = allocate(probabilities, caps, costs)
    assert all(0 <= k <= cap for k, cap in zip(found.lengths, caps, strict=True))
    got = expected_speed(found.lengths, probabilities, costs)
    assert got == pytest.approx(found.speed)
    assert found.plain_speed == pytest.approx(expected_speed([0] * len(caps), probabilities, costs))
    every = product(*(range(cap + 1) for cap in caps))
    best = max(expected_speed(lengths, probabilities, costs) for lengths in every)
    uniform = [[min(k, cap) for cap in caps] for k in range(probabilities.shape[1] + 1)]
    assert got >= max(expected_speed(lengths, probabilities, costs) for lengths in uniform) * (1 - 1e-12)
    assert got >= 0.95 * best


@settings(max_examples=60, deadline=None, derandomize=True)
@given(choices(most_sequences=4, most=3))
def test_choice_is_the_best_where_rows_cost_the_same(choice):
    """Verification in proportion to its rows, a forward of the draft at one price: then greedy is exact."""
    probabilities, caps, costs = choice
    costs = Costs(1 + 0.05 * np.arange(len(costs.verify)), np.where(costs.draft > 0, 0.1, 0.0), 0 * costs.entry)
    found = allocate(probabilities, caps, costs)
    every = product(*(range(cap + 1) for cap in caps))
    assert found.speed == pytest.approx(max(expected_speed(lengths, probabilities, costs) for lengths in every))


# What must come out whatever the numbers are: nothing accepted, drafts too dear, free drafts all accepted, no room.
@pytest.mark.parametrize(
    ("accepted", "draft", "caps", "expected"),
    [(0.0, 1e-6, [4, 4], [0, 0]), (0.9, 10.0, [4, 4], [0, 0]), (1.0, 0.0, [4, 3], [4, 3]), (1.0, 0.0, [0, 0], [0, 0])],
    ids=["never accepted", "costly", "free", "last token"],
)
def test_extremes(accepted, draft, caps, expected):
    probabilities = np.full((2, 4), accepted).cumprod(axis=1)
    costs = Costs(1 + 0.001 * np.arange(9), np.array([0, draft, draft]), np.zeros(2))
    assert allocate(probabilities, np.array(caps), costs).lengths == expected


def test_the_likelier_sequence_gets_more():
    probabilities = np.array([[0.2], [0.95], [0.6]]).repeat(6, axis=1).cumprod(axis=1)
    costs = Costs(1 + 0.1 * np.arange(19), np.array([0, 0.05, 0.05, 0.05]), np.zeros(3))
    poor, good, fair = allocate(probabilities, np.full(3, 6), costs).lengths
    assert poor < fair < good


@settings(max_examples=60, deadline=None, derandomize=True)
@given(choices())
def test_the_rule_behind_a_choice_gives_as_much_to_others_alike(choice):
    """What comes between two choices is not given less than the choice gave it, nor anything beyond its depth."""
    probabilities, caps, costs = choice
    found = allocate(probabilities, caps, costs)
    others = found.lengths_of(probabilities, costs.entry)
    assert all(k <= other <= max(found.lengths) for k, other in zip(found.lengths, others, strict=True))


def test_rows_that_are_not_proposed_are_not_charged():
    probabilities = np.full((4, 4), 0.8).cumprod(axis=1)
    costs = Costs(1 + 0.02 * np.arange(17), np.full(5, 1e-6), np.zeros(4))
    full, rare = (allocate(probabilities, np.full(4, 4), costs, share).speed for share in (1.0, 0.25))
    lengths = allocate(probabilities, np.full(4, 4), costs, 0.25).lengths
    assert rare == pytest.approx(expected_speed(lengths, probabilities, costs, 0.25), rel=1e-4)
    assert rare < full


GRID = [(r, b) for r in REGIMES for b in (1, 4, 32)]
ACCEPTANCES = (0.0, 0.2, 0.5, 0.8, 0.95, 1.0)


@pytest.mark.parametrize(("regime", "batch_size"), GRID)
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


@pytest.mark.parametrize("batch_size", [1, 4, 32])
@pytest.mark.parametrize("regime", SHORT)
def test_books_are_kept_where_steps_are_short(regime, batch_size):
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
def test_books_take_about_a_percent(acceptance):
    run = world("short steps", acceptance, 4, num_sequences=96)
    lengths = run.warm()
    before = run.book_seconds(lengths)
    seconds = 96 * run.new_tokens / tokens_per_second(run, lengths)
    assert 0.001 < (run.book_seconds(lengths) - before) / seconds < 0.02


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


@pytest.mark.parametrize("batch_size", [4, 16, 32])
@pytest.mark.parametrize("new_tokens", [32, 128])
def test_batch_that_nobody_joins(batch_size, new_tokens):
    """The steps of the last ones cost much for few rows: where drafting gains little, it must even out the ends."""
    for acceptance in ACCEPTANCES[:-1]:
        run = on_two_cores(acceptance, batch_size, new_tokens=new_tokens, is_refilled=False)
        runs = [replace(run, seed=seed) for seed in range(3)]
        plain, fixed, warm = speed(runs, lambda run: FixedLength(0)), best_fixed(runs), speed(runs, World.warm)
        assert speed(runs, World.adaptive) >= 0.97 * plain, f"cold, acceptance {acceptance}"
        assert warm >= 0.97 * fixed, f"acceptance {acceptance}"
        if (batch_size, new_tokens, acceptance) == (16, 128, 0.8):
            assert warm >= 1.01 * fixed  # which every sequence's token counting the same does not reach


@pytest.mark.parametrize("batch_size", [4, 16, 32])
def test_forwards_that_were_measured_once(batch_size):
    """Each measurement is wrong by a tenth: no engine of six may go on with what does not pay, nor lose its gain."""
    for acceptance in ACCEPTANCES[:-1]:
        run = on_two_cores(acceptance, batch_size, mismeasured=0.1)
        runs = [replace(run, seed=seed) for seed in range(6)]
        plain = speed(runs, lambda run: FixedLength(0))
        speeds = [tokens_per_second(run, run.warm()) for run in runs]
        assert min(speeds) >= 0.97 * plain, f"acceptance {acceptance}"
        assert np.mean(speeds) >= 0.95 * best_fixed(runs[:2]), f"acceptance {acceptance}"


def test_weights_of_those_who_end_last():
    weights = weights_by_end([200, 10, 150, 200], one=3.0, others=1.5)
    assert sum(weights) == pytest.approx(4)
    assert weights[0] == weights[3] > weights[2] > weights[1]
    assert weights[1] == pytest.approx(4 * 0.5 / 4.5, rel=0.01)  # it saves its row of a step, and hardly more
    assert weights_by_end([20, 20, 20], one=3.0, others=1.0) == pytest.approx([1, 1, 1])
    assert weights_by_end([40, 10, 30], one=1.0, others=2.0) == pytest.approx([1, 1, 1])  # where rows are all there is


def test_who_counts_more_gets_more():
    costs = Costs([1 + 0.2 * n for n in range(9)], [0, 0.1, 0.2], [0, 0])
    assert allocate([[0.5] * 4] * 2, [4, 4], costs).lengths[0] == allocate([[0.5] * 4] * 2, [4, 4], costs).lengths[1]
    first, second = allocate([[0.5] * 4] * 2, [4, 4], costs._replace(weights=[0.2, 1.8])).lengths
    assert first == 0 < second


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


@pytest.mark.parametrize("batch_size", [1, 4])
def test_short_texts_and_a_draft_model_that_is_dear_to_prefill(batch_size):
    """Two cores, Qwen3-1.7B's shape and Qwen3-0.6B's as its draft: if drafting pays, then only from a text's start.

    Nor may those whom the draft model has taken in lead others into what does not pay from a text's start.
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
    """What verifications show to be wrong is corrected for drafting as well, which is never tried at such a price."""
    run = world("flat", 0.9, 4, num_sequences=24)
    busy = replace(run, verify=lambda n: 100 * run.verify(n), draft=lambda n: 100 * run.draft(n))
    lengths = busy.adaptive()
    tokens_per_second(run, lengths)
    assert tokens_per_second(run, lengths) >= 0.95 * best_fixed([run])


def test_cost_curve_follows_what_steps_take():
    curve = CostCurve({1: 1.0, 4: 1.0, 8: 2.0}, multiple=4)
    assert curve([0, 1, 4, 5, 8, 12]) == pytest.approx([0, 1, 1, 2, 2, 3])
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
        acceptance.observe(StepRecord([first, second], [4, 4], [4, 4], [4, 0], 1.0, 1.0, 1.0))
    of_first, of_second, of_new = (row[0] for row in acceptance.probabilities([first, second, object()]))
    assert of_second < 0.4 < of_new < 0.7 < of_first
    assert acceptance.probabilities([second])[0][3] < 0.1
    assert before > 0.9, "hopeful at first"
    acceptance.forget(first)
    assert acceptance.probabilities([first])[0][0] == pytest.approx(of_new)


def test_num_at_least():
    assert num_at_least([3, 0, 1, 3, 2], 4) == [4, 3, 2, 0]
    assert num_at_least([], 2) == [0, 0]
