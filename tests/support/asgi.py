"""An ASGI client in the application's own event loop, which can read slowly, stop reading, and leave."""

from __future__ import annotations

import asyncio
import json

JSON = {"content-type": "application/json"}


class Exchange:
    """One request and its response.

    Args:
        app: the application.
        path: with ``/v1``.
        body: an object to send as JSON, bytes, or parts of a body whose length is not declared; None: a GET.
        headers: of the request.

    Attributes:
        status, headers, parts: what has come of the response.
        unread: parts of the body that the application has not read.
        may_send: while it is not set, the response cannot be sent further: its reader does not read.

    """

    def __init__(self, app, path, body=None, headers=None):
        self.app, self.parts, self.status, self.headers = app, [], None, {}
        self._has_begun, self._leaves = asyncio.Event(), asyncio.Event()
        self._ended = asyncio.Event()
        self.may_send = asyncio.Event()
        self.may_send.set()
        declared = not isinstance(body, list) or not all(isinstance(part, bytes) for part in body)
        if not declared:
            self.unread = list(body)
        else:
            self.unread = [body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()]
        headers = {"host": "test", **({} if body is None else JSON), **(headers or {})}
        if declared:
            headers.setdefault("content-length", str(len(self.unread[0])))
        self.scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
            "method": "GET" if body is None else "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "client": ("127.0.0.1", 1), "server": ("test", 80),
        }  # fmt: skip
        self.task = asyncio.create_task(self._run())

    async def __call__(self):
        """Wait for the end of the response and return itself."""
        await self.task
        return self

    async def first_part(self):
        """Wait for the first part of the body."""
        await self._has_begun.wait()

    def leave(self):
        """Close the connection."""
        self._leaves.set()

    @property
    def body(self):
        return b"".join(self.parts)

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def events(self):
        """The events of a stream; ``[DONE]`` as a string."""
        lines = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    async def _run(self):
        try:
            await self.app(self.scope, self._receive, self._send)
        finally:
            self._ended.set()
            self._has_begun.set()

    async def _receive(self):
        if self.unread:
            part = self.unread.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self.unread)}
        waits = [asyncio.create_task(event.wait()) for event in (self._leaves, self._ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        await self.may_send.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            self.parts.append(message.get("body", b""))
            self._has_begun.set()


async def fetch(app, path, body=None, headers=None):
    """Send a request and return its whole exchange."""
    return await Exchange(app, path, body, headers)()


def served(app, *requests):
    """Send requests (path, body) at the same time and return their exchanges."""

    async def main():
        return await asyncio.gather(*(fetch(app, path, body) for path, body in requests))

    return asyncio.run(main())
