"""Responses of the server: JSON, errors, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec_fast.results import StreamChunk
from specdec_fast.server.answers import Answer
from specdec_fast.server.problems import Problem
from specdec_fast.service import AsyncStream
from specdec_fast.service.receivers import merged as merge

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not collect events
_RETRY_SECONDS = 1
_DONE = b"data: [DONE]\n\n"
_Result = TypeVar("_Result")
Chunks = AsyncGenerator[tuple[int, StreamChunk], None]


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a body as JSON in ASCII, so that half of a surrogate pair cannot break it."""
    return Response(json.dumps(body), status, headers, "application/json")


def problem_response(problem: Problem) -> Response:
    """Return an error object with its status."""
    headers = {429: {"Retry-After": str(_RETRY_SECONDS)}, 401: {"WWW-Authenticate": "Bearer"}}
    return json_response(problem.body(), problem.status, headers.get(problem.status))


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Await some work, and cancel it if the client of a request whose body has been read leaves (ClientDisconnect)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    gone.add_done_callback(lambda _: task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        if gone.done():
            raise ClientDisconnect from None
        raise
    finally:
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(streams: Sequence[AsyncStream]) -> Chunks:
    """Yield the chunks of several streams as they come, each with the index of its stream.

    At most one chunk of each stream waits here, so a slow reader lets the streams merge theirs.
    """
    try:
        if len(streams) == 1:
            async for chunk in streams[0]:
                yield 0, chunk
            return
        pending = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = pending.pop(task)
                    chunk = task.result()
                    if chunk.finish_reason is None:
                        pending[asyncio.ensure_future(anext(streams[index]))] = index
                    yield index, chunk
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
    finally:
        for stream in streams:
            await stream.aclose()


async def in_pieces(chunks: Chunks, num_tokens: int) -> Chunks:
    """Yield chunks of at least so many tokens, but for the first and the last one of each stream."""
    held: dict[int, StreamChunk] = {}
    begun: set[int] = set()
    try:
        async for index, chunk in chunks:
            whole = merge(held.pop(index), chunk) if index in held else chunk
            if whole.finish_reason is None and index in begun and len(whole.token_ids) < num_tokens:
                held[index] = whole
            else:
                begun.add(index)
                yield index, whole
    finally:
        await chunks.aclose()


class EventStream(Response):
    """The events of a stream, one stream per choice. An error before the first chunk is a response with its own status.

    One task sends, and one waits for the client to leave, from the first step on. ``StreamingResponse`` begins to wait
    when it sends, so the time before the first chunk would need a wait of its own.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: Answer,
        streams: Sequence[AsyncStream],
        chunks: Chunks,
        to_problem: Callable[[Exception], Problem],
    ) -> None:
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._answer = answer
        self._streams = streams
        self._chunks = chunks
        self._to_problem = to_problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._respond(scope, receive, send))
        except ClientDisconnect:
            pass  # there is no connection for a response
        finally:
            await self._chunks.aclose()
            for stream in self._streams:  # a client that has left before the first step has not begun the chunks
                await stream.aclose()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            item: tuple[int, StreamChunk] | None = await anext(self._chunks)
            assert item is not None
            if item[1].error is not None:
                raise item[1].error
        except Exception as error:
            await problem_response(self._to_problem(error))(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def send_event(body: str) -> None:
            await send({"type": "http.response.body", "body": f"data: {body}\n\n".encode(), "more_body": True})

        try:
            while item is not None:
                index, chunk = item
                if chunk.error is not None:
                    raise chunk.error
                event = self._answer.event_json(index, chunk, self._streams[index].prompt_ids)
                if event is not None:
                    await send_event(event)
                item = await anext(self._chunks, None)
            if self._answer.body.includes_usage:
                prompts = [(len(stream.prompt_ids), stream.num_cached_tokens) for stream in self._streams]
                usage = self._answer.usage_event(prompts)
                await send_event(json.dumps(usage))
        except Exception as error:
            await send_event(json.dumps(self._to_problem(error).body()))
        await send({"type": "http.response.body", "body": _DONE})
