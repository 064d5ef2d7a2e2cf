"""Clients of a server in a process of their own: each streams one completion after the other over one connection.

Run as ``python -m bench.common.http_clients``: it reads a JSON object (``port``, ``prompts``, ``max_new_tokens``,
``num_clients``) and writes one (``Answers``). It keeps what it receives and reads it when all is over, so that it takes
as little as possible of the machine that it measures.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Any

_END = b"\r\n0\r\n\r\n"  # of a chunked body
_EVENT = re.compile(rb"data: (\{.*?\})\n\n")
Received = list[tuple[float, bytes]]  # when, and what


async def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Stream all prompts; return the seconds, and what each client saw of each prompt."""
    received: list[Received] = [[] for _ in settings["prompts"]]
    numbers = iter(range(len(received)))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", settings["port"])
        for number in numbers:
            fields = {"prompt": settings["prompts"][number], "max_tokens": settings["max_new_tokens"]}
            fields |= {"temperature": 0, "stream": True, "return_token_ids": True}
            body = json.dumps(fields).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            found = received[number]
            found.append((perf_counter(), b""))
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            end = b""
            while not end.endswith(_END):
                data = await reader.read(1 << 16)
                if not data:
                    raise ConnectionError("the server closed a connection before the end of an answer")
                found.append((perf_counter(), data))
                end = end[-len(_END) :] + data
        writer.close()

    started = perf_counter()
    await asyncio.gather(*(client() for _ in range(settings["num_clients"])))
    return {"seconds": perf_counter() - started, **_read(received)}


def _read(received: list[Received]) -> dict[str, Any]:
    """Return each prompt's tokens, the seconds to its first ones, and the seconds per token of each later event."""
    found: dict[str, Any] = {"tokens": [], "first": [], "each": []}
    for parts in received:
        tokens: list[int] = []
        last = parts[0][0]
        for when, more in _events(parts):
            if more and not tokens:
                found["first"].append(when - last)
            elif more:
                found["each"].append((when - last) / len(more))
            last = when if more else last
            tokens += more
        found["tokens"].append(tokens)
    return found


def _events(parts: Received) -> Iterator[tuple[float, list[int]]]:
    """Yield the tokens of each event, and when its last byte came."""
    rest = b""
    for when, data in parts:
        rest += data
        end = 0
        for match in _EVENT.finditer(rest):
            event, end = json.loads(match[1]), match.end()
            if "error" in event:
                raise RuntimeError(f"the server answered with an error: {event}")
            yield when, [token for choice in event["choices"] for token in choice["token_ids"]]
        rest = rest[end:]


if __name__ == "__main__":
    json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)
