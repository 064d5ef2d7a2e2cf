"""The stream of one request, as ``async for`` reads it."""

from __future__ import annotations

from specdec_fast.results import StreamChunk
from specdec_fast.service.requests import ServedRequest
from specdec_fast.service.worker import Worker


class AsyncStream:
    """The chunks of one request. They add up to its output; chunks that were not read are merged into one.

    With ``n`` of the request's parameters, chunks of its texts come in any order, each with its ``choice``; those of
    one text add up to its output.

    Leaving ``async for`` early and dropping the stream, ``aclose()``, and cancelling the task that reads cancel it.

    Attributes:
        request_id: for ``AsyncEngine.cancel``.
    """

    def __init__(self, requests: list[ServedRequest], worker: Worker) -> None:
        self.request_id = requests[0].request_id
        self._requests = requests
        self._worker = worker
        self._num_open = len(requests)  # texts whose last chunk has not been read
        self._prompt_ids: list[int] = []

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's token ids; empty before the first chunk."""
        sequence = self._requests[0].sequence
        if not self._prompt_ids and sequence is not None:
            self._prompt_ids = sequence.token_ids[: sequence.prompt_length]
        return self._prompt_ids

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV entries the first text found in the prefix cache; known with its first chunk."""
        sequence = self._requests[0].sequence
        return 0 if sequence is None else sequence.num_cached_tokens

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> StreamChunk:
        """Return what was emitted since the last chunk, or wait for it.

        Raises:
            RequestError, ConfigError: the request was refused.
        """
        if not self._num_open:
            raise StopAsyncIteration
        try:
            chunk: StreamChunk = await self._requests[0].receiver.get()
        except BaseException:
            self._end()
            raise
        self._num_open -= chunk.finish_reason is not None
        return chunk

    async def aclose(self) -> None:
        """Cancel the request, if it has not ended."""
        self._end()

    def _end(self) -> None:
        if self._num_open:
            self._num_open = 0
            for request in self._requests:
                self._worker.drop(request)

    def __del__(self) -> None:
        if self._num_open:
            for request in self._requests:
                self._worker.drop_soon(request)
