"""The contract of a scheduler. To add one, copy ``eqspec.py`` and name it in ``schedulers/__init__.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod

from specdec_fast.config import EngineConfig
from specdec_fast.request.sequence import Sequence


class Scheduler(ABC):
    """Decides which sequences are resident and which take part in a step. It reads lengths, never tensors.

    A scheduler changes when a token is computed, never which token (invariant I6).
    """

    def __init__(self, config: EngineConfig) -> None:
        self.max_batch_size = config.max_batch_size
        self.window_size = config.num_resident
        self.max_wait_steps = config.max_wait_steps

    @property
    @abstractmethod
    def max_resident(self) -> int:
        """The largest number of sequences that may hold KV pages at the same time."""

    @abstractmethod
    def num_to_admit(self, num_resident: int) -> int:
        """Return how many waiting sequences may join now. They join in the order of the queue, if pages suffice."""

    @abstractmethod
    def select(self, resident: list[Sequence]) -> list[Sequence]:
        """Choose 1 to ``max_batch_size`` of the resident sequences for the next step; at least one is resident."""

    def plan(self, resident: list[Sequence]) -> list[Sequence]:
        """Select the sequences of the next step, and count the steps for which each other sequence is passed over."""
        chosen = self.select(resident)
        for sequence in resident:
            sequence.passed_over += 1
        for sequence in chosen:
            sequence.passed_over = 0
        return chosen
