"""The command ``serve`` in this process: its steps wait for the test, so that no speed decides what is under way."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx
import pytest

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.cli import main
from specdec_fast.commands import serve
from specdec_fast.service import async_engine
from support.grids import grid
from support.services import Gate, vacant

PROMPT = "Once upon a time"
FIELDS = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 40, "return_token_ids": True}


class Served:
    """A server of this process, for the thread of its clients.

    Attributes:
        engine: its asynchronous engine.
        gate: holds the engine's steps; made when the server is warm.
        address, url: where it listens.
        client: an HTTP client without limits.
        has_ended: the server is gone.

    """

    def __init__(self, engine, listener):
        self.engine, self.gate, self.has_ended = engine, None, False
        self.address = listener.getsockname()
        self.url = "http://{}:{}".format(*self.address)
        unlimited = httpx.Limits(max_connections=None)
        self.client = httpx.Client(base_url=self.url, timeout=None, limits=unlimited, trust_env=False)
        self._is_asked_to_end = False

    def wait_until(self, condition):
        while not condition():
            assert not self.has_ended
            time.sleep(0.002)

    def num_requests(self):
        stats = self.engine.stats()
        return stats.num_running + stats.num_waiting

    def is_warm(self):
        try:
            return self.client.get("/health").status_code == 200
        except httpx.ConnectError:
            return False

    def terminate(self):
        """Send SIGTERM, once: nobody handles it when the command has returned."""
        if not self._is_asked_to_end:
            self._is_asked_to_end = True
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def run_server(monkeypatch):
    """Return a function that runs the command, and ``use(served)`` in another thread, and returns what that returns."""
    serve_application = serve._serve
    prepared = []

    def prepare(engine):
        prepared.append(engine)

    def used(served, use):
        try:
            with served.client:
                served.wait_until(served.is_warm)
                served.wait_until(lambda: prepared == [served.engine.engine])
                served.gate = Gate(monkeypatch, served.engine)
                return use(served)
        finally:
            if served.gate is not None:
                served.gate.open()
            served.terminate()

    def run(use):
        servers, results = [], []

        async def observed(app, engine, listener, args):
            servers.append(Served(engine, listener))
            results.append(threads.submit(used, servers[0], use))
            await serve_application(app, engine, listener, args)

        monkeypatch.setattr(serve, "_serve", observed)
        monkeypatch.setattr(sd.Engine, "prepare_structured_outputs", prepare)
        pair = demo_pair()
        options = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--dtype", "float32"]
        options += ["--port", "0", "--batch-size", "4", "--shutdown-timeout", "36000"]
        with ThreadPoolExecutor(1) as threads:
            try:
                assert main(["serve", *options]) == 0
            finally:
                for served in servers:
                    served.has_ended = True
            return results[0].result()

    return run


def answer_of(response):
    """Return the status of a response, its token ids and how it finished, streamed or not."""
    if response.status_code != 200:
        return response.status_code, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        choice = response.json()["choices"][0]
        return 200, choice["token_ids"], choice["finish_reason"]
    *lines, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    return 200, [token for choice in choices for token in choice["token_ids"]], choices[-1]["finish_reason"]


def test_sigterm_finishes_what_is_under_way_and_refuses_the_rest(run_server, target):
    """No request can end before the signal, and none before a later one is refused."""
    num_requests = 12

    def use(served):
        def complete(i):
            return served.client.post("/v1/completions", json=FIELDS | {"stream": i % 2 == 0})

        with ThreadPoolExecutor(num_requests) as threads:
            responses = threads.map(complete, range(num_requests))
            try:
                served.wait_until(lambda: served.num_requests() == num_requests)
                served.terminate()
                served.wait_until(lambda: served.engine.is_closed)
                time.sleep(0.5)  # uvicorn stops listening within 0.1 s of should_exit
                late, health = complete(0), served.client.get("/health")
                assert served.num_requests() == num_requests, "all of them are under way"
            finally:
                served.gate.open()
            return [answer_of(response) for response in responses], late, health, served.url

    answers, late, health, url = run_server(use)
    params = sd.SamplingParams(max_new_tokens=FIELDS["max_tokens"], ignore_eos=True)
    expected = sd.Engine(target, None).generate(PROMPT, params)[0].token_ids
    assert answers == [(200, expected, "length")] * num_requests
    assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_closed")
    assert (health.status_code, health.json()) == (503, {"status": "closing"})
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False)


@pytest.mark.parametrize("num_steps", grid({"before the first token": 0, "in the middle": 20}, keep=["in the middle"]))
def test_a_connection_that_is_cut_cancels_its_request(run_server, num_steps):
    """A step emits five tokens of a choice at most, so 20 steps do not end it, and it can only be cancelled."""
    body = json.dumps(FIELDS | {"max_tokens": 450, "stream": True, "n": 8}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

    def use(served):
        with socket.create_connection(served.address) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            served.wait_until(lambda: served.num_requests() == 8)
            if num_steps:
                served.gate.permits.release(num_steps)
                assert connection.recv(10) == b"HTTP/1.1 2"
            assert served.num_requests() == 8
        served.wait_until(lambda: served.num_requests() == 0)
        assert served.gate.num_steps <= num_steps
        served.gate.open()
        served.wait_until(lambda: vacant(served.engine))
        return served.client.post("/v1/completions", json=FIELDS).status_code

    assert run_server(use) == 200


def end_twice(served):
    """Send two signals, the second when the first is handled."""
    served.terminate()
    served.wait_until(lambda: served.engine.is_closed)
    os.kill(os.getpid(), signal.SIGINT)


def test_a_second_signal_ends_the_process_during_a_step_that_does_not_end(run_server, monkeypatch):
    statuses, has_left = [], Event()
    monkeypatch.setattr(serve, "_LAST_SECONDS", 0.01)
    monkeypatch.setattr(serve, "_leave", lambda status: (statuses.append(status), has_left.set()))

    def use(served):
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(served.client.post, "/v1/completions", json=FIELDS)
            try:
                served.gate.is_reached.wait()
                end_twice(served)
                has_left.wait()
            finally:
                served.gate.open()
            return answer.result().status_code

    assert run_server(use) == 503
    assert statuses == [1]


def test_a_tokenizer_that_does_not_end_keeps_no_client_waiting_and_no_process_alive(run_server, monkeypatch):
    statuses, may_encode = [], Event()
    monkeypatch.setattr(serve, "_leave", statuses.append)
    monkeypatch.setattr(serve, "_LAST_SECONDS", 36000.0)
    monkeypatch.setattr(async_engine, "_ENCODERS_SECONDS", 0.01)

    def use(served):
        is_encoding, encoders = Event(), served.engine._encoders

        def encode(*args):
            is_encoding.set()
            may_encode.wait()

        monkeypatch.setattr(served.engine._builder, "build", encode)
        with ThreadPoolExecutor(2) as threads:
            answers = [threads.submit(served.client.post, "/v1/completions", json=FIELDS) for _ in range(2)]
            is_encoding.wait()
            served.wait_until(lambda: served.num_requests() == 2)
            end_twice(served)
            return [answer.result().status_code for answer in answers], encoders.is_busy

    try:
        assert run_server(use) == ([503, 503], True)
        assert statuses == [0]
    finally:
        may_encode.set()
