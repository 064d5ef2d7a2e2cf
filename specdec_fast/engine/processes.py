"""An engine may be used in the process that made it: OpenMP's threads do not survive a fork, and a child would hang."""

from __future__ import annotations

import os
from typing import NoReturn

import torch

from specdec_fast.errors import EngineCopyError, ForkedProcessError

_first: list[int] = []  # the process in which the first engine was made, here or before a fork


class OwnProcess:
    """The process in which an engine is made; ForkedProcessError if it was forked from one that has made an engine.

    It would wait for threads that the fork did not copy.
    """

    def __init__(self) -> None:
        if not _first:
            _first.append(os.getpid())
        if _first[0] != os.getpid() and torch.get_num_threads() > 1:
            raise ForkedProcessError(
                f"process {os.getpid()} was forked from process {_first[0]}, which has made an Engine before: threads "
                "do not survive a fork, and the next parallel loop would hang. Start processes by 'spawn' "
                "(multiprocessing.get_context('spawn')), fork before the first Engine, or call "
                "torch.set_num_threads(1)."
            )
        self._id = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether it is the process that asks."""
        return self._id == os.getpid()

    def expect_this(self) -> None:
        """Raise ForkedProcessError in any other process."""
        if not self.is_this:
            raise ForkedProcessError(
                f"the engine was made in process {self._id}, and this is {os.getpid()}, forked from it: threads do not "
                "survive a fork, and a step would hang. Start processes by 'spawn' "
                "(multiprocessing.get_context('spawn')), with an Engine in each."
            )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse with EngineCopyError to be pickled or copied deeply, and so its engine."""
        raise EngineCopyError(
            "an Engine cannot be pickled or copied deeply: it has a KV cache and addresses of its models' weights; "
            "make another Engine of the same models (they share the weights), or one in each process."
        )
