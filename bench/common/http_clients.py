"""Clients of a server in a process of their own: each streams one completion after the other over one connection.

Run as ``python -m bench.common.http_clients``: it reads a JSON object and writes one (``run``). It keeps what it
receives and reads it when all is over, so that it takes as little as possible of the machine that it measures.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from itertools import count
from time import perf_counter
from typing import Any

ABANDONED, SLOW = 5, 7  # with ``seconds``: every so many-th request is dropped in its middle, or read slowly
_ABANDONED_BYTES = 4000  # after which, at most, a client leaves
_SLOW_SECONDS = 0.05  # between two reads of a slow client
_HUNG_SECONDS = 60.0  # without a byte, after which a request counts as hung
_END = b"\r\n0\r\n\r\n"  # of a chunked body
_EVENT = re.compile(rb"data: (\{.*?\})\n\n")
Received = list[tuple[float, bytes]]  # when, and what


async def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Stream prompts.

    Args:
        settings: ``port``; ``prompts``; ``fields`` of every request's body besides the prompt; ``num_clients``;
            ``seconds`` for which prompts are streamed again and again, while some clients leave in the middle of an
            answer and others read slowly; 0: every prompt once, by clients that read all.

    Returns:
        ``started`` (by ``perf_counter``), ``seconds``, ``num_hung`` (requests that got nothing for a minute), and lists
        with an item per request: ``numbers`` (modulo the number of prompts: the prompt), and what ``_read`` returns.

    """
    received: dict[int, Received] = {}
    seconds, prompts, num_hung = settings["seconds"], settings["prompts"], 0
    numbers = count() if seconds else iter(range(len(prompts)))
    started = perf_counter()

    async def client() -> None:
        nonlocal num_hung
        connection = None
        for number in numbers:
            if seconds and perf_counter() - started >= seconds:
                break
            connection = connection or await asyncio.open_connection("127.0.0.1", settings["port"])
            body = json.dumps({"prompt": prompts[number % len(prompts)], **settings["fields"]}).encode()
            try:
                found = received.setdefault(number, [])
                is_whole = await _exchange(connection, body, number if seconds else None, found)
            except asyncio.TimeoutError:
                num_hung, is_whole = num_hung + 1, False
            if not is_whole:
                connection[1].close()
                connection = None
        if connection is not None:
            connection[1].close()

    await asyncio.gather(*(client() for _ in range(settings["num_clients"])))
    took = perf_counter() - started
    times = {"started": started, "seconds": took}
    return {**times, "num_hung": num_hung, "numbers": list(received), **_read(list(received.values()))}


async def _exchange(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], body: bytes, number: int | None, found: Received
) -> bool:
    """Send a request and keep what comes; return whether the answer was read to its end.

    Args:
        connection: to the server.
        body: of the request.
        number: of the request, which says whether it is abandoned or read slowly; None: neither.
        found: gets when each part came, and the part.

    Raises:
        asyncio.TimeoutError: nothing came for a minute.
        ConnectionError: the server closed the connection before the end.

    """
    reader, writer = connection
    leaves = number is not None and number % ABANDONED == 0
    is_slow = number is not None and number % SLOW == 0
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    found.append((perf_counter(), b""))
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    end, num_bytes = b"", 0
    while not end.endswith(_END):
        part = reader.read(512 if is_slow else 1 << 16)
        data = await (part if number is None else asyncio.wait_for(part, _HUNG_SECONDS))
        if not data:
            raise ConnectionError("the server closed a connection before the end of an answer")
        found.append((perf_counter(), data))
        end, num_bytes = end[-len(_END) :] + data, num_bytes + len(data)
        if leaves and num_bytes > (number or 0) * 97 % _ABANDONED_BYTES:
            return False
        if is_slow:
            await asyncio.sleep(_SLOW_SECONDS)
    return True


def _read(received: list[Received]) -> dict[str, Any]:
    """Return what each request's client saw.

    Returns:
        Of each request: ``tokens`` (ids, if the server shows them), ``texts``, ``num_tokens`` (from the usage, if the
        server shows it), ``spans`` (seconds from the first text to the last one); ``first``: seconds to the first
        text, of those that got one; ``each``: seconds per token of each later event with token ids.

    """
    found: dict[str, Any] = {name: [] for name in ("tokens", "texts", "num_tokens", "spans", "first", "each")}
    for parts in received:
        tokens: list[int] = []
        text, num_tokens, first, last = "", 0, None, parts[0][0]
        for when, event in _events(parts):
            more = [token for choice in event["choices"] for token in choice.get("token_ids", [])]
            piece = "".join(choice["text"] for choice in event["choices"])
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
            if not more and not piece:
                continue
            if first is None:
                first = when
                found["first"].append(when - last)
            elif more:
                found["each"].append((when - last) / len(more))
            last, tokens, text = when, tokens + more, text + piece
        found["tokens"].append(tokens)
        found["texts"].append(text)
        found["num_tokens"].append(num_tokens or len(tokens))
        found["spans"].append(0.0 if first is None else last - first)
    return found


def _events(parts: Received) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the events, and when the last byte of each came."""
    rest = b""
    for when, data in parts:
        rest += data
        end = 0
        for match in _EVENT.finditer(rest):
            event, end = json.loads(match[1]), match.end()
            if "error" in event:
                raise RuntimeError(f"the server answered with an error: {event}")
            yield when, event
        rest = rest[end:]


if __name__ == "__main__":
    json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)
