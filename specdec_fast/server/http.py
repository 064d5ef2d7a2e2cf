"""Responses of the server: JSON, errors, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from specdec_fast.results import StreamChunk
from specdec_fast.server.answers import Answer
from specdec_fast.server.problems import Problem
from specdec_fast.service import AsyncStream
from specdec_fast.service.receivers import merged as merge

EVENT_STREAM = "text/event-stream"
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


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Await some work, and cancel it if the client leaves.

    Raises:
        ClientDisconnect: it left.

    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
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


async def events(
    answer: Answer, streams: Sequence[AsyncStream], first: tuple[int, StreamChunk], rest: Chunks, to_problem: Any
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream; an error is the last event before the end.

    Args:
        answer: makes the events.
        streams: one per choice.
        first: the first chunk; it has been read, because an error before it is a response of its own.
        rest: the other chunks, from ``merged``.
        to_problem: a function that makes a Problem of an exception.

    """
    try:
        item: tuple[int, StreamChunk] | None = first
        while item is not None:
            index, chunk = item
            if chunk.error is not None:
                raise chunk.error
            event = answer.event(index, chunk, streams[index].prompt_ids)
            if event is not None:
                yield _event(event)
            item = await anext(rest, None)
        if answer.body.includes_usage:
            yield _event(answer.usage_event([len(stream.prompt_ids) for stream in streams]))
    except Exception as error:
        yield _event(to_problem(error).body())
    finally:
        await rest.aclose()
    yield _DONE


def _event(body: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(body).encode()
