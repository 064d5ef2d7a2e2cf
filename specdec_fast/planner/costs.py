"""The seconds of a step: measured, or computed from the figures of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specdec_fast.planner.checkpoint import CheckpointSizes
from specdec_fast.planner.scylla import rows_at_balance
from specdec_fast.speculation_length.step_costs import StepCosts

_FLOPS_PER_PARAMETER = 2  # a multiplication and an addition


class StepTimes(Protocol):
    """Seconds of a step, and the row count up to which a forward takes about as long as with one row."""

    def seconds(self, batch_size: int, num_draft_tokens: int) -> float:
        """Return the seconds of a step of B sequences with N draft tokens each."""

    def balance(self) -> float:
        """Return R*."""

    def limit(self, num_rows: int) -> str:
        """Return what a verification of so many rows waits for."""


class MeasuredTimes:
    """The profile of an engine's models on this machine, over short contexts, for up to ``most_rows`` rows."""

    def __init__(self, costs: StepCosts, most_rows: int) -> None:
        self._costs = costs
        self._most_rows = max(2, most_rows)

    def seconds(self, batch_size: int, num_draft_tokens: int) -> float:
        """Return ``verify(B (K + 1)) + K draft(B) + once``."""
        return self._costs.profile(batch_size)[num_draft_tokens]

    def balance(self) -> float:
        """Return one row's seconds over those that a further row adds among many."""
        one, many, half = (self._costs.profile(n)[0] for n in (1, self._most_rows, self._most_rows // 2))
        further = (many - half) / (self._most_rows - self._most_rows // 2)
        return one / further if further > 0 else float("inf")

    def limit(self, num_rows: int) -> str:
        """Return the term that is larger below or above R*."""
        return "reading weights" if num_rows <= self.balance() else "arithmetic"


@dataclass(frozen=True)
class Device:
    """Figures of a device, as its vendor or a measurement gives them."""

    bandwidth: float  # bytes per second that it reads from memory
    peak: float  # floating-point operations per second in the dtype of the weights


@dataclass(frozen=True)
class Link:
    """Figures of the exchanges between the ranks of a sharded target."""

    num_ranks: int
    bandwidth: float  # bytes per second that a rank receives from the others
    latency: float  # seconds of an exchange of few bytes


@dataclass(frozen=True)
class ComputedTimes:
    """``max(bytes / bandwidth, operations / peak)`` for every forward, and exchanges between ranks: a lower bound."""

    target: CheckpointSizes  # sizes of the target
    draft: CheckpointSizes | None  # sizes of the draft model; None without one
    device: Device  # figures of the device
    context: float  # KV positions that a sequence has on average
    link: Link | None = None  # figures of the exchanges; None: the target is not sharded

    def seconds(self, batch_size: int, num_draft_tokens: int) -> float:
        """Return the seconds of one verification and of the draft model's forwards, of one row per sequence each."""
        num_rows = batch_size * (1 + num_draft_tokens)
        verify = max(self._terms(self.target, num_rows, batch_size)) + self._exchanging(num_rows)
        if not num_draft_tokens or self.draft is None:
            return verify
        return verify + num_draft_tokens * max(self._terms(self.draft, batch_size, batch_size))

    def balance(self) -> float:
        """Return R*, without KV entries and exchanges."""
        flops = _FLOPS_PER_PARAMETER * self.target.row_parameters
        return rows_at_balance(self.target.weights, flops, self.device.bandwidth, self.device.peak)

    def limit(self, num_rows: int) -> str:
        """Return the largest term."""
        reading, computing = self._terms(self.target, num_rows, 0)
        if self._exchanging(num_rows) > max(reading, computing):
            return "exchanges"
        return "reading weights" if reading >= computing else "arithmetic"

    def _exchanging(self, num_rows: int) -> float:
        """Return the seconds of the exchanges of a forward: every rank receives the numbers of all others."""
        if self.link is None:
            return 0.0
        exchanges = self.target.exchanges
        received = (self.link.num_ranks - 1) * num_rows * exchanges.bytes_per_row
        return exchanges.num_exchanges * self.link.latency + received / self.link.bandwidth

    def _terms(self, sizes: CheckpointSizes, num_rows: int, num_sequences: int) -> tuple[float, float]:
        # A step reads the state of a sequence and writes one, together more than a slot without draft tokens has.
        each = self.context * sizes.bytes_per_token + sizes.bytes_per_sequence(0)
        read = sizes.weights + num_sequences * each
        return read / self.device.bandwidth, num_rows * _FLOPS_PER_PARAMETER * sizes.row_parameters / self.device.peak
