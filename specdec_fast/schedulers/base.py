"""The contract of a scheduler. To add one, copy ``eqspec.py`` and name it in ``schedulers/__init__.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from specdec_fast.config import EngineConfig
from specdec_fast.errors import SchedulerError
from specdec_fast.request.sequence import Sequence


class Scheduler(ABC):
    """Decides which sequences are resident and which take part in a step. It reads lengths, never tensors.

    A scheduler changes when a token is computed, never which token (invariant I6). It may not change a sequence.
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
        """Choose 1 to ``max_batch_size`` different resident sequences for the next step; at least one is resident."""

    @final
    def plan(self, resident: list[Sequence]) -> list[Sequence]:
        """Select the sequences of the next step, and count the steps for which each other sequence is passed over.

        Raises:
            SchedulerError: ``select`` did not return a list of 1 to ``max_batch_size`` different sequences of
                ``resident``.
        """
        chosen = self.select(list(resident))
        self._expect_batch(chosen, resident)
        for sequence in resident:
            sequence.passed_over += 1
        for sequence in chosen:
            sequence.passed_over = 0
        return list(chosen)

    def checked_max_resident(self) -> int:
        """Return ``max_resident``, held to the contract; raises SchedulerError if it is not an integer from 1 on."""
        most = self.max_resident
        if not isinstance(most, int) or most < 1:
            raise SchedulerError(f"max_resident of {type(self).__name__}: {most!r}; expected an integer >= 1.")
        return most

    def checked_num_to_admit(self, num_resident: int) -> int:
        """Return ``num_to_admit``, held to the contract.

        Raises:
            SchedulerError: it is not an integer, or no sequence may join although none is resident.
        """
        places = self.num_to_admit(num_resident)
        if not isinstance(places, int) or (not num_resident and places < 1):
            raise SchedulerError(
                f"num_to_admit of {type(self).__name__}: {places!r} with {num_resident} resident sequences; expected "
                "an integer, at least 1 if no sequence is resident."
            )
        return places

    def _expect_batch(self, chosen: list[Sequence], resident: list[Sequence]) -> None:
        if not isinstance(chosen, list):
            raise SchedulerError(f"{type(self).__name__} chose a {type(chosen).__name__}; expected a list.")
        known = set(map(id, resident))
        if not 1 <= len(chosen) <= self.max_batch_size or not known.issuperset(map(id, chosen)):
            num_foreign = sum(id(each) not in known for each in chosen)
            raise SchedulerError(
                f"{type(self).__name__} chose {len(chosen)} sequences, {num_foreign} of them not resident; expected 1 "
                f"to {self.max_batch_size} (max_batch_size) of the {len(resident)} resident ones."
            )
        if len(set(map(id, chosen))) < len(chosen):
            raise SchedulerError(f"{type(self).__name__} chose a sequence twice; expected different sequences.")
