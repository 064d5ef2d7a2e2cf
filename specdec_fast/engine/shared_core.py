"""One core for the calls of several threads.

A thread that needs a step and finds no other thread in one runs it, for the requests of all calls; the other threads
wait until something was emitted for them, or until the core is free. So a single caller runs its steps itself, and
concurrent calls are decoded in one batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from copy import copy
from queue import Empty, SimpleQueue
from threading import RLock, get_ident
from time import perf_counter
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch

from specdec_fast.engine.core import EngineCore
from specdec_fast.engine.processes import OwnProcess
from specdec_fast.engine.step import StepOutput, step_error
from specdec_fast.errors import EngineBusyError, RequestCancelledError, RequestError
from specdec_fast.request.sequence import Sequence
from specdec_fast.results import RunStats
from specdec_fast.torch_autocast import without_autocast


class Call:
    """The requests of one caller. Any thread may add and cancel; one thread at a time takes.

    ``returns``: whether the caller takes again and again until nothing is open, as a stream's reader may not. It then
    calls ``rest`` or ``close``, because others may be waiting for a thread that runs the steps. ``ends_only``: whether
    outputs are wanted with a request's last one only.
    """

    def __init__(self, shared: SharedCore, returns: bool, ends_only: bool) -> None:
        self._shared = shared
        self.returns = returns
        self.ends_only = ends_only
        self.open: set[Sequence] = set()  # requests whose last output has not been taken
        self.inbox: SimpleQueue[list[StepOutput]] = SimpleQueue()  # an empty list: the core is free

    def add(self, requests: list[Sequence]) -> None:
        """Let requests wait for their first step.

        Raises EngineBusyError if the core serves requests that were added to it directly, and ForkedProcessError.
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

        With ``ends_only`` it runs steps until a request has ended. It waits for another thread at most ``timeout``
        seconds; None: no limit. There are no outputs if the step was for others, or after ``timeout``. A request that
        failed with its step has a ``StepError``. Raises EngineBusyError in code that a step of this core called.
        """
        outputs: list[StepOutput] | None
        try:
            outputs = self.inbox.get_nowait()
        except Empty:
            outputs = None
        if outputs is None:  # not in the handler: an error of a step would have the empty inbox as its context
            permit = self._shared.acquire(self)
            if permit is None:
                outputs = self._wait(timeout)
            else:
                with permit:
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


class _StepPermit:
    def __init__(self, shared: SharedCore, call: Call | None) -> None:
        self._shared = shared
        self.call = call
        self.thread = get_ident()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        self._shared.release(self)


class _Change(NamedTuple):
    """A request to add or to drop; a dropped request ends with ``error`` or, if that is None, without an output."""

    request: Sequence
    is_new: bool = False
    error: RequestError | None = None


class SharedCore:
    """Runs the steps of a core, in one process, for the calls of several threads; one thread at a time runs a step.

    No other code may run its steps while a call has requests.
    """

    def __init__(self, core: EngineCore, process: OwnProcess) -> None:
        self.core = core
        self.process = process
        self.run = RunStats()  # counts and times, since a call last began while no other call had requests
        self._started = 0.0
        # Guards all below; no thread holds it during a step. It is reentrant because the garbage collector may close an
        # abandoned stream in a thread that holds it.
        self._lock = RLock()
        self._calls: dict[Sequence, Call] = {}  # of every request that has not ended
        self._changes: deque[_Change] = deque()  # since the last step
        # A weak reference: if a signal interrupts a thread before the ``with`` block of its permit has begun, the
        # permit is destroyed, and another thread may step. A lock would stay held for ever.
        self._permit: ReferenceType[_StepPermit] | None = None
        self._waiting: deque[Call] = deque()

    def call(self, returns: bool = True, ends_only: bool = False) -> Call:
        """Return a call without requests; see ``Call``."""
        return Call(self, returns, ends_only)

    def add(self, call: Call, requests: list[Sequence]) -> None:
        """See ``Call.add``."""
        self.process.expect_this()
        with self._lock:
            if not self._calls:
                if self.core.has_work and self._current_permit() is None and not self._changes:
                    raise EngineBusyError(
                        "requests that were added to engine.core have not ended; call core.step() until "
                        "core.has_work is False, or core.cancel_all()."
                    )
                self.run = self.core.stats = RunStats()
                self._started = perf_counter()
            call.open.update(requests)
            for request in requests:
                self._calls[request] = call
                self._changes.append(_Change(request, is_new=True))

    def cancel(self, requests: list[Sequence], error: RequestError | None) -> None:
        """See ``Call.cancel`` and ``Call.end``."""
        if not self.process.is_this:
            return  # a fork's copy of a stream is collected
        with self._lock:
            for request in requests:
                if request in self._calls:
                    self._changes.append(_Change(request, error=error))
                if error is None:
                    self._calls.pop(request, None)
        permit = self.acquire(None)
        if permit is not None:
            with permit:
                pass  # the changes are made when it ends

    def acquire(self, call: Call | None) -> _StepPermit | None:
        """Return a permit to run steps; None if another thread has it, which then wakes ``call``."""
        torch.get_num_threads()  # gives a new thread the number of threads that ``torch.set_num_threads`` set
        with self._lock:
            holder = self._current_permit()
            if holder is None:
                permit = _StepPermit(self, call)
                self._permit = ref(permit, self._on_dropped)
                return permit
            if call is not None and holder.thread == get_ident():
                raise EngineBusyError(
                    "a step of this engine called the engine (in a drafter, a policy for K, or a hook); call it "
                    "outside, or make another Engine of the same models."
                )
            if call is not None:
                self._waiting.append(call)
            return None

    def release(self, permit: _StepPermit) -> None:
        """Give the permit back, after the additions and cancellations of other threads have taken effect."""
        while True:
            with self._lock:
                if not self._changes:
                    self._permit = None
                    if permit.call is None or not permit.call.returns:
                        self._wake_next()
                    return
            try:
                self._make_changes()
            except BaseException as error:
                self._fail(error)
                with self._lock:
                    self._permit = None
                    self._wake_next()
                raise

    def stop_waiting(self, call: Call) -> None:
        """Do not wake a call; if it has been, wake the next one, unless a thread is in a step."""
        with self._lock:
            if call in self._waiting:
                self._waiting.remove(call)
            elif self._current_permit() is None:
                self._wake_next()

    @without_autocast
    def step(self) -> None:
        """Run one step in the thread that has the permit, and put the outputs into the inboxes of their calls.

        An exception of the step fails its requests; only interrupts are raised.
        """
        try:
            self._make_changes()
            if self.core.target.has_fused_step:  # its verification is a call that does not need the interpreter
                self.core.target.verifies.clear()
            outputs = self.core.step()
            self.run.seconds = perf_counter() - self._started
            self._deliver(outputs)
            if not self.core.has_work:
                self._end_lost(RequestCancelledError("the request was dropped by engine.core.cancel_all()."))
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _current_permit(self) -> _StepPermit | None:
        return None if self._permit is None else self._permit()

    def _on_dropped(self, reference: ReferenceType[_StepPermit]) -> None:
        with self._lock:
            if self._permit is reference:
                self._permit = None
                self._wake_next()

    def _wake_next(self) -> None:
        if self._waiting:
            self._waiting.popleft().wake()

    def _make_changes(self) -> None:
        has_cancelled = False
        while self._changes:
            request, is_new, reason = self._changes.popleft()
            if not is_new:
                self.core.cancel(request.request_id)
                has_cancelled = True
                if reason is not None and request in self._calls:
                    request.fail(reason)
                    self._deliver([StepOutput(request, [], "error")])
            elif request in self._calls:
                try:
                    self.core.add(request)
                except RequestError as error:
                    request.fail(error)
                    self._deliver([StepOutput(request, [], "error")])
        if has_cancelled and not self._calls:
            self.core.cancel_all()  # a step that a GPU has begun

    def _deliver(self, outputs: list[StepOutput]) -> None:
        by_call: dict[Call, list[StepOutput]] = {}
        for output in outputs:
            call = self._calls.get(output.request)
            if call is None:
                continue
            if output.finish_reason is not None:
                self._calls.pop(output.request, None)
            elif call.ends_only:
                continue
            by_call.setdefault(call, []).append(output)
        for call, emitted in by_call.items():
            call.inbox.put(emitted)

    def _fail(self, error: BaseException) -> None:
        try:
            self.core.drop_failed(error)
        except Exception:  # a drafter fails again
            with suppress(Exception):
                self.core.cancel_all()
        self._end_lost(step_error(error))

    def _end_lost(self, error: RequestError) -> None:
        """End the requests that the core no longer has."""
        with self._lock:
            core = self.core
            added = [change.request for change in self._changes]
            kept = {*core.waiting, *core.resident, *core.ended, *added}
            lost = [request for request in self._calls if request not in kept]
        for request in lost:
            if request.error is None:
                own = copy(error)  # whoever raises it adds to its traceback
                own.__cause__ = error.__cause__
                request.fail(own)
        self._deliver([StepOutput(request, [], "error") for request in lost])
