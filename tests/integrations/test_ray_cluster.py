"""Ray Data and Ray Serve on a local cluster, with a worker and a replica that are killed.

The cluster starts a dozen processes, which import much, so these tests are for ``make test-rest``.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import runpy
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from support.source_tree import ROOT

ray = pytest.importorskip("ray")
httpx = pytest.importorskip("httpx")

pytestmark = [
    pytest.mark.grid,
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20"),  # of Ray Serve's own fields
    pytest.mark.filterwarnings("ignore:coroutine .*__del__. was never awaited"),  # Ray Serve awaits it, Python cannot
]
PAIR = str(demo_pair() / "target"), str(demo_pair() / "draft")
NUM_CPUS = 6  # Ray counts them and uses none of them up: two workers or replicas, and what runs besides
BODY = {"model": "demo", "max_tokens": 30, "temperature": 0}
SOON_SECONDS = 60.0  # for what must happen, whenever the machine gets to it


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)  # or Ray would leave it at that
        ray.init(num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
        logging.getLogger("ray").setLevel(logging.ERROR)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def plain():
    return sd.Engine(PAIR[0], None)


def load(name):
    return runpy.run_path(str(ROOT / "examples" / name))


def mortal(folder):
    """Return a BatchGenerator of which one worker is killed when it has decoded its second batch, before it says so.

    The class belongs to this function, so that workers get its code and need not find this file.
    """
    from specdec_fast.integrations.ray import BatchGenerator

    class Mortal(BatchGenerator):
        num_calls = 0

        def __call__(self, batch):
            (folder / f"pid-{os.getpid()}").touch()
            found = super().__call__(batch)
            self.num_calls += 1
            if self.num_calls == 2:
                try:
                    (folder / "killed").touch(exist_ok=False)
                except FileExistsError:
                    return found
                os.kill(os.getpid(), signal.SIGKILL)
            return found

    return Mortal


def test_a_batch_job_survives_a_worker(tmp_path, prompts, plain, capsys):
    names = load("ray_batch.py")
    names["main"].__globals__["BatchGenerator"] = mortal(tmp_path)
    lines = [*prompts, ""]
    source, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    source.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    assert names["main"]([str(source), str(results), "--batch-size", "3"]) == 1  # the empty prompt
    found = [json.loads(line) for line in results.read_text().splitlines()]
    params = [names["sampling_params"]({"line": i}) for i in range(len(lines))]
    expected = plain.generate(lines, params, progress=False)
    assert [row["line"] for row in found] == list(range(len(lines)))
    assert [row["text"] for row in found] == [output.text for output in expected]
    assert [row["finish_reason"] for row in found] == [output.finish_reason for output in expected]
    assert (tmp_path / "killed").exists()
    assert len(list(tmp_path.glob("pid-*"))) > 1
    num_tokens = sum(len(output.token_ids) for output in expected)
    assert f"{len(lines)} rows, 1 failed, {num_tokens} tokens" in capsys.readouterr().out


def test_workers_compute_with_as_many_threads_as_they_have_cpus():
    class Threads:
        def __call__(self, batch):
            import torch

            return {"threads": [torch.get_num_threads()] * len(batch["id"])}

    strategy = ray.data.ActorPoolStrategy(size=1)
    for num_cpus in (1, 2):
        rows = ray.data.range(1).map_batches(Threads, num_cpus=num_cpus, compute=strategy).take_all()
        assert [row["threads"] for row in rows] == [num_cpus]


@pytest.fixture(scope="module")
def service():
    """A client of the example's service, and a handle to its replicas."""
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"port": port})
    handle = load("ray_serve.py")["deploy"]()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SOON_SECONDS) as client:
        yield client, handle
    serve.shutdown()


def test_replicas_answer_over_http(service, prompts, plain):
    client, _ = service
    expected = plain.generate(prompts[:6], sd.SamplingParams(max_new_tokens=30))
    bodies = [BODY | {"prompt": prompt} for prompt in prompts[:6]]
    with ThreadPoolExecutor(6) as threads:
        answers = threads.map(lambda body: client.post("/v1/completions", json=body), bodies)
        assert [answer.json()["choices"][0]["text"] for answer in answers] == [output.text for output in expected]
    with client.stream("POST", "/v1/completions", json=bodies[0] | {"stream": True}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert events.pop() == "[DONE]"
    texts = [json.loads(event)["choices"][0]["text"] for event in events]
    assert "".join(texts) == expected[0].text
    assert client.post("/v1/completions", json=BODY | {"prompt": ""}).status_code == 400
    assert client.get("/health").status_code == 200


def test_handles_generate_and_stream(service, prompts, plain):
    _, handle = service
    params = sd.SamplingParams(max_new_tokens=30, temperature=0.9, seed=5, logprobs=True)
    (expected,) = plain.generate(prompts[:1], params)
    output = handle.generate.remote(prompts[0], params).result()
    chunks = list(handle.options(stream=True).stream.remote(prompts[0], params))
    assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.token_ids
    with pytest.raises(sd.InvalidPromptError):
        handle.generate.remote("").result()


def test_a_killed_replica_is_replaced(service, prompts, plain):
    """Clients that try again get their answers; one replica is killed while they read."""
    client, _ = service
    expected = plain.generate(prompts, sd.SamplingParams(max_new_tokens=30), progress=False)
    before = replicas()
    assert len(before) == 2

    def complete(index):
        while True:
            try:
                answer = client.post("/v1/completions", json=BODY | {"prompt": prompts[index]})
                if answer.status_code == 200:
                    return answer.json()["choices"][0]["text"]
                assert answer.status_code >= 500, answer.text
            except httpx.TransportError:
                pass
            time.sleep(0.1)  # between two attempts

    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(complete, index) for index in range(4)]
        assert [answer.result() for answer in answers] == [output.text for output in expected[:4]]
        answers = [threads.submit(complete, index) for index in range(4, len(prompts))]
        ray.kill(ray.get_actor(min(before), namespace="serve"))
        assert [answer.result() for answer in answers] == [output.text for output in expected[4:]]
    deadline = time.monotonic() + SOON_SECONDS
    while len(now := replicas()) < 2 or min(before) in now:
        assert time.monotonic() < deadline, now
        time.sleep(0.1)


def replicas():
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in actors if "EngineDeployment" in actor["name"]}


def test_health_and_shutdown_of_a_replica(prompts, monkeypatch):
    from specdec_fast.integrations.ray import EngineDeployment

    async def run():
        kind = EngineDeployment.func_or_class
        replica = kind.__new__(kind)
        await replica.__init__(*PAIR, max_batch_size=2)
        await replica.check_health()

        chunks = replica.stream(prompts[0], sd.SamplingParams(max_new_tokens=400, ignore_eos=True))
        await anext(chunks)
        assert replica.engine.stats().num_running == 1
        with monkeypatch.context() as patch:  # a replica that has requests is not asked for another token
            patch.setattr(replica.engine, "generate", None)
            await replica.check_health()
        await chunks.aclose()  # as Ray Serve does when the caller leaves
        assert replica.engine.stats().num_running == replica.engine.stats().num_waiting == 0

        with monkeypatch.context() as patch:
            patch.setattr(replica.engine.engine.core, "step", None)
            with pytest.raises(sd.StepError):
                await replica.check_health()
        await replica.check_health()
        await replica.__del__()
        with pytest.raises(sd.EngineClosedError):
            await replica.check_health()
        with pytest.raises(sd.EngineClosedError):
            await replica.generate(prompts[0])

    asyncio.run(run())
    gc.collect()  # here, where the warning is ignored
