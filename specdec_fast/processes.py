"""Engines belong to the process that made them: the threads of OpenMP do not survive a fork, and a child would hang."""

from __future__ import annotations

import os

import torch

from specdec_fast.errors import ForkedProcessError

_first: list[int] = []  # the process in which the first engine was made, here or before a fork


def enter_process() -> int:
    """Return this process' id, for ``expect_process``.

    Raises:
        ForkedProcessError: this process was forked from one that has made an engine, and would wait for threads that
            have not come along.

    """
    if not _first:
        _first.append(os.getpid())
    if _first[0] != os.getpid() and torch.get_num_threads() > 1:
        raise ForkedProcessError(
            f"process {os.getpid()} was forked from process {_first[0]}, which has made an Engine before: threads do "
            "not survive a fork, and the next parallel loop would hang. Start processes by 'spawn' "
            "(multiprocessing.get_context('spawn')), fork before the first Engine, or call torch.set_num_threads(1)."
        )
    return os.getpid()


def expect_process(process: int) -> None:
    """Hold an engine to the process that made it.

    Raises:
        ForkedProcessError: this is another one.

    """
    if os.getpid() != process:
        raise ForkedProcessError(
            f"the engine was made in process {process}, and this is {os.getpid()}, forked from it: threads do not "
            "survive a fork, and a step would hang. Start processes by 'spawn' (multiprocessing.get_context('spawn')), "
            "with an Engine in each."
        )
