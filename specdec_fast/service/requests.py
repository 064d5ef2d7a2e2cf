"""The requests that a service has accepted and not answered yet, and how many these may be."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from threading import Lock
from time import monotonic

from specdec_fast.engine.output import ChunkMaker, output_of
from specdec_fast.engine.step import StepOutput
from specdec_fast.errors import (
    ConfigError,
    EngineOverloadedError,
    InvalidParamsError,
    KVCacheTooSmallError,
    RequestError,
)
from specdec_fast.request.sequence import Sequence
from specdec_fast.results import GenerationOutput, StreamChunk
from specdec_fast.service.receivers import Receiver
from specdec_fast.service.statistics import RequestRecord


class ServedRequest:
    """One text of a service's request: a request with ``n`` texts is as many of these, with one id and one receiver."""

    def __init__(self, receiver: Receiver, is_stream: bool, deadline: float | None, choice: int = 0) -> None:
        self.receiver = receiver  # of its chunks (``is_stream``) or its output
        self.choice = choice  # its number among the texts of its prompt
        self.is_stream = is_stream
        self.deadline = deadline  # when it must have ended, on the clock of ``time.monotonic``; None: any time
        self.request_id = ""  # its name for the caller
        self.sequence: Sequence | None = None  # None until its prompt is encoded
        self.is_served = False  # whether steps serve it, or have served it
        self.num_positions = 0  # KV positions that it may need
        # whether it needs no last output: it was cancelled, or refused before its prompt was encoded
        self.is_dropped = False
        self.error: RequestError | None = None  # with which it is to end, if that has been decided
        # end of the step that emitted its first token, on the clock of ``time.monotonic``
        self.first_token_at: float | None = None
        self.is_recorded = False  # whether it has been counted as ended
        self._arrived = monotonic()
        self._tokenizer: object = None
        self._chunks: ChunkMaker | None = None

    def begin(self, sequence: Sequence, tokenizer: object) -> None:
        """Set the sequence, and the tokenizer that makes its text."""
        self.sequence = sequence
        self._tokenizer = tokenizer
        if self.is_stream:
            self._chunks = ChunkMaker(sequence, tokenizer)

    def item_of(self, output: StepOutput) -> StreamChunk | GenerationOutput | None:
        """Return a chunk of a stream; otherwise the whole output after the last step, and None before it."""
        if self._chunks is not None:
            return self._chunks.make(output)
        return None if output.finish_reason is None else output_of(output.request, self._tokenizer)

    def failed_item(self, output: StepOutput, error: RequestError) -> StreamChunk | GenerationOutput:
        """Return the last item of a request whose text cannot be made."""
        if self.is_stream:
            return StreamChunk(0, output.token_ids, None, "error", error, choice=self.choice)
        return replace(output_of(output.request, None), finish_reason="error", error=error)

    def record(self, finish_reason: str) -> RequestRecord:
        """Return what is known of a request that ends now; its prompt has been encoded."""
        sequence = self.sequence
        assert sequence is not None
        since = sequence.resident_since
        first = self.first_token_at
        return RequestRecord(
            finish_reason=finish_reason,  # type: ignore[arg-type]
            num_prompt_tokens=sequence.prompt_length,
            num_emitted_tokens=sequence.stats.num_emitted_tokens,
            queue_seconds=None if since is None else since - self._arrived,
            first_token_seconds=None if first is None else first - self._arrived,
            seconds=monotonic() - self._arrived,
        )


class LiveRequests:
    """Requests by id, within the limits of a service; for any thread."""

    def __init__(self, most_requests: int, most_positions: int | None) -> None:
        self.most_requests = most_requests  # that may be live at once
        self.most_positions = most_positions  # KV positions that they may need together; None: any number
        self._lock = Lock()
        self._requests: dict[str, list[ServedRequest]] = {}  # the texts of each that have not ended
        self._num_requests = 0  # texts
        self._num_positions = 0
        self._numbers = count(1)

    def __len__(self) -> int:
        return self._num_requests

    def enter(self, requests: list[ServedRequest], request_id: str | None) -> None:
        """Accept the texts of a request, all or none.

        Raises EngineOverloadedError if there are too many now, InvalidParamsError if there are too many at any time,
        ConfigError if a request has its id.
        """
        if len(requests) > self.most_requests:
            raise InvalidParamsError(
                f"n={len(requests)}: at most {self.most_requests} texts may run or wait at once (the window plus "
                "max_waiting); lower n, or raise max_waiting."
            )
        with self._lock:
            if self._num_requests + len(requests) > self.most_requests:
                raise EngineOverloadedError(
                    f"{self._num_requests} requests are running or waiting, the limit is {self.most_requests} "
                    "(the window plus max_waiting); send the request again later, or raise max_waiting."
                )
            if request_id is None:  # a caller may have chosen a name of the same form
                names = (f"request-{number}" for number in self._numbers)
                request_id = next(name for name in names if name not in self._requests)
            if request_id in self._requests:
                raise ConfigError(
                    f"request_id={request_id!r} belongs to a request that has not ended; choose another, or leave it "
                    "out."
                )
            for request in requests:
                request.request_id = request_id
            self._requests[request_id] = list(requests)
            self._num_requests += len(requests)

    def charge(self, requests: list[ServedRequest], num_positions: int) -> None:
        """Count the KV positions that each text of a request may need, as long as it is live.

        Raises EngineOverloadedError if together they would be more than there may be, KVCacheTooSmallError if they
        alone are more, so that sending the request again would not help.
        """
        self.expect_budget(num_positions * len(requests), "the request needs")
        with self._lock:
            live = [request for request in requests if self._is_live(request)]  # the others were dropped meanwhile
            needed = num_positions * len(live)
            total = self._num_positions + needed
            if live and self.most_positions is not None and total > self.most_positions:
                raise EngineOverloadedError(
                    f"the request needs {needed} KV positions (its prompt and max_new_tokens), the live "
                    f"requests need {self._num_positions}, and kv_token_budget={self.most_positions}; send the "
                    "request again later, lower max_new_tokens, or raise the budget."
                )
            for request in live:
                request.num_positions = num_positions
            self._num_positions = total

    def expect_budget(self, num_positions: int, what: str) -> None:
        """Raise KVCacheTooSmallError for more KV positions than all requests may need; ``what`` begins the message."""
        if self.most_positions is not None and num_positions > self.most_positions:
            raise KVCacheTooSmallError(
                f"{what} {num_positions} KV positions (prompt and max_new_tokens), and "
                f"kv_token_budget={self.most_positions}; lower max_new_tokens, or raise the budget."
            )

    def leave(self, request: ServedRequest) -> None:
        """Forget a request that has ended or was dropped; it may be unknown."""
        with self._lock:
            if not self._is_live(request):
                return
            texts = self._requests[request.request_id]
            texts.remove(request)
            if not texts:
                del self._requests[request.request_id]
            self._num_requests -= 1
            self._num_positions -= request.num_positions

    def find(self, request_id: str) -> list[ServedRequest]:
        """Return the texts of a request that are live."""
        with self._lock:
            return list(self._requests.get(request_id, ()))

    def all(self) -> list[ServedRequest]:
        """Return the live texts of all requests."""
        with self._lock:
            return [request for texts in self._requests.values() for request in texts]

    def _is_live(self, request: ServedRequest) -> bool:
        return request in self._requests.get(request.request_id, ())


def positions_of(sequences: list[Sequence]) -> int:
    """Return how many KV positions each text of a prompt may need. Raises the prompt's RequestError, if it is wrong."""
    first = sequences[0]
    if first.error is not None:
        raise first.error
    return first.num_positions
