"""A grammar whose compilation takes longer than anybody waits, and the process that compiles it."""

from __future__ import annotations

from queue import SimpleQueue

from specdec_fast.structured_outputs import compiling

SLOW = {"enum": ["a" * size for size in range(1, 450)]}


def noted_processes(monkeypatch):
    """Return a queue of every process that begins to compile from now on."""
    begun = SimpleQueue()
    answer = compiling._Process.answer

    def noted(process, *job):
        begun.put(process)
        return answer(process, *job)

    monkeypatch.setattr(compiling._Process, "answer", noted)
    return begun
