"""Whose turn an engine is: one call's at a time, in the process that made it.

The threads of OpenMP do not survive a fork, and a forked child would hang.
"""

from __future__ import annotations

import os
from threading import Lock
from typing import NoReturn
from weakref import ReferenceType, ref

import torch

from specdec_fast.errors import EngineBusyError, EngineCopyError, ForkedProcessError

_first: list[int] = []  # the process in which the first engine was made, here or before a fork


class _Held:
    """A turn that has been taken, for as long as this object lives, and no longer than a ``with`` block of it."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        self._turn.holder = None


class Turn:
    """One engine's.

    Attributes:
        holder: of the call that has it. A call that a signal interrupts before its ``with`` block has begun drops what
            it took, so the reference is a weak one.

    Raises:
        ForkedProcessError: this process was forked from one that has made an engine, and would wait for threads that
            have not come along.

    """

    def __init__(self) -> None:
        self._process = _enter_process()
        self._lock = Lock()
        self.holder: ReferenceType[_Held] | None = None

    def expect_free(self) -> None:
        """See to it that a call may begin.

        Raises:
            EngineBusyError: another one has not ended.
            ForkedProcessError: the engine was made in another process.

        """
        _expect_process(self._process)
        holder = self.holder  # another thread may give it back just now
        if holder is not None and holder() is not None:
            raise EngineBusyError(
                "another call of this engine has not ended: a stream is still open (finish or close() it first), or "
                "another thread is in a call (let it wait, or make an Engine for each thread; models may be shared)."
            )

    def taken(self) -> _Held:
        """Take the turn, for one ``with`` block that may end in another thread; raise what ``expect_free`` does."""
        held = _Held(self)
        with self._lock:
            self.expect_free()
            self.holder = ref(held)
        return held

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled or copied deeply, and so its engine.

        Raises:
            EngineCopyError: always.

        """
        raise EngineCopyError(
            "an Engine cannot be pickled or copied deeply: it has a KV cache and addresses of its models' weights; "
            "make another Engine of the same models (they share the weights), or one in each process."
        )


def _enter_process() -> int:
    """Return this process' id, for ``_expect_process``."""
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
