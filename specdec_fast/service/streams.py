"""The stream of one request, as ``async for`` reads it."""

from __future__ import annotations

from specdec_fast.results import StreamChunk
from specdec_fast.service.requests import ServedRequest
from specdec_fast.service.worker import Worker


class AsyncStream:
    """The chunks of one request. They add up to its output; chunks that were not read are merged into one.

    Leaving ``async for`` early and dropping the stream, ``aclose()``, and cancelling the task that reads cancel it.

    Attributes:
        request_id: for ``AsyncEngine.cancel``.
    """

    def __init__(self, request: ServedRequest, worker: Worker) -> None:
        self.request_id = request.request_id
        self._request = request
        self._worker = worker
        self._has_ended = False
        self._prompt_ids: list[int] = []

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's token ids; empty before the first chunk."""
        sequence = self._request.sequence
        if not self._prompt_ids and sequence is not None:
            self._prompt_ids = sequence.token_ids[: sequence.prompt_length]
        return self._prompt_ids

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV entries were found in the prefix cache; known with the first chunk."""
        sequence = self._request.sequence
        return 0 if sequence is None else sequence.num_cached_tokens

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> StreamChunk:
        """Return what was emitted since the last chunk, or wait for it.

        Raises:
            RequestError, ConfigError: the request was refused.
        """
        if self._has_ended:
            raise StopAsyncIteration
        try:
            chunk: StreamChunk = await self._request.receiver.get()
        except BaseException:
            self._end()
            raise
        self._has_ended = chunk.finish_reason is not None
        return chunk

    async def aclose(self) -> None:
        """Cancel the request, if it has not ended."""
        self._end()

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._worker.drop(self._request)

    def __del__(self) -> None:
        if not self._has_ended:
            self._worker.drop_soon(self._request)
