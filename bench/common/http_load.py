"""The HTTP server in this process's event loop, and clients for it in a process of their own."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any

from bench.common.http_clients import ABANDONED
from bench.common.load import LOOK_SECONDS, Load, watched_loop
from bench.common.workload import Workload
from specdec_fast import AsyncEngine


class HTTPClients:
    """Clients of an HTTP server for an engine, in a process of their own; for an ``async with`` block."""

    def __init__(
        self,
        engine: AsyncEngine,
        workload: Workload,
        expected: list[list[int]],
        num_clients: int,
        stream_interval: int,
    ) -> None:
        import uvicorn  # of the extra "serve"

        from specdec_fast.server.app import create_app

        self._expected = expected
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=num_clients)
        app = create_app(engine, stream_interval=stream_interval)
        config = uvicorn.Config(app, log_level="warning", access_log=False)
        self._server = uvicorn.Server(config)
        settings: dict[str, Any] = {"port": self._socket.getsockname()[1], "num_clients": num_clients}
        fields = {"max_tokens": workload.max_new_tokens, "temperature": 0, "stream": True, "return_token_ids": True}
        self._settings = settings | {"prompts": workload.prompts, "fields": fields}

    async def __aenter__(self) -> HTTPClients:
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        while not self._server.started:
            await asyncio.sleep(LOOK_SECONDS)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.should_exit = True
        await self._task

    async def run(self, seconds: float = 0.0) -> Load:
        """Stream every prompt once; or for some seconds, while some clients leave and others read slowly."""
        load = Load()
        pauses: list[float] = []
        times: list[float] = []
        async with watched_loop(pauses, times):
            found = await run_clients(self._settings | {"seconds": seconds})
        # The start of the clients, and reading what they found, are no part of the load.
        begins, ends = found["started"], found["started"] + found["seconds"]
        load.pauses = [late for late, time in zip(pauses, times, strict=True) if begins <= time <= ends]
        load.first, load.each, load.seconds = found["first"], found["each"], found["seconds"]
        load.num_tokens, load.num_ended = sum(map(len, found["tokens"])), len(found["numbers"])
        load.num_hung = found["num_hung"]
        for number, tokens in zip(found["numbers"], found["tokens"], strict=True):
            own = self._expected[number % len(self._expected)]
            may_be_cut = seconds and number % ABANDONED == 0
            load.num_wrong += tokens != (own[: len(tokens)] if may_be_cut else own)
        return load


async def run_clients(settings: dict[str, Any]) -> dict[str, Any]:
    """Run ``bench.common.http_clients`` with its settings; return what it found."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "bench.common.http_clients"]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    printed, _ = await process.communicate(json.dumps(settings).encode())
    if process.returncode:
        sys.exit("the clients failed; see above.")
    found: dict[str, Any] = json.loads(printed)
    return found
