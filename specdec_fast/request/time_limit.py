"""A limit on the time that Python code of others may take, such as a chat template; no limit on code in C or Rust."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread, get_ident
from time import monotonic
from typing import TypeVar
from weakref import WeakSet

_Result = TypeVar("_Result")
_AGAIN_SECONDS = 10.0  # after which a function is interrupted again; a destructor may have swallowed the exception


class _TimeIsUpError(BaseException):
    """Raised inside a function that has taken too long; no ``except Exception`` there catches it."""


class _Run:
    def __init__(self, seconds: float) -> None:
        self.deadline = monotonic() + seconds
        self._thread_id = get_ident()
        self._lock = Lock()
        self._is_over = False

    def interrupt(self) -> None:
        """Raise ``_TimeIsUpError`` in the thread of the call, unless ``end`` has been called."""
        with self._lock:
            if not self._is_over:
                self._raise_there(ctypes.py_object(_TimeIsUpError))

    def end(self) -> None:
        """Let nothing be raised any more, what is about to be raised included."""
        with self._lock:
            self._is_over = True
        self._raise_there(None)

    def _raise_there(self, error: ctypes.py_object[type[BaseException]] | None) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread_id), error)


class _Watchdog:
    def __init__(self) -> None:
        self.forget_thread()

    def forget_thread(self) -> None:
        """Begin anew, in a process that was forked: the thread does not exist there."""
        self._begun: SimpleQueue[_Run] = SimpleQueue()
        self._lock = Lock()  # guards the thread's start
        self._thread: Thread | None = None

    def watch(self, run: _Run) -> None:
        """Interrupt a call when its deadline has passed."""
        with self._lock:
            if self._thread is None:
                self._thread = Thread(target=self._work, name="specdec_fast-watchdog", daemon=True)
                self._thread.start()
        self._begun.put(run)

    def _work(self) -> None:
        # A call that has ended is not referred to any more, even if KeyboardInterrupt kept it from its own end.
        runs: WeakSet[_Run] = WeakSet()
        while True:
            with suppress(Empty):
                runs.add(self._begun.get(timeout=_interrupt_late(runs)))


def _interrupt_late(runs: WeakSet[_Run]) -> float | None:
    """Interrupt calls whose deadline has passed; return the seconds until the next deadline, None without one."""
    now = monotonic()
    for run in runs:
        if run.deadline <= now:
            run.interrupt()
            run.deadline = now + _AGAIN_SECONDS
    return min((max(0.0, run.deadline - now) for run in runs), default=None)


_watchdog = _Watchdog()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_watchdog.forget_thread)


def run_within(seconds: float, function: Callable[[], _Result]) -> _Result:
    """Call a function in this thread; raise TimeoutError inside of it if it takes longer than ``seconds``.

    The exception comes between two bytecodes of Python, so a single long operation in C or Rust is not interrupted. It
    never comes after this call has returned: nothing else that the thread does is interrupted. The function may be
    interrupted anywhere, and should leave nothing half done that others see.
    """
    run = _Run(seconds)
    try:
        try:
            _watchdog.watch(run)
            return function()
        finally:
            run.end()
    except _TimeIsUpError:
        run.end()  # the exception may have come during the call above
        raise TimeoutError(f"it has taken longer than {seconds:g} s") from None
