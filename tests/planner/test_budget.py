"""Which setting fits into a budget: the best one, never more than the budget, and no worse with more of it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_fast.errors import ConfigError, MemoryBudgetError
from specdec_fast.planner.budget import (
    Ask,
    EngineMemory,
    EngineSetting,
    Part,
    budget_error,
    halved,
    largest_within,
    longest_prompt,
)


def part(role, weights, per_token, per_row, per_prefill_row, per_sequence=0):
    def terms(setting):
        return {f"{role} steps": setting.num_rows * per_row + (setting.max_prefill_tokens or 64) * per_prefill_row}

    def bytes_per_sequence(most_draft_tokens):
        return per_sequence * (1 + most_draft_tokens)

    return Part(weights, per_token, terms, bytes_per_sequence if per_sequence else None)


parts = st.tuples(
    st.integers(0, 5000), st.integers(0, 50), st.integers(0, 30), st.integers(0, 10), st.just(0) | st.integers(1, 300)
)
memories = st.builds(
    lambda target, drafter, page_size, states_for: EngineMemory(
        part("target", *target), drafter and part("drafter", *drafter), page_size, states_for=states_for
    ),
    parts, st.none() | parts, st.integers(1, 16), st.none() | st.integers(0, 5),
)  # fmt: skip
asks = st.builds(
    lambda batch_size, most, each: Ask(
        batch_size, list(range(most, 0, -1)) or [0], lambda b: [2 * b, b], lambda n, _: n * each, halved(None, 64)
    ),
    st.integers(1, 12), st.integers(0, 5), st.integers(1, 40),
)  # fmt: skip


def rank(setting):
    """Larger for better settings; no bound of prefill is the largest bound."""
    if setting is None:
        return (0,)
    return (setting.batch_size, setting.num_draft_tokens, setting.num_resident, setting.max_prefill_tokens or 64)


@given(memories, asks, st.integers(0, 40_000), st.integers(0, 10_000))
def test_the_best_setting_that_fits_and_no_worse_with_more(memory, ask, budget, more):
    found = largest_within(memory, budget, ask)
    everything = [s for size in range(ask.batch_size, 0, -1) for s in ask.settings(size)]
    assert found == next((s for s in everything if memory.total(s) <= budget), None)
    assert rank(largest_within(memory, budget + more, ask)) >= rank(found)


@given(memories, asks, st.integers(0, 40_000))
def test_positions_fill_the_budget(memory, ask, budget):
    setting = ask.settings(1)[0]
    positions = memory.positions_within(budget, setting)
    if not memory.bytes_per_page(setting):  # no layer attends
        assert positions == (setting.num_positions if memory.total(setting) <= budget else 0)
        return
    if positions:
        assert memory.total(setting._replace(num_positions=positions)) <= budget
    assert memory.total(setting._replace(num_positions=positions + 1)) > budget


@given(memories, st.integers(1, 300), st.integers(1, 50), st.integers(0, 20_000))
def test_the_error_names_the_shortfall_and_the_longest_prompt(memory, prompt, new_tokens, budget):
    def least(tokens):
        return EngineSetting(1, 0, 1, tokens + new_tokens - 1, 1)

    needed = memory.total(least(prompt))
    if needed <= budget:
        return
    message = str(budget_error(memory, budget, least(prompt), new_tokens))
    assert f"lacks {needed - budget} bytes" in message
    assert ("no sequence fits, however short" in message) == (memory.bytes_per_page(least(1)) == 0)
    longest = re.search(r"the longest prompt that fits has (\d+) tokens", message)
    if longest:
        assert memory.total(least(int(longest[1]))) <= budget < memory.total(least(int(longest[1]) + 1))
    else:
        assert memory.total(least(1)) > budget


def test_states_are_terms_of_the_models_that_have_them():
    setting = EngineSetting(batch_size=2, num_draft_tokens=3, num_resident=4, num_positions=8)
    target = part("target", 1, 2, 0, 0)
    recurrent = part("drafter", 1, 2, 0, 0, per_sequence=7)
    assert "target states" not in EngineMemory(target, recurrent, 4).terms(setting)
    assert EngineMemory(target, recurrent, 4).terms(setting)["drafter states"] == (4 + 1) * 7 * (1 + 3)
    assert EngineMemory(recurrent, target, 4).terms(setting)["target states"] == (4 + 1) * 7 * (1 + 3)
    made = EngineMemory(recurrent, None, 4, states_for=5)
    assert made.terms(setting)["target states"] == (4 + 1) * 7 * (1 + 5)
    plain = EngineMemory(target, recurrent, 4).terms(setting._replace(num_draft_tokens=0))
    assert not [name for name in plain if "states" in name]


def test_the_newest_token_needs_no_entry():
    assert longest_prompt(10, 3) == 8  # 8 + 3 - 1 entries
    assert longest_prompt(2, 5) == 0


def test_bounds_of_prefill_end_with_one_row():
    assert halved(None, 8) == [None, 4, 2, 1]
    assert halved(5, 8) == [5, 2, 1]
    assert halved(100, 8) == [100, 4, 2, 1]


def test_it_is_an_error_of_the_configuration():
    assert issubclass(MemoryBudgetError, ConfigError)
    with pytest.raises(MemoryBudgetError, match="largest term is target weights"):
        raise budget_error(EngineMemory(part("target", 100, 1, 1, 0), None, 4), 50, EngineSetting(1, 0, 1, 1, 1))


@pytest.mark.parametrize(("budget", "text"), [(1000, "1000 bytes lacks"), (1536, "1536 bytes (1.50 KiB) lacks")])
def test_bytes_are_named_once(budget, text):
    error = budget_error(EngineMemory(part("target", 10**5, 1, 1, 0), None, 4), budget, EngineSetting(1, 0, 1, 1, 1))
    assert f"a budget of {text} " in str(error)
