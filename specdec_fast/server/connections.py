"""HTTP connections that bound what a client may send besides bodies.

uvicorn and its parser keep a request line and headers of any size, and any number of requests that wait for the answers
of others. No middleware sees a request before that.
"""

from __future__ import annotations

import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specdec_fast.server.problems import Problem

MAX_HEAD_BYTES = 64 << 10
_PIECE_BYTES = 16 << 10
_CHUNK_FRAME_BYTES = 16  # the size of a chunk and two line ends
_MOST_WAITING = 100  # requests behind one that is being answered; hardly a client sends one


class BoundedConnection(HttpToolsProtocol):
    """A connection that is closed when a request has more than 64 KiB besides its body, or too many requests wait.

    The 64 KiB are those of the request line, headers, trailers, and what frames the chunks of a body beyond 16 bytes
    each; up to 16 KiB more may pass, as bytes are counted in pieces. If headers exceed them, the status is 431.
    """

    _num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse bytes of the client, or close the connection."""
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            self._num_head_bytes += len(piece)
            super().data_received(piece)
            if self.transport.is_closing():
                return
            if self._num_head_bytes > MAX_HEAD_BYTES or len(self.pipeline) > _MOST_WAITING:
                self._refuse()
                return
            self._num_head_bytes = max(0, self._num_head_bytes)

    def on_body(self, body: bytes) -> None:
        """Keep a part of a body."""
        self._num_head_bytes -= len(body)
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        """Note the end of a chunk."""
        self._num_head_bytes -= _CHUNK_FRAME_BYTES

    def on_message_complete(self) -> None:
        """Note the end of a request."""
        self._num_head_bytes = 0
        super().on_message_complete()

    def _refuse(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # else a response may be under way
            body = json.dumps(Problem(431, f"the headers have more than {MAX_HEAD_BYTES} bytes; send less.").body())
            lines = (
                "HTTP/1.1 431 Request Header Fields Too Large",
                "content-type: application/json",
                f"content-length: {len(body)}",
                "connection: close",
                "",
                body,
            )
            self.transport.write("\r\n".join(lines).encode())
        self.transport.close()
