"""Which sequences step: none waits too long, equal lengths go together, no batch is too large or empty."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_fast.config import EngineConfig
from specdec_fast.errors import ConfigError
from specdec_fast.request.sequence import Sequence
from specdec_fast.sampling_params import SamplingParams
from specdec_fast.schedulers import SCHEDULERS, make_scheduler
from specdec_fast.schedulers.base import Scheduler
from specdec_fast.schedulers.exspec import ExspecScheduler
from support.fuzzing import fuzz


def sequence_of(length: int, index: int = 0) -> Sequence:
    return Sequence(index, [0] * length, length, 10**9, SamplingParams(), frozenset())


@dataclass
class Simulation:
    """An engine without models: sequences join when there is room, grow by what they emit, and leave.

    It counts how long each has waited, and does not trust the schedulers' counter.
    """

    scheduler: Scheduler
    rng: random.Random
    resident: list[Sequence] = field(default_factory=list)
    waited: Counter[int] = field(default_factory=Counter)
    joined: int = 0
    longest_wait: int = 0

    def step(self, most_emitted: int, leaving: float) -> list[Sequence]:
        places = self.scheduler.num_to_admit(len(self.resident))
        assert 0 <= places <= self.scheduler.max_resident - len(self.resident)
        # the page pool may have room for fewer than the scheduler wants, but an empty engine always takes one
        for _ in range(self.rng.randint(0 if self.resident else 1, places) if places else 0):
            self.resident.append(sequence_of(self.rng.randint(1, 12), self.joined))
            self.joined += 1
        before = list(self.resident)
        chosen = self.scheduler.plan(self.resident)
        assert self.resident == before, "planning changes no residents"
        self.check(chosen)
        for sequence in chosen:
            sequence.token_ids += [0] * self.rng.randint(1, most_emitted)
        self.resident = [s for s in self.resident if self.rng.random() >= leaving]
        return chosen

    def check(self, chosen: list[Sequence]) -> None:
        indices = [sequence.index for sequence in chosen]
        assert len(set(indices)) == len(indices), "twice in one batch"
        assert set(indices) <= {sequence.index for sequence in self.resident}
        assert len(chosen) == min(self.scheduler.max_batch_size, len(self.resident)), "an idle place, or one too many"
        for sequence in self.resident:
            self.waited[sequence.index] = 0 if sequence.index in indices else self.waited[sequence.index] + 1
            assert sequence.passed_over == self.waited[sequence.index]
            self.longest_wait = max(self.longest_wait, self.waited[sequence.index])


@st.composite
def configs(draw: st.DrawFn, method: str) -> EngineConfig:
    """Any batch size, wait and window that EngineConfig takes."""
    batch, wait = draw(st.integers(1, 6)), draw(st.integers(0, 6))
    window = draw(st.integers(batch, batch * (wait + 1)))
    return EngineConfig(method=method, max_batch_size=batch, max_wait_steps=wait, window_size=window)


schedule = {
    "seed": st.integers(0, 2**31),
    "most_emitted": st.sampled_from([1, 2, 6]),  # 1: lengths keep their distances; 6: they scatter
    "leaving": st.sampled_from([0.0, 0.02, 0.3]),  # 0: the window stays full, and no sequence ever makes room
}


@fuzz(80)
@given(config=configs("exspec"), **schedule)
def test_exspec_bounds_every_wait(config, seed, most_emitted, leaving):
    simulation = Simulation(make_scheduler(config), random.Random(seed))
    for _ in range(80):
        simulation.step(most_emitted, leaving)
        assert simulation.longest_wait <= config.max_wait_steps


@fuzz(50)
@given(config=configs("eqspec"), **schedule)
def test_eqspec_steps_all_until_the_batch_has_ended(config, seed, most_emitted, leaving):
    simulation = Simulation(make_scheduler(config), random.Random(seed))
    for _ in range(40):
        before = {sequence.index for sequence in simulation.resident}
        chosen = {sequence.index for sequence in simulation.step(most_emitted, leaving)}
        assert not before or chosen == before, "no sequence joins a running batch, and none is left out of a step"
    assert simulation.longest_wait == 0


class GreedyExspec(ExspecScheduler):
    """Largest group of equal lengths first, however long the others have waited: the published rule."""

    def _num_due(self, by_wait: list[Sequence]) -> int:
        return 0


def test_wait_bound_is_due_to_num_due():
    waits = {}
    for scheduler in (ExspecScheduler, GreedyExspec):
        config = EngineConfig(max_batch_size=2, window_size=6, max_wait_steps=3)
        simulation = Simulation(scheduler(config), random.Random(0))
        for _ in range(80):
            simulation.step(most_emitted=1, leaving=0.0)
        waits[scheduler] = simulation.longest_wait
    assert waits[ExspecScheduler] <= 3 < waits[GreedyExspec]


@fuzz(150)
@given(batch=st.integers(1, 5), wait=st.integers(1, 4), data=st.data())
def test_exspec_takes_as_few_lengths_as_it_can(batch, wait, data):
    # batch * wait residents that have not waited: none is due yet, so lengths alone decide
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=batch * wait))
    scheduler = make_scheduler(EngineConfig(max_batch_size=batch, max_wait_steps=wait, window_size=batch * wait))
    chosen = scheduler.plan([sequence_of(length, i) for i, length in enumerate(lengths)])
    places, fewest = min(batch, len(lengths)), 0
    for _, count in Counter(lengths).most_common():
        fewest, places = fewest + 1, places - count
        if places <= 0:
            break
    assert len({sequence.length for sequence in chosen}) == fewest


def test_exspec_takes_the_largest_group_of_equal_lengths():
    window = [sequence_of(length, i) for i, length in enumerate((5, 9, 7, 9, 7, 9))]
    scheduler = make_scheduler(EngineConfig(max_batch_size=3, window_size=6, max_wait_steps=2))
    assert [s.index for s in scheduler.plan(window)] == [1, 3, 5]
    assert [s.passed_over for s in window] == [1, 0, 1, 0, 1, 0]
    # the pair of 7 has now waited once and goes first; the 5 fills the batch up
    for sequence in window[1::2]:
        sequence.token_ids += [0] * (1 + sequence.index)
    assert {s.index for s in scheduler.plan(window)} == {0, 2, 4}


def test_exspec_takes_due_sequences_before_a_larger_group():
    window = [sequence_of(length, i) for i, length in enumerate((5, 9, 9, 9))]
    scheduler = make_scheduler(EngineConfig(max_batch_size=2, window_size=4, max_wait_steps=1))
    window[0].passed_over = 1
    assert window[0] in scheduler.plan(window)


def test_exspec_refills_and_eqspec_does_not():
    config = {"max_batch_size": 4, "window_size": 8}
    exspec, eqspec = (make_scheduler(EngineConfig(method=m, **config)) for m in ("exspec", "eqspec"))
    assert [exspec.max_resident, eqspec.max_resident] == [8, 4]
    assert [exspec.num_to_admit(n) for n in (0, 7, 8)] == [8, 1, 0]
    assert [eqspec.num_to_admit(n) for n in (0, 1, 4)] == [4, 0, 0]


# The largest window is what all waits together can serve: batch * (wait + 1); the smallest is a batch.
@pytest.mark.parametrize(("batch", "wait", "window"), [(4, 1, 9), (4, 0, 5), (1, 3, 5), (4, 4, 3), (8, 4, 0)])
def test_window_that_breaks_the_bound_is_refused(batch, wait, window):
    with pytest.raises(ConfigError, match=f"window_size={window}: expected {batch} .* to {batch * (wait + 1)}"):
        EngineConfig(max_batch_size=batch, max_wait_steps=wait, window_size=window)


@pytest.mark.parametrize(("wait", "window"), [(4, 16), (1, 16), (0, 8)])
def test_default_window_is_two_batches_if_sequences_may_wait(wait, window):
    assert EngineConfig(max_batch_size=8, max_wait_steps=wait).num_resident == window


def test_unknown_method_lists_the_known():
    with pytest.raises(ConfigError, match=f"method='fifo': expected one of {', '.join(SCHEDULERS)}"):
        make_scheduler(EngineConfig(method="fifo"))
