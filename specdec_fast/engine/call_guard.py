"""Lets one call at a time run in an engine, and only in the process that made the engine.

OpenMP's threads do not survive a fork, so a call in a forked child would hang.
"""

from __future__ import annotations

import os
from threading import Lock
from typing import NoReturn
from weakref import ReferenceType, ref

import torch

from specdec_fast.errors import EngineBusyError, EngineCopyError, ForkedProcessError

_first: list[int] = []  # id of the process in which the first engine was made: this one, or one it was forked from


class _RunningCall:
    """A call that runs; it ends with its ``with`` block, or when nothing refers to this object any more."""

    def __init__(self, guard: CallGuard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        self._guard.running = None


class CallGuard:
    """Admits one call of an engine at a time.

    A plain lock would not do. ``with lock`` waits instead of raising, and a signal between
    ``lock.acquire(blocking=False)`` and the ``try`` after it would leave the lock held for ever. So the guard refers
    weakly to an object of the running call: if a signal interrupts the call before its ``with`` block has begun, the
    object is destroyed and the engine is free.

    Attributes:
        running: the call that runs; None, or a dead reference, if there is none.

    Raises:
        ForkedProcessError: this process was forked from one that has made an engine, and it would wait for threads
            that exist only there.

    """

    def __init__(self) -> None:
        self._process = _register_process()
        self._lock = Lock()
        self.running: ReferenceType[_RunningCall] | None = None

    def expect_no_call(self) -> None:
        """Check that a call may begin.

        Raises:
            EngineBusyError: another call has not ended.
            ForkedProcessError: the engine was made in another process.

        """
        _expect_process(self._process)
        running = self.running  # read once: another thread may end its call now
        if running is not None and running() is not None:
            raise EngineBusyError(
                "another call of this engine has not ended: a stream is still open (finish or close() it first), or "
                "another thread is calling it (let one wait, or make an Engine for each thread; models may be shared)."
            )

    def begin_call(self) -> _RunningCall:
        """Begin a call that lasts for one ``with`` block, which may end in another thread.

        Raises:
            EngineBusyError: another call has not ended.
            ForkedProcessError: the engine was made in another process.

        """
        call = _RunningCall(self)
        with self._lock:
            self.expect_no_call()
            self.running = ref(call)
        return call

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled or copied deeply, so that the engine refuses too.

        Raises:
            EngineCopyError: always.

        """
        raise EngineCopyError(
            "an Engine cannot be pickled or copied deeply: it holds a KV cache and addresses of its models' weights; "
            "make another Engine of the same models (they share the weights), or one in each process."
        )


def _register_process() -> int:
    """Return this process' id, and record the process of the first engine."""
    if not _first:
        _first.append(os.getpid())
    if _first[0] != os.getpid() and torch.get_num_threads() > 1:
        raise ForkedProcessError(
            f"process {os.getpid()} was forked from process {_first[0]}, which has made an Engine before: threads do "
            "not survive a fork, and the next parallel loop would hang. Start processes by 'spawn' "
            "(multiprocessing.get_context('spawn')), fork before the first Engine, or call torch.set_num_threads(1)."
        )
    return os.getpid()


def _expect_process(process: int) -> None:
    if os.getpid() != process:
        raise ForkedProcessError(
            f"the engine was made in process {process}, and this is {os.getpid()}, forked from it: threads do not "
            "survive a fork, and a step would hang. Start processes by 'spawn' (multiprocessing.get_context('spawn')), "
            "with an Engine in each."
        )
