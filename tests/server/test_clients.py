"""The command and the real ``openai`` client, synchronous and asynchronous; raw sockets; signals under load."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Literal

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.cli import main
from specdec_fast.commands import serve
from specdec_fast.server import app
from specdec_fast.server.app import create_app
from support.chats import HELLO, chat_tokenizer
from support.grids import grid
from support.source_tree import ROOT

KEY = "a key"
PROMPT = "Once upon a time"
FIELDS = {"model": "demo", "prompt": PROMPT, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The bundled target with a chat template."""
    path = tmp_path_factory.mktemp("model") / "target"
    shutil.copytree(demo_pair() / "target", path)
    chat_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=grid(["thread", "process"], keep=["thread"]))
def server(request, folder):
    """``specdec-fast serve``, in a thread of this process or in its own; ``url`` is where it listens."""
    options = ["--target", str(folder), "--draft", str(demo_pair() / "draft"), "--dtype", "float32", "--port", "0"]
    options += ["--served-model-name", "demo", "--max-waiting", "200", "--shutdown-timeout", "60", "--batch-size", "4"]
    options += ["--tool-call-parser", "hermes"]
    options.append("--no-access-log")  # nobody reads the pipes, which must not fill
    with (in_thread if request.param == "thread" else in_process)(options) as found:
        with httpx.Client() as client:
            while not is_ready(client, found.url):
                assert found.poll() is None
        yield found


@contextmanager
def in_process(options):
    environment = {**os.environ, "SPECDEC_API_KEY": KEY, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "specdec_fast", "serve", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            assert line.startswith("specdec-fast serve: http://127.0.0.1:"), line
            process.url = line.split()[-1].removesuffix("/v1")  # type: ignore[attr-defined]
            yield process
        finally:
            process.kill()


@contextmanager
def in_thread(options):
    """The start of a process takes most of the time of these tests. Only the main thread can handle signals."""
    serve_application = serve._serve
    starts = Queue()

    async def observed(app, engine, listener, args):
        task = asyncio.current_task()
        starts.put((listener.getsockname(), partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)))
        try:
            await serve_application(app, engine, listener, args)
        finally:
            await engine.close()

    def run():
        try:
            with suppress(asyncio.CancelledError):
                main(["serve", *options, "--api-key", KEY])
        finally:
            starts.put(None)  # nobody waits for what failed to start

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as threads:
        patch.setattr(serve, "_SIGNALS", ())
        patch.setattr(serve, "_serve", observed)
        patch.setattr(serve, "_not_collected", nullcontext)
        end = threads.submit(run)
        start = starts.get()
        if start is None:
            end.result()
        (host, port), cancel = start
        try:
            yield SimpleNamespace(url=f"http://{host}:{port}", poll=lambda: end.done() or None)
        finally:
            cancel()


def is_ready(client, url):
    try:
        return client.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=None) as found:
        yield found


@pytest.fixture(scope="module")
def reference(folder):
    """What an engine of this process makes of a prompt, greedily."""
    engine = sd.Engine(str(folder), None, dtype="float32")

    def generate(prompt, max_new_tokens=16, **params):
        return engine.generate([prompt], sd.SamplingParams(max_new_tokens=max_new_tokens, **params), progress=False)[0]

    return generate


def metric(server, name, **labels):
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=None).text)
    samples = (sample for family in families for sample in family.samples if sample.name == f"specdec_fast:{name}")
    return next(sample.value for sample in samples if labels.items() <= sample.labels.items())


@pytest.mark.grid
def test_the_streaming_client_of_the_examples(server, reference):
    example = runpy.run_path(str(ROOT / "examples" / "streaming_client.py"))
    answers = example["main"](["--url", f"{server.url}/v1", "--api-key", KEY])
    assert answers == [reference(prompt, 40).text for prompt in example["PROMPTS"]]


def test_completions_of_the_synchronous_client(client, reference):
    assert [model.id for model in client.models.list()] == ["demo"]
    expected = reference(PROMPT, logprobs=True)
    answer = client.completions.create(**FIELDS, logprobs=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, expected.finish_reason)
    assert answer.choices[0].logprobs.token_logprobs == expected.logprobs
    assert answer.usage.completion_tokens == len(expected.token_ids)
    echo = client.completions.create(**FIELDS, logprobs=1, echo=True, max_tokens=0).choices[0]
    assert (echo.text, echo.logprobs.token_logprobs[0], echo.logprobs.top_logprobs[0]) == (PROMPT, None, None)
    scored = reference(PROMPT, prompt_logprobs=1)
    assert echo.logprobs.token_logprobs == scored.prompt_logprobs
    stream = client.completions.create(**FIELDS, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected.text
    assert chunks[-1].usage.total_tokens == len(expected.prompt_ids) + len(expected.token_ids)


def test_chats_of_the_synchronous_client(client, reference):
    ids = chat_tokenizer().apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    expected = reference(ids, 20)
    fields = {"model": "demo", "messages": HELLO, "temperature": 0, "max_completion_tokens": 20}
    answer = client.chat.completions.create(**fields, logprobs=True, extra_body={"return_token_ids": True})
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].token_ids == expected.token_ids
    assert len(answer.choices[0].logprobs.content) == len(expected.token_ids)
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason


def test_errors_of_the_client(client, server):
    for error, fields in (
        (openai.NotFoundError, FIELDS | {"model": "gpt-4"}),
        (openai.BadRequestError, FIELDS | {"temperature": -1}),
        (openai.BadRequestError, FIELDS | {"logprobs": 21}),
        (openai.BadRequestError, FIELDS | {"prompt": "word " * 4000}),
    ):
        with pytest.raises(error) as caught:
            client.completions.create(**fields)
        assert caught.value.body["message"]
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with other, pytest.raises(openai.AuthenticationError):
        other.models.list()


def test_the_asynchronous_client(server, reference):
    prompts = [f"The {i} little dogs" for i in range(12)]

    async def complete(client, prompt, stream):
        answer = await client.completions.create(**FIELDS | {"prompt": prompt}, stream=stream)
        if not stream:
            return answer.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in answer])

    async def main():
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=None) as client:
            return await asyncio.gather(*(complete(client, prompt, i % 2 == 0) for i, prompt in enumerate(prompts)))

    assert asyncio.run(main()) == [reference(prompt).text for prompt in prompts]


def raw_request(server, body, length=None):
    """Open a connection and send a request for completions."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    )
    length = f"Content-Length: {len(body)}" if length is None else length
    with suppress(ConnectionError):  # the server may have answered and closed before all is sent
        connection.sendall(f"{head}{length}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize(
    ("body", "length", "status"),
    [
        (b'{"prompt": "\xff"}', None, b"400"),
        (b'{"prompt": ', None, b"400"),
        (b"", "Content-Length: 99999999999", b"413"),
        (b"5\r\nhello\r\n" + b"400001\r\n" + b"x" * 0x400001 + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked", b"413"),
    ],
    ids=["not UTF-8", "not JSON", "declared too long", "too long in chunks"],
)
def test_bytes_that_no_client_should_send(server, body, length, status):
    with raw_request(server, body, length) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 " + status)


def test_headers_without_an_end_are_not_kept(server):
    """With no key; ``test_connections.py`` has other ways to send too much."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Long: ".ljust((64 << 10) + 1, b"a"))
        assert connection.recv(100).startswith(b"HTTP/1.1 431 ")


def test_head_has_no_body(server):
    for path in ("/health", "/metrics"):
        response = httpx.head(f"{server.url}{path}", timeout=None)
        assert (response.status_code, response.content) == (200, b"")


def test_a_client_that_does_not_read_delays_nobody(server, client, reference):
    body = FIELDS | {"max_tokens": 450, "ignore_eos": True, "stream": True, "logprobs": 0, "n": 8}
    with raw_request(server, json.dumps(body).encode()) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        assert client.completions.create(**FIELDS).choices[0].text == reference(PROMPT).text
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(1 << 16)
    events = [line[6:] for line in received.decode().split("\n") if line.startswith("data: {")]
    tokens = [len(c["logprobs"]["tokens"]) for e in events for c in json.loads(e)["choices"] if c["index"] == 3]
    assert sum(tokens) == 450


class Egg(BaseModel):
    """An egg."""

    size: Literal["S", "M", "L"]
    fresh: bool


@pytest.mark.grid
def test_answers_that_follow_a_pydantic_model(client):
    pytest.importorskip("xgrammar")
    request = {"model": "demo", "messages": HELLO, "temperature": 0, "max_tokens": 300}
    parsed = client.chat.completions.parse(response_format=Egg, **request)
    assert isinstance(parsed.choices[0].message.parsed, Egg)
    tools = {"tools": [openai.pydantic_function_tool(Egg)], "tool_choice": "required", "parallel_tool_calls": False}
    called = client.chat.completions.parse(**request, **tools)
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Egg)
    with client.chat.completions.stream(**request, **tools) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    (call,) = final.choices[0].message.tool_calls
    assert call.function.parsed_arguments == called.choices[0].message.tool_calls[0].function.parsed_arguments


def test_a_schema_that_cannot_be_served_is_a_bad_request(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="demo", messages=HELLO, extra_body={"structured_outputs": {"json": {"items": {"type": "x"}}}}
        )
    assert caught.value.param == "structured_outputs"
    assert "#/items/type" in str(caught.value)


@pytest.mark.skipif("CLIENTS_PYTHON" not in os.environ, reason="make test-clients installs the clients of others")
def test_other_clients(server):
    """``instructor``, ``litellm`` and ``langchain-openai``, in an environment of their own."""
    command = [os.environ["CLIENTS_PYTHON"], str(ROOT / "tests/support/other_clients.py"), f"{server.url}/v1", KEY]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(found.stdout.splitlines()[-1]) == {}


@pytest.mark.skipif(
    not Path(os.environ.get("CLIENTS_NODE_MODULES", "/missing")).is_dir(),
    reason="make test-clients installs openai from npm, where there is npm",
)
def test_the_client_of_npm(server):
    """``openai`` for JavaScript: whole answers, streams, schemas, tools, errors."""
    command = ["node", str(ROOT / "tests/support/openai_client.cjs"), f"{server.url}/v1", KEY]
    environment = {**os.environ, "NODE_PATH": os.environ["CLIENTS_NODE_MODULES"]}
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment)
    assert json.loads(found.stdout.splitlines()[-1]) == {}


@pytest.mark.skipif("CLIENTS_PYTHON" not in os.environ, reason="make test-clients installs the clients of others")
def test_lm_eval_reads_the_log_probabilities_of_transformers(server, folder, tmp_path):
    """``lm-eval --model local-completions``: texts of tasks are scored, with an echo, and continued."""
    tasks = ROOT / "tests/support/lm_eval_tasks"
    arguments = f"base_url={server.url}/v1/completions,model=demo,tokenizer={folder},num_concurrent=3"
    command = [os.environ["CLIENTS_PYTHON"], "-m", "lm_eval", "--model", "local-completions", "--include_path", "."]
    command += ["--model_args", arguments, "--tasks", "endings,continuations", "--batch_size", "2"]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    subprocess.run(command, check=True, timeout=300, env=environment, cwd=tasks)  # the tasks name files beside them
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def samples(task):
        (path,) = (tmp_path / "out").rglob(f"samples_{task}_*.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]

    def encoded(text):  # as lm-eval does, without BOS
        return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    def scored(model, context, ending):
        ids = encoded(context + ending)
        logits = model(ids).logits[0, encoded(context).shape[1] - 1 : -1]
        ending_ids = ids[0, -len(logits) :]
        sums = logits.log_softmax(-1).gather(1, ending_ids[:, None]).sum().item()
        return sums, bool((logits.argmax(-1) == ending_ids).all())

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = [tuple(pair.values()) for sample in samples("endings") for pair in sample["arguments"].values()]
    found = [each for sample in samples("endings") for each in sample["filtered_resps"]]
    with torch.inference_mode():
        expected = [scored(model, *pair) for pair in asked]
        for sample in samples("continuations"):
            prompt = encoded(sample["doc"]["story"])
            ids = model.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :]
            assert sample["resps"] == [[tokenizer.decode(ids, skip_special_tokens=True).partition(".")[0]]]
        exact = [scored(model.double(), *pair)[0] for pair in asked]
    error = max(abs(single - double) for (single, _), double in zip(expected, exact, strict=True))
    assert len(asked) == 15
    assert [is_greedy == "True" for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    assert max(abs(float(sums) - double) for (sums, _), double in zip(found, exact, strict=True)) <= 2 * error


@pytest.mark.parametrize("server", grid(["process"], keep=[]), indirect=True)
def test_sigterm_under_load_finishes_the_requests(server, reference):
    """The last test of this file, because the process is gone after it; some requests may have ended at the signal."""
    fields = FIELDS | {"max_tokens": 300, "ignore_eos": True}
    expected = reference(PROMPT, 300, ignore_eos=True).text

    def complete(stream):
        response = client.post(f"{server.url}/v1/completions", json=fields | {"stream": stream})
        if not stream:
            return response.json()["choices"][0]["text"]
        events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
        return "".join(event["choices"][0]["text"] for event in events)

    def num_ended():
        return metric(server, "request_success_total", finished_reason="length")

    def num_accepted():
        """What ends between the two readings is not counted, so that this is never too large."""
        ended = num_ended()
        return ended + metric(server, "num_requests_running") + metric(server, "num_requests_waiting")

    headers, unlimited = {"Authorization": f"Bearer {KEY}"}, httpx.Limits(max_connections=None)
    with httpx.Client(headers=headers, limits=unlimited, timeout=None) as client, ThreadPoolExecutor(20) as threads:
        assert complete(False) == expected  # what ended before it is counted
        num_before = num_ended()
        answers = [threads.submit(complete, i % 2 == 0) for i in range(20)]
        while num_accepted() < num_before + 20:
            assert all(answer.result() == expected for answer in answers if answer.done())
        server.send_signal(signal.SIGTERM)
        assert [answer.result() for answer in answers] == [expected] * 20
    assert server.wait() == 0
    assert b"Traceback" not in server.stdout.read() + server.stderr.read()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_a_chat_template_of_its_own(folder, tmp_path, monkeypatch):
    """It is that of all requests, instead of the tokenizer's."""
    (tmp_path / "template").write_text("{{ messages[0].content }}")
    ids = []

    async def answered(app, engine, listener, args):
        ids.append((await engine.generate(HELLO, sd.SamplingParams(max_new_tokens=1))).prompt_ids)
        await engine.close()

    monkeypatch.setattr(serve, "_serve", answered)
    options = ["--target", str(folder), "--draft", "none", "--port", "0"]
    assert main(["serve", *options, "--chat-template", str(tmp_path / "template")]) == 0
    assert ids == [chat_tokenizer()(HELLO[0]["content"], add_special_tokens=False).input_ids]


@pytest.mark.parametrize(("choice", "temperature"), [("auto", 0.6), ("openai", 1.0)])
def test_sampling_parameters_that_a_request_leaves_out(folder, tmp_path, monkeypatch, choice, temperature):
    target = shutil.copytree(folder, tmp_path / "target")
    (target / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6}))
    used = []

    async def served(app, engine, listener, args):
        await engine.close()

    def noted(engine, *, default_params, **options):
        used.append(default_params)
        return create_app(engine, default_params=default_params, **options)

    monkeypatch.setattr(serve, "_serve", served)
    monkeypatch.setattr(app, "create_app", noted)
    options = ["--draft", "none", "--port", "0", "--generation-config", choice, "--max-new-tokens", "9"]
    assert main(["serve", "--target", str(target), *options]) == 0
    assert used == [sd.SamplingParams(9, temperature=temperature)]


def test_without_the_extra_the_command_says_so(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "specdec_fast.server.app", None)
    assert main(["serve", "--target", str(folder), "--draft", "none", "--port", "0"]) == 2
    assert "pip install '.[serve]'" in capsys.readouterr().err
