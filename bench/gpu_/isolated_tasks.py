"""The tasks of a long check: each has a deadline, and a failure of one does not end the others.

This module does not import torch, because the parent of an isolated task must not use the device.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

GRACE = 20.0  # seconds after its deadline until the process of a task is ended
TRACEBACK_LINES = 12
LONGEST_MESSAGE = 400
ROOT = Path(__file__).parents[2]

Result = dict[str, Any]
Keep = Callable[[Result], None]


class Progress:
    """The result of a task so far. Every change is passed on, so a task that dies loses nothing.

    Args:
        deadline: time to end, by ``time.monotonic``, which all processes of a machine share.
        keep: receives the whole result after every change.

    """

    def __init__(self, deadline: float, keep: Keep) -> None:
        self.result: Result = {"rows": [], "failures": [], "skipped": []}
        self._deadline, self._keep = deadline, keep

    def note(self, **facts: Any) -> None:
        """Record facts about the whole task."""
        self.result |= facts
        self._keep(self.result)

    def row(self, **fields: Any) -> None:
        """Record a row of the task's table."""
        self.result["rows"].append(fields)
        self._keep(self.result)

    def fail(self, what: str, why: str, **fields: Any) -> None:
        """Record that a gate is red."""
        self.result["failures"].append({"what": what, "why": why, **fields})
        self._keep(self.result)

    def has_time(self, what: str, seconds: float = 0.0) -> bool:
        """Return whether ``seconds`` are left for ``what``; if not, record that it was skipped."""
        if monotonic() + seconds < self._deadline:
            return True
        self.result["skipped"].append(what)
        self._keep(self.result)
        return False

    @property
    def seconds_left(self) -> float:
        """The seconds to the deadline, at least 0."""
        return max(0.0, self._deadline - monotonic())

    def attempt(self, what: str, check: Callable[[], None], seconds: float = 0.0) -> bool:
        """Make one check if there is time for it; return whether it completed.

        An exception is recorded as a failure, and the checks after it continue.
        """
        if not self.has_time(what, seconds):
            return False
        try:
            check()
        except Exception as error:  # the other checks continue after any error
            self.fail(what, described(error), traceback=tail_of(error))
            return False
        return True


@dataclass(frozen=True)
class Settings:
    """What every task receives.

    Attributes:
        device: name of a ``torch.device``.
        smoke: whether sizes are tiny, so that a CPU needs seconds, to try the check itself.

    """

    device: str
    smoke: bool


@dataclass(frozen=True)
class Task:
    """One task of the check.

    Attributes:
        name: name in the report.
        run: runs the task with the settings and a Progress.
        share: its share of the time left when it begins, relative to the shares of it and the tasks after it.
        measures: whether it measures times, so that nothing may run beside it.

    """

    name: str
    run: Callable[[Settings, Progress], None]
    share: float
    measures: bool = True


def inline(task: Task, settings: Settings, deadline: float, keep: Keep) -> Result:
    """Run a task in this process; an exception ends the task and is part of its result."""
    progress = Progress(deadline, keep)
    try:
        task.run(settings, progress)
    except Exception as error:  # the other tasks run after any error
        return progress.result | {"status": "failed", "error": described(error), "traceback": tail_of(error)}
    return progress.result | {"status": "done"}


def isolated(task: Task, settings: Settings, deadline: float, keep: Keep) -> Result:
    """Run a task in a process of its own, so that a kernel that hangs or breaks the GPU's context ends only that."""
    context = get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_in_child, args=(task, settings, deadline, sending), daemon=True)
    process.start()
    sending.close()  # so that the child has the only open end, and its death is noticed
    result: Result = {"rows": [], "failures": [], "skipped": []}
    try:
        while receiving.poll(max(0.0, deadline + GRACE - monotonic())):
            result = receiving.recv()
            if "status" in result:
                return result
            keep(result)
        return result | {"status": "killed", "error": f"it did not end within {GRACE:.0f} s of its deadline"}
    except (EOFError, OSError):  # the child died before a message, or during one
        process.join(GRACE)
        return result | {"status": "failed", "error": f"its process ended with exit code {process.exitcode}"}
    finally:
        process.join(timeout=GRACE if "status" in result else 0)
        process.kill()
        process.join()


def _in_child(task: Task, settings: Settings, deadline: float, sending: Connection) -> None:
    sending.send(inline(task, settings, deadline, sending.send))


def run_tasks(
    tasks: Sequence[Task],
    settings: Settings,
    budget: float,
    runner: Callable[[Task, Settings, float, Keep], Result],
    keep: Callable[[str, Result], None],
    at_once: int = 1,
) -> dict[str, Result]:
    """Run tasks within ``budget`` seconds; return the results, with those of skipped tasks, in the order of ``tasks``.

    Those that measure run first, one after the other. The others run behind them, ``at_once`` at a time.

    Args:
        tasks: tasks in order.
        settings: settings for each task.
        budget: seconds for all tasks.
        runner: ``inline`` or ``isolated``.
        keep: receives a task's name and its result so far, after every change; called by several threads, one at a
            time, if tasks run at once.
        at_once: the number of tasks that run at the same time, if they do not measure; more than one only with
            ``isolated``.

    """
    end = monotonic() + budget
    results: dict[str, Result] = {}
    lock = Lock()

    def kept(name: str, found: Result) -> None:
        with lock:
            keep(name, found)

    def run(task: Task, shares: float) -> None:
        began = monotonic()
        if began < end:
            deadline = began + (end - began) * task.share / shares
            result = runner(task, settings, deadline, partial(kept, task.name))
        else:
            result = {"status": "skipped", "error": f"the budget of {budget:.0f} s was used up"}
        results[task.name] = result | {"seconds": monotonic() - began}
        kept(task.name, results[task.name])

    measuring = [task for task in tasks if task.measures]
    others = [task for task in tasks if not task.measures]
    rounds = -(-len(others) // at_once)
    share_of_others = rounds * max((task.share for task in others), default=0.0)
    for i, task in enumerate(measuring):
        run(task, sum(later.share for later in measuring[i:]) + share_of_others)
    with ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(run, task, task.share * max(1, rounds - i // at_once)) for i, task in enumerate(others)]
        for each in waiting:
            each.result()
    return {task.name: results[task.name] for task in tasks}


def is_red(result: Result) -> bool:
    """Return whether a task or one of its gates failed; a skipped task has not failed."""
    return result["status"] in ("failed", "killed") or bool(result.get("failures"))


def described(error: BaseException) -> str:
    """Return an exception's type and the beginning of its message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST_MESSAGE]


def tail_of(error: BaseException) -> list[str]:
    """Return the last lines of an exception's traceback, with paths from the root of the checkout."""
    lines = "".join(traceback.format_exception(error)).splitlines()[-TRACEBACK_LINES:]
    return [line.replace(f"{ROOT}{os.sep}", "") for line in lines]
