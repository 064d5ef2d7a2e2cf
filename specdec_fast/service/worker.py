"""The worker of a service: one thread runs the steps; another one makes texts and posts them to the event loops."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from queue import SimpleQueue
from threading import Lock
from time import monotonic
from weakref import ref

from specdec_fast.engine.engine import Engine
from specdec_fast.engine.step import StepOutput, step_error
from specdec_fast.errors import DeadlineExceededError, RequestError
from specdec_fast.request.sequence import Sequence
from specdec_fast.service.receivers import Item, Mailbox
from specdec_fast.service.requests import LiveRequests, ServedRequest
from specdec_fast.service.statistics import Observer, ServiceStats, Totals

_logger = logging.getLogger("specdec_fast.service")
NOT_ENCODED = "the request has not ended within its timeout: its prompt was not encoded in time."
_MOST_SECONDS_HELD = 0.003  # by which texts may come later, so that they are made during the next verification


class Worker:
    """Runs steps in one thread as long as there are requests, and makes texts in another one during the next step.

    Both threads belong to executors, so nothing runs while nothing is served, and the interpreter can exit. The core is
    shared with the engine's own callers. The worker removes requests that have ended from ``live``.
    """

    def __init__(self, engine: Engine, live: LiveRequests) -> None:
        self._engine = engine
        self._live = live
        self._call = engine.shared.call()
        self._executor = ThreadPoolExecutor(1, "specdec_fast-worker")
        self._writer = ThreadPoolExecutor(1, "specdec_fast-writer")
        self.observers: list[Observer] = []  # called with the record of every request that was served and has ended
        self._lock = Lock()  # guards the four below
        self._served: dict[Sequence, ServedRequest] = {}
        self._run: Future[None] | None = None
        self._next_deadline = float("inf")
        self._ended = Totals()
        self._dropped: SimpleQueue[ServedRequest] = SimpleQueue()

    def start(self, request: ServedRequest, sequence: Sequence) -> None:
        """For any thread: serve an encoded request unless it was dropped. Raises RequestError if it was cancelled."""
        with self._lock:
            if request.error is not None:
                raise request.error
            if request.is_dropped:
                self._live.leave(request)
                return
            request.begin(sequence, self._engine.tokenizer)
            self._call.add([sequence])
            request.is_served = True
            self._served[sequence] = request
            self._next_deadline = min(self._next_deadline, request.deadline or float("inf"))
            if self._run is None:
                self._run = self._executor.submit(self._serve)
        self._call.wake()

    def drop(self, request: ServedRequest) -> None:
        """Cancel a request without a last output; its pages are free before the next step. For any thread."""
        with self._lock:
            request.is_dropped = True
            self._live.leave(request)
            sequence = request.sequence
            if sequence is None or self._served.pop(sequence, None) is None:
                return
            self._ended.add(sequence)
        self._call.cancel([sequence])
        self._call.wake()
        self._record(request, "abort")

    def drop_soon(self, request: ServedRequest) -> None:
        """Let the worker's thread drop a request before the next step; for a destructor, which may not take locks."""
        request.is_dropped = True
        self._dropped.put(request)
        self._call.wake()

    def end(self, requests: Iterable[ServedRequest], error: RequestError) -> None:
        """For any thread: let requests end with an error before the next step, or at once before they are encoded.

        Each gets an error of its own: whoever raises one adds to its traceback, which keeps the frames of the callers.
        """
        errors = {request: copy(error) for request in requests}
        served = []
        with self._lock:
            for request, own in errors.items():
                request.error = own
                if request.is_served and request.sequence is not None:
                    served.append((request.sequence, own))
        for sequence, own in served:
            self._call.end([sequence], own)
        self._call.wake()
        for request, own in errors.items():
            self.refuse(request, own)

    def refuse(self, request: ServedRequest, error: Exception) -> None:
        """End a request at once, with an error, unless it is served or has ended; for any thread."""
        with self._lock:
            if request.is_served:
                return
            has_ended = request.is_dropped
            request.is_dropped = True
        self._live.leave(request)
        if not has_ended:
            receiver = request.receiver
            receiver.mailbox.post(receiver.loop, [(receiver, error)])

    def refuse_after(self, seconds: float, request: ServedRequest) -> None:
        """For the thread of the event loop: end a request that is not served after so many seconds.

        The steps look at the deadlines of those that are served.
        """
        request.receiver.loop.call_later(seconds, self._refuse_late, ref(request))

    def _refuse_late(self, reference: ref[ServedRequest]) -> None:
        request = reference()
        if request is not None:
            self.refuse(request, DeadlineExceededError(NOT_ENCODED))

    def stats(self) -> ServiceStats:
        """Return what is served now, and the counts of all requests so far; for any thread."""
        with self._lock:
            sequences = list(self._served)
            totals = self._ended.with_(sequences)
        core = self._engine.core
        num_running = len({*core.resident} & {*sequences})
        pool = core.pool
        kv_usage = 0.0 if pool is None else 1 - pool.num_free_pages / pool.num_pages
        num_waiting = max(0, len(self._live) - num_running)
        return ServiceStats(
            num_running=num_running,
            num_waiting=num_waiting,
            kv_usage=kv_usage,
            num_prompt_tokens=totals.num_prompt_tokens,
            num_cached_tokens=totals.num_cached_tokens,
            num_preemptions=totals.num_preemptions,
            decoding=totals.decoding,
        )

    def close(self) -> None:
        """Wait for both threads to end; nothing may be served any more."""
        self._executor.shutdown()
        self._writer.shutdown()

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._served:
                    self._run = None
                    break
            try:
                outputs = self._call.take(self._seconds_left())
            except Exception as error:  # a drafter whose release of a request raises
                outputs = self._fail(error)
            served = self._taken(outputs)
            if served:
                self._writer.submit(self._hand_out, served)
            while not self._dropped.empty():
                self.drop(self._dropped.get())
            self._end_late()
        self._call.rest()

    def _taken(self, outputs: list[StepOutput]) -> list[tuple[ServedRequest, StepOutput]]:
        """Find the requests of a step's outputs; those that have ended are not served any more."""
        taken = []
        now = monotonic()
        with self._lock:
            served = self._served
            for output in outputs:
                is_last = output.finish_reason is not None
                request = served.pop(output.request, None) if is_last else served.get(output.request)
                if request is None:
                    continue
                taken.append((request, output))
                if request.first_token_at is None and output.token_ids:
                    request.first_token_at = now
                if is_last:
                    self._ended.add(output.request)
        return taken

    def _record(self, request: ServedRequest, finish_reason: str) -> None:
        """Show the observers a request that has ended, once. What they raise must not lose the outputs of a step."""
        if self.observers and not request.is_recorded:
            request.is_recorded = True
            record = request.record(finish_reason)
            for observer in self.observers:
                try:
                    observer(record)
                except Exception:
                    _logger.exception("an observer of AsyncEngine.add_observer raised; all requests go on")

    def _hand_out(self, served: list[tuple[ServedRequest, StepOutput]]) -> None:
        """Make chunks and outputs of a step's outputs, and post them: once per event loop. In the writer's thread.

        Texts are made, and loops send them, while the model verifies: before that the model's thread needs Python's
        lock between its forwards, and would wait for it.
        """
        self._engine.target.verifies.wait(_MOST_SECONDS_HELD)
        posts: dict[Mailbox, list[tuple[ServedRequest, Item]]] = {}
        for request, output in served:
            try:
                item = request.item_of(output)
            except Exception as error:  # of a tokenizer
                item = request.failed_item(output, step_error(error))
                self._record(request, "error")
                self.drop(request)
            if item is not None:
                if item.finish_reason is not None:
                    self._live.leave(request)
                    self._record(request, item.finish_reason)
                posts.setdefault(request.receiver.mailbox, []).append((request, item))
        for mailbox, items in posts.items():
            if not mailbox.post(items[0][0].receiver.loop, [(request.receiver, item) for request, item in items]):
                for request, _ in items:  # the loop is closed
                    self.drop(request)

    def _seconds_left(self) -> float | None:
        return None if self._next_deadline == float("inf") else max(0.0, self._next_deadline - monotonic())

    def _end_late(self) -> None:
        now = monotonic()
        if now < self._next_deadline:
            return
        with self._lock:
            late = []
            to_come = [float("inf")]
            for request in self._served.values():
                if request.deadline is None or request.error is not None:
                    continue
                if request.deadline <= now:
                    late.append(request)
                else:
                    to_come.append(request.deadline)
            self._next_deadline = min(to_come)
        if late:
            self.end(late, DeadlineExceededError("the request has not ended within its timeout; its tokens are kept."))

    def _fail(self, error: Exception) -> list[StepOutput]:
        with self._lock:
            sequences = list(self._served)
        for sequence in sequences:
            if sequence.finish_reason is None:
                sequence.fail(step_error(error))
        return [StepOutput(sequence, [], sequence.finish_reason) for sequence in sequences]
