"""The limit on the time of a function: it ends what is late, and nothing else."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from threading import Event, Thread

import pytest

from specdec_fast.request import time_limit
from specdec_fast.request.time_limit import run_within
from support.forks import in_a_fork

LONG = 3600.0


def run_for_ever():
    for _ in count():
        pass


def run_for_ever_and_catch():
    for _ in count():
        with suppress(Exception):
            run_for_ever()


@pytest.mark.parametrize("function", [run_for_ever, run_for_ever_and_catch])
def test_a_function_that_does_not_end_is_ended(function):
    with pytest.raises(TimeoutError, match=r"longer than 0\.01 s"):
        run_within(0.01, function)


def test_results_and_errors_pass():
    assert run_within(LONG, lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        run_within(LONG, lambda: 1 / 0)


def test_calls_of_several_threads_have_deadlines_of_their_own():
    found = []

    def call(seconds, function):
        try:
            found.append(run_within(seconds, function))
        except TimeoutError:
            found.append("late")

    threads = [Thread(target=call, args=(0.01, run_for_ever), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    call(LONG, lambda: [thread.join() for thread in threads] and "in time")
    assert found == ["late"] * 3 + ["in time"]


def call_that_ends_while_it_is_interrupted(monkeypatch, end):
    """Let a call end just after its thread has been found late, and before the exception is raised there."""
    is_late, is_ending, is_raised, raise_there = Event(), Event(), Event(), time_limit._Run._raise_there

    def raise_when_it_ends(self, error):
        if error is None:
            raise_there(self, None)
        else:
            is_late.set()
            is_ending.wait()
            raise_there(self, error)
            is_raised.set()

    def end_then(self):
        is_ending.set()
        end(self)

    monkeypatch.setattr(time_limit._Run, "_raise_there", raise_when_it_ends)
    monkeypatch.setattr(time_limit._Run, "end", end_then)
    with suppress(TimeoutError):
        run_within(0.0, is_late.wait)
    is_raised.wait()
    for _ in range(1000):  # what the thread does next
        pass


def test_nothing_is_interrupted_after_the_call(monkeypatch):
    call_that_ends_while_it_is_interrupted(monkeypatch, time_limit._Run.end)


def test_the_test_above_rejects_an_end_that_does_not_wait(monkeypatch):
    with pytest.raises(time_limit._TimeIsUpError):
        call_that_ends_while_it_is_interrupted(monkeypatch, lambda run: setattr(run, "_is_over", True))


def test_a_forked_process_has_a_watchdog_of_its_own():
    run_within(LONG, lambda: 5)

    def call():
        try:
            run_within(0.01, run_for_ever)
        except TimeoutError:
            raise RuntimeError("in time") from None

    assert in_a_fork(call).startswith("RuntimeError")
