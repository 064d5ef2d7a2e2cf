"""What every request passes before the application: its id, the API key, and the limit on its bytes."""

from __future__ import annotations

import hmac
import random
import re
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec_fast.server.http import problem_response
from specdec_fast.server.problems import Problem

_OPEN = ("/health", "/metrics")  # for orchestrators, which have no key
_REQUEST_ID = re.compile(r"[!-~]{1,128}")  # what may be sent back in a header


class Gate:
    """ASGI middleware that refuses requests before their bodies are read.

    Every response gets the header ``X-Request-Id``: the request's own, or a new one. ``api_key`` is needed except for
    ``/health`` and ``/metrics``; None: no key. ``max_request_bytes`` limits a body, whether or not its length is
    declared. ``on_response`` is called with the status of every response.
    """

    def __init__(
        self, app: ASGIApp, api_key: str | None, max_request_bytes: int, on_response: Callable[[int], None]
    ) -> None:
        self._app = app
        self._on_response = on_response
        self._key = None if api_key is None else api_key.encode()
        self._max_bytes = max_request_bytes
        # Ids are no secrets. ``os.urandom`` would give up the interpreter's lock, and a busy engine returns it late.
        self._random = random.Random()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        num_bytes = 0
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"{self._random.getrandbits(128):032x}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
                self._on_response(message["status"])
            await send(message)

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._too_large().message)
            return message

        problem = self._refusal(scope, headers)
        if problem is None:
            await self._app(scope, receive_limited, send_with_id)
        else:
            await problem_response(problem)(scope, receive, send_with_id)

    def _refusal(self, scope: Scope, headers: Headers) -> Problem | None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._key is not None and path not in _OPEN and not self._has_key(headers):
            message = "the API key is missing or wrong; send it in the header 'Authorization: Bearer KEY'."
            return Problem(401, message, code="invalid_api_key")
        length = headers.get("content-length", "")
        limit = str(self._max_bytes)
        digits = length.lstrip("0") if length.isascii() and length.isdigit() else ""
        # As numbers, but without int(), which raises for more than 4300 digits.
        return self._too_large() if (len(digits), digits) > (len(limit), limit) else None

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").encode("latin-1").partition(b" ")
        # HTTP does not distinguish "Bearer" from "bearer" (RFC 9110, section 11.1).
        return scheme.lower() == b"bearer" and self._key is not None and hmac.compare_digest(given, self._key)

    def _too_large(self) -> Problem:
        return Problem(413, f"the body has more than {self._max_bytes} bytes; send less, or raise the server's limit.")
