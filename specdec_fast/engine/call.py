"""The requests of one caller of a shared core, and what steps emit for them."""

from __future__ import annotations

from collections.abc import Iterable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from specdec_fast.engine.step import StepOutput
from specdec_fast.errors import RequestError
from specdec_fast.request.sequence import Sequence

if TYPE_CHECKING:
    from specdec_fast.engine.shared_core import SharedCore


class Call:
    """The requests of one caller. Any thread may add and cancel; one thread at a time takes.

    Args:
        shared: the core that serves them.
        returns: whether the caller takes again and again until nothing is open, as a stream's reader may not. It then
            calls ``rest`` or ``close``, because others may be waiting for a thread that runs the steps.
        ends_only: whether outputs are wanted with a request's last one only.

    Attributes:
        open: requests whose last output has not been taken.

    """

    def __init__(self, shared: SharedCore, returns: bool, ends_only: bool) -> None:
        self._shared = shared
        self.returns, self.ends_only = returns, ends_only
        self.open: set[Sequence] = set()
        self.inbox: SimpleQueue[list[StepOutput]] = SimpleQueue()  # an empty list: the core is free

    def add(self, requests: list[Sequence]) -> None:
        """Let requests wait for their first step.

        Raises:
            EngineBusyError: the core serves requests that were added to it directly.
            ForkedProcessError: the engine was made in the process that this one was forked from.

        """
        self._shared.add(self, requests)

    def cancel(self, requests: Iterable[Sequence]) -> None:
        """Drop requests: their pages are free when this returns or, if a step is under way, when that step ends."""
        requests = list(requests)
        self.open.difference_update(requests)
        self._shared.cancel(requests, None)

    def end(self, requests: Iterable[Sequence], error: RequestError) -> None:
        """Let requests end with an error, as their last outputs will say, unless they have ended before."""
        self._shared.cancel(list(requests), error)

    def take(self, timeout: float | None = None) -> list[StepOutput]:
        """Run a step, or wait for the thread that is in one, and return what was emitted for this call.

        With ``ends_only`` it runs steps until a request has ended.

        Args:
            timeout: seconds to wait for another thread at most; None: no limit.

        Returns:
            Outputs of one or more requests; none if the step was for others, or after ``timeout``. A request that
            failed with its step has a ``StepError``.

        Raises:
            EngineBusyError: this is called by code that a step of this core called.

        """
        outputs: list[StepOutput] | None
        try:
            outputs = self.inbox.get_nowait()
        except Empty:
            outputs = None
        if outputs is None:  # not in the handler: an error of a step would have the empty inbox as its context
            lead = self._shared.lead(self)
            if lead is None:
                outputs = self._wait(timeout)
            else:
                with lead:
                    self._shared.step()
                    while self.ends_only and self.inbox.empty():
                        self._shared.step()
                outputs = self.inbox.get_nowait() if not self.inbox.empty() else []
        self.open.difference_update([output.request for output in outputs if output.finish_reason is not None])
        return outputs

    def wake(self) -> None:
        """Let ``take`` return if it waits."""
        self.inbox.put([])

    def rest(self) -> None:
        """Let another caller run the steps; for one that has nothing open and may add requests later."""
        self.cancel([])

    def close(self) -> None:
        """Cancel what has not ended."""
        self.cancel(self.open)

    def _wait(self, timeout: float | None) -> list[StepOutput]:
        try:
            return self.inbox.get(timeout=timeout)
        except Empty:
            return []
        finally:
            self._shared.stop_waiting(self)
