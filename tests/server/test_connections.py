"""Connections bound what a client sends besides bodies; raw bytes over sockets, and an application that answers all."""

from __future__ import annotations

import asyncio
import json

import pytest
import uvicorn
from uvicorn.server import ServerState

from specdec_fast.server.connections import MAX_HEAD_BYTES, BoundedConnection

READ_BYTES = 256 << 10  # that asyncio reads at once
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


async def application(scope, receive, send):
    """Answer with the number of bytes of the body."""
    num_bytes, has_more = 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message["body"])
        has_more = message["more_body"]
    body = str(num_bytes).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Counted(BoundedConnection):
    """Counts what the server has read."""

    num_bytes = 0

    def data_received(self, data):
        self.num_bytes += len(data)
        super().data_received(data)


def connected(talk):
    """Return what ``talk(reader, writer, connections)`` returns; ``connections`` are those of the server."""

    async def main():
        config = uvicorn.Config(application, http=Counted, ws="none", lifespan="off", log_config=None)
        state, connections = ServerState(), []

        def accept():
            connections.append(Counted(config, state, {}))
            return connections[-1]

        server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            return await talk(reader, writer, connections)
        finally:
            writer.close()
            server.close()

    return asyncio.run(main())


async def response_of(reader):
    """Return the status and the body of a response."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


@pytest.mark.parametrize("num_bytes", [1000, 1 << 20], ids=["trickled", "at once"])
@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (HEAD + b"X-Long: ", b"a"),
        (HEAD, b"a:b\r\n"),
        (b"GET /", b"a"),
        (CHUNKED + b"5;", b"a"),
        (CHUNKED, b"1;" + b"a" * 1000 + b"\r\nx\r\n"),
        (CHUNKED + b"0\r\n", b"a: b\r\n"),
    ],
    ids=["one header", "many headers", "URL", "chunk extension", "chunk extensions", "trailers"],
)
def test_a_client_that_never_ends_its_headers_is_cut_off(begin, more, num_bytes):
    most = 16 << 20

    async def talk(reader, writer, connections):
        piece = more * max(1, num_bytes // len(more))
        num_sent = 0
        try:
            writer.write(begin)
            while num_sent < most:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)  # to the server's turn
                num_sent += len(piece)
        except ConnectionError:
            pass
        return num_sent, connections[0].num_bytes

    num_sent, num_read = connected(talk)
    assert num_sent < most
    assert num_read <= MAX_HEAD_BYTES + READ_BYTES + num_bytes


def test_too_long_a_head_is_answered_with_431():
    async def talk(reader, writer, connections):
        head = (HEAD + b"X-Long: ").ljust(MAX_HEAD_BYTES, b"a")
        writer.write(head)
        while not connections or connections[0].num_bytes < len(head):
            await asyncio.sleep(0)
        assert not connections[0].transport.is_closing(), "the limit itself"
        writer.write(b"a")
        status, body = await response_of(reader)
        assert await reader.read() == b"", "the connection is closed"
        return status, json.loads(body)["error"]

    status, error = connected(talk)
    assert status == 431
    assert (error["type"], "65536 bytes" in error["message"]) == ("invalid_request_error", True)


def chunk(body):
    return b"%x\r\n%s\r\n" % (len(body), body)


@pytest.mark.parametrize(
    ("requests", "bodies"),
    [
        ([HEAD + b"X-Long: " + b"a" * 60_000 + b"\r\n\r\n"] * 3, [0] * 3),
        ([HEAD + b"Content-Length: 3000000\r\n\r\n" + b"a" * 3_000_000], [3_000_000]),
        ([CHUNKED + chunk(b"a" * 8192) * 300 + b"0\r\n\r\n"], [300 * 8192]),
        ([CHUNKED + chunk(b"a") * 50_000 + b"0\r\n\r\n"] * 2, [50_000] * 2),
        ([HEAD + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n"], [0]),
    ],
    ids=["long heads", "long body", "chunks", "small chunks", "upgrade"],
)
def test_ordinary_requests_pass(requests, bodies):
    async def talk(reader, writer, connections):
        found = []
        for request in requests:
            writer.write(request)
            found.append(await response_of(reader))
        return found

    assert connected(talk) == [(200, str(length).encode()) for length in bodies]


@pytest.mark.parametrize("num_requests", [50, 100_000])
def test_requests_that_wait_for_the_answers_of_others_are_few(num_requests):
    """Each costs a hundred times the bytes of its head."""

    async def talk(reader, writer, connections):
        found, most = [], 0
        try:
            for _ in range(num_requests // 50):
                writer.write((HEAD + b"\r\n") * 50)
                await writer.drain()
                await asyncio.sleep(0)
                most = max(most, len(connections[0].pipeline) if connections else 0)
            found = [await response_of(reader) for _ in range(num_requests)]
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        return found, most

    found, most = connected(talk)
    assert found == ([(200, b"0")] * 50 if num_requests == 50 else [])
    assert most < 1000
