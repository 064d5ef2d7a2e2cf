"""The choice of batch size and K: by expected tokens per second, within the budget; and where acceptance comes from."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_fast.errors import ConfigError
from specdec_fast.kv_cache.state_pool import StateShape
from specdec_fast.models.sharded import Exchanges
from specdec_fast.planner.budget import EngineMemory, Part
from specdec_fast.planner.checkpoint import CheckpointSizes
from specdec_fast.planner.choice import Traffic, choose, expected_tokens, read_acceptance
from specdec_fast.planner.costs import ComputedTimes, Device, Link, MeasuredTimes
from specdec_fast.planner.scylla import rows_at_balance
from specdec_fast.speculation_length.step_costs import StepCosts

TARGET = CheckpointSizes(16 * 10**9, 2**17, 2**18, 2**17, 8 * 10**9, 8192)
DRAFT = CheckpointSizes(12 * 10**8, 2**15, 2**18, 2**15, 6 * 10**8, 8192)
GPU = Device(bandwidth=2e12, peak=300e12)
TRAFFIC = Traffic(100, 29)


def memory(draft=DRAFT):
    def part(sizes):
        return Part(sizes.weights, sizes.bytes_per_token, lambda s: {"logits": s.num_rows * sizes.logits_bytes})

    return EngineMemory(part(TARGET), draft and part(draft), 16)


def times(draft=DRAFT):
    return ComputedTimes(TARGET, draft, GPU, 128)


def test_expected_tokens_are_a_geometric_sum():
    assert expected_tokens([0.5] * 3) == [1, 1.5, 1.75, 1.875]
    assert expected_tokens([]) == [1]


def test_the_choice_is_the_best_of_all():
    budget, acceptance = 10**12, [0.8] * 8
    found = choose(memory(), budget, [1, 4, 64, 512], TRAFFIC, acceptance, times(), 512)
    emitted = expected_tokens(acceptance)
    for size, choice in zip([1, 4, 64, 512], found, strict=True):
        speeds = [size * emitted[k] / times().seconds(size, k) for k in range(9)]
        assert choice.tokens_per_second == max(speeds)
        assert choice.setting.num_draft_tokens == speeds.index(max(speeds))
        assert choice.plain_tokens_per_second == speeds[0]
    lengths = [choice.setting.num_draft_tokens for choice in found]
    assert lengths == sorted(lengths, reverse=True)  # a larger batch has fewer rows to spare
    assert lengths[0] > lengths[-1]


def test_a_useless_or_missing_drafter_is_not_used():
    for drafter, acceptance in ((DRAFT, [0.0] * 8), (None, [0.9] * 8)):
        (choice,) = choose(memory(drafter), 10**12, [2], TRAFFIC, acceptance, times(drafter), 512)
        assert choice.setting.num_draft_tokens == 0
        assert "drafter weights" not in choice.terms


def test_without_memory_for_the_drafter_it_decodes_plainly():
    plain = TARGET.weights + 10**9
    assert choose(memory(), plain, [1], TRAFFIC, [0.9] * 8, times(), 512)[0].setting.num_draft_tokens == 0
    assert choose(memory(), plain + DRAFT.weights, [1], TRAFFIC, [0.9] * 8, times(), 512)[0].setting.num_draft_tokens
    assert choose(memory(), TARGET.weights, [1, 2], TRAFFIC, [0.9] * 8, times(), 512) == [None, None]


@given(st.integers(15 * 10**9, 19 * 10**9), st.integers(0, 10**9), st.floats(0, 1))
def test_more_memory_is_never_slower(budget, more, acceptance):
    pairs = zip(
        *(choose(memory(), b, [1, 8, 32], TRAFFIC, [acceptance] * 4, times(), 512) for b in (budget, budget + more)),
        strict=True,
    )
    for smaller, larger in pairs:
        if smaller is not None:
            assert smaller.total_bytes <= budget
            assert larger is not None
            assert larger.tokens_per_second >= smaller.tokens_per_second


def test_kv_positions_are_whole_pages_of_every_resident_sequence():
    (choice,) = choose(memory(), 10**12, [3], TRAFFIC, [0.5], times(), 512)
    assert choice.setting.num_resident == 6
    assert choice.setting.num_positions == 6 * 128  # 100 + 29 - 1
    config = choice.config(10**12, {})
    assert (config["max_batch_size"], config["window_size"], config["kv_cache_tokens"]) == (3, 6, 768)


def test_computed_times_are_the_larger_term():
    one = times().seconds(1, 0)
    assert one == pytest.approx((TARGET.weights + 128 * TARGET.bytes_per_token) / GPU.bandwidth)
    many = times(None).seconds(10_000, 0)
    assert many == pytest.approx(10_000 * 2 * TARGET.row_parameters / GPU.peak)
    assert times().seconds(1, 3) == pytest.approx(
        one + 3 * (DRAFT.weights + 128 * DRAFT.bytes_per_token) / GPU.bandwidth
    )
    state = StateShape("conv_rows_", (4, 2**20), 0)
    recurrent = TARGET._replace(states=(state, state))
    of_states = ComputedTimes(recurrent, None, GPU, 128).seconds(3, 0) - times(None).seconds(3, 0)
    assert of_states == pytest.approx(3 * 2 * 2**24 / GPU.bandwidth)
    balance = rows_at_balance(TARGET.weights, 2 * TARGET.row_parameters, GPU.bandwidth, GPU.peak)
    assert times().balance() == balance == pytest.approx(150)
    assert times().limit(int(balance)) == "reading weights"
    assert times().limit(int(balance) + 1) == "arithmetic"


def test_computed_times_have_the_exchanges_of_ranks():
    """Every rank receives the numbers of three others: a row's bytes for every row, and a latency for each exchange."""
    sharded = ComputedTimes(TARGET._replace(exchanges=Exchanges(65, 10**6)), DRAFT, GPU, 128, Link(4, 50e9, 20e-6))
    for size, drafts in ((1, 0), (8, 3)):
        expected = 65 * 20e-6 + 3 * size * (1 + drafts) * 10**6 / 50e9
        assert sharded.seconds(size, drafts) - times().seconds(size, drafts) == pytest.approx(expected)
    assert sharded.balance() == times().balance()
    assert sharded.limit(1) == "reading weights"
    assert sharded.limit(1000) == "exchanges"


def test_measured_times_are_the_profile():
    costs = StepCosts({1: 1.0, 8: 1.0, 16: 2.0, 32: 4.0}, {0: 0.5, 1: 0.1, 8: 0.2})
    measured = MeasuredTimes(costs, 32)
    assert measured.seconds(8, 3) == costs.profile(8)[3] == pytest.approx(4.0 + 3 * 0.2 + 0.5)
    assert measured.balance() == pytest.approx(8)  # a further row takes 1/8 s among many, one row 1 s


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"acceptance": 0.7}, [0.7, 0.7, 0.7]),
        ({"acceptance": [0.9, 0.5]}, [0.9, 0.5, 0.5]),
        ({"num_drafts": 10, "accepted_per_position": [8, 4]}, [0.8, 0.5, 0.5]),
        ({"rows": [{"num_draft_tokens": 2, "accepted_histogram": [2, 4, 4]},
                   {"num_draft_tokens": 1, "accepted_histogram": [1, 1]},
                   {"num_draft_tokens": "auto", "accepted_histogram": [9, 1, 0, 0]},
                   {"num_draft_tokens": None, "accepted_histogram": [9]}]}, [0.8, 0.5, 0.5]),
        ({"rows": [{"num_draft_tokens": 2, "accepted_histogram": [5, 0, 0]}]}, [0.0, 0.0, 0.0]),
    ],
)  # fmt: skip
def test_acceptance_of_files(tmp_path, content, expected):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(content))
    assert read_acceptance(str(path), 3) == pytest.approx(expected)


def test_acceptance_as_a_number():
    assert read_acceptance("0.6", 2) == [0.6, 0.6]


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"comparisons": []}', '{"acceptance": 1.5}', '{"acceptance": []}', '{"acceptance": {"a": 1}}',
     '{"rows": [1]}', '{"rows": {"a": 1}}', '{"rows": 5}',
     '{"rows": [{"num_draft_tokens": 2, "accepted_histogram": {"a": 1, "b": 2}}]}',
     '{"rows": [{"num_draft_tokens": 2, "accepted_histogram": 5}]}',
     '{"num_drafts": "x", "accepted_per_position": [1]}', '{"num_drafts": 2, "accepted_per_position": 1}',
     '{"num_drafts": 2, "accepted_per_position": ["x"]}'],
)  # fmt: skip
def test_files_without_acceptance_are_refused(tmp_path, content):
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"acceptance .*expected|neither a probability nor"):
        read_acceptance(str(path))


@pytest.mark.parametrize("source", ["1.2", "-1", "nan", "no-such-file.json"])
def test_acceptance_out_of_range_is_refused(source):
    with pytest.raises(ConfigError):
        read_acceptance(source)
