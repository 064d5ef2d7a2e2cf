"""Tasks of a long check: in processes of their own, each within its deadline."""

from __future__ import annotations

import os
from time import monotonic

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
    monkeypatch.setattr(isolated_tasks, "GRACE", 0.1)
    kept = []
    result = isolated(Task("one", run, 1), SMOKE, monotonic() + (6 if status == "killed" else 60), kept.append)
    assert result["status"] == status
    assert result.get("error", "").startswith(error or "")
    assert len(result["rows"]) == 1
    assert result["rows"] == kept[0]["rows"]
    assert is_red(result) == (status != "done")
    if status == "done":
        assert result["process"] != os.getpid()


def test_time_left_over_goes_to_later_tasks():
    deadlines = {}

    def runner(task, settings, deadline, keep):
        deadlines[task.name] = deadline - monotonic()
        return {"status": "done"}

    run_tasks([Task("a", None, 1), Task("b", None, 3)], SMOKE, 100, runner, lambda *found: None)
    assert deadlines["a"] == pytest.approx(25, abs=1)
    assert deadlines["b"] == pytest.approx(100, abs=1)
