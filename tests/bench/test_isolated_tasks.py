"""Tasks of a long check: in processes of their own, each within its deadline."""

from __future__ import annotations

import os
import threading

import pytest

from bench.gpu_ import isolated_tasks
from bench.gpu_.isolated_tasks import Settings, Task, is_red, isolated, run_tasks
from support import gpu_tasks

SMOKE = Settings("cpu", smoke=True)


@pytest.mark.parametrize(
    ("run", "status", "error"),
    [
        (gpu_tasks.finishes, "done", None),
        (gpu_tasks.raises, "failed", "RuntimeError: device-side assert"),
        (gpu_tasks.dies, "failed", "its process ended with exit code 7"),
        (gpu_tasks.hangs, "killed", "it did not end within"),
    ],
)
def test_tasks_in_processes_of_their_own(run, status, error, monkeypatch):
    """The clock of this process stands still until a task has kept a row; then the deadline of a task is over."""
    now, kept = [0.0], []
    monkeypatch.setattr(isolated_tasks, "monotonic", lambda: now[0])

    def keep(found):
        kept.append(found)
        if status == "killed":
            now[0] += 7200.0

    result = isolated(Task("one", run, 1), SMOKE, 3600.0, keep)
    assert result["status"] == status
    assert result.get("error", "").startswith(error or "")
    assert len(result["rows"]) == 1
    assert result["rows"] == kept[0]["rows"]
    assert is_red(result) == (status != "done")
    if status == "done":
        assert result["process"] != os.getpid()


def test_time_left_over_goes_to_later_tasks(monkeypatch):
    now, deadlines = [50.0], {}
    monkeypatch.setattr(isolated_tasks, "monotonic", lambda: now[0])

    def runner(task, settings, deadline, keep):
        deadlines[task.name] = deadline
        now[0] += 5.0
        return {"status": "done"}

    run_tasks([Task("a", None, 1), Task("b", None, 3)], SMOKE, 100, runner, lambda *found: None)
    assert deadlines == {"a": 75.0, "b": 150.0}


def test_tasks_that_do_not_measure_run_at_once_behind_the_others():
    """Each of the two waits until the other has begun."""
    began, barrier = [], threading.Barrier(2, timeout=60)

    def runner(task, settings, deadline, keep):
        began.append(task.name)
        if not task.measures:
            barrier.wait()
        keep({"rows": [task.name]})
        return {"status": "done"}

    kept = []
    tasks = [Task("gate 1", None, 1, measures=False), Task("timed", None, 1), Task("gate 2", None, 1, measures=False)]
    results = run_tasks(tasks, SMOKE, 100, runner, lambda name, found: kept.append(name), at_once=2)
    assert list(results) == ["gate 1", "timed", "gate 2"]
    assert began[0] == "timed"
    assert sorted(kept) == ["gate 1", "gate 1", "gate 2", "gate 2", "timed", "timed"]
