"""A grammar whose compilation takes longer than anybody waits, and the process that compiles it."""

from __future__ import annotations

import signal
from queue import SimpleQueue

from specdec_fast.structured_outputs import compiling

SLOW = {"enum": ["a" * size for size in range(1, 450)]}


def stopped_process(monkeypatch):
    """Return a queue of one process: the next one that begins to compile, stopped, so that it is slow anywhere."""
    begun = SimpleQueue()
    answer = compiling._Process.answer
    stopped = []

    def noted(process, *job):
        if not stopped:
            stopped.append(process)
            process._process.send_signal(signal.SIGSTOP)
            begun.put(process)
        return answer(process, *job)

    monkeypatch.setattr(compiling._Process, "answer", noted)
    return begun
