"""The HTTP application in its own event loop: every answer has the engine's tokens, and errors are OpenAI's."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from fastapi import FastAPI

import specdec_fast as sd
from specdec_fast.server.app import create_app
from specdec_fast.server.protocol import RequestBody
from support.asgi import Exchange, fetch
from support.chats import HELLO

MODEL = "demo"
PROMPTS = ["Once upon a time", "The little dog", [41, 84, 90]]


@pytest.fixture(scope="module")
def app(engine):
    return create_app(engine, model_names=[MODEL, "other-name"], default_max_tokens=12)


def served(app, *requests):
    """Send requests (path, body) at the same time and return their exchanges."""

    async def main():
        return await asyncio.gather(*(fetch(app, path, body) for path, body in requests))

    return asyncio.run(main())


def reference(engine, prompt, **params):
    return engine.engine.generate([prompt], sd.SamplingParams(**{"max_new_tokens": 16, **params}), progress=False)[0]


def streamed(exchange):
    """Return the texts, token ids and finish reasons of a stream's choices, and its usage."""
    *events, done = exchange.events
    assert done == "[DONE]"
    found, usage = {}, None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            before = found.get(choice["index"], ("", [], None))
            ids = before[1] + choice.get("token_ids", [])
            found[choice["index"]] = (before[0] + text, ids, choice["finish_reason"])
    return [found[index] for index in sorted(found)], usage


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"temperature": 0}, {}),
        ({"temperature": 0, "max_tokens": 5, "num_draft_tokens": 0}, {"max_new_tokens": 5}),
        ({"temperature": 0.9, "seed": 3, "top_p": 0.9, "top_k": 50}, {"temperature": 0.9, "top_p": 0.9, "top_k": 50}),
        ({"temperature": 0, "stop": [" the", "."], "max_tokens": 40}, {"stop": (" the", "."), "max_new_tokens": 40}),
        ({"temperature": 0, "logprobs": 0, "ignore_eos": True}, {"logprobs": True, "ignore_eos": True}),
    ],
    ids=["greedy", "short", "sampled", "stop", "logprobs"],
)
def test_completions_have_the_tokens_of_the_engine(app, engine, fields, params, stream):
    body = {"model": MODEL, "prompt": PROMPTS[:2], "return_token_ids": True, **fields, "n": 2}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    (exchange,) = served(app, ("/v1/completions", body))
    assert exchange.status == 200
    seeds = [fields.get("seed"), fields.get("seed", 0) + 1] if "seed" in fields else [None, None]
    expected = [reference(engine, prompt, **params, seed=seed) for prompt in PROMPTS[:2] for seed in seeds]
    if stream:
        assert exchange.headers["content-type"].startswith("text/event-stream")
        choices, usage = streamed(exchange)
    else:
        choices = [(c["text"], c["token_ids"], c["finish_reason"]) for c in exchange.json["choices"]]
        usage = exchange.json["usage"]
        if params.get("logprobs"):
            assert [c["logprobs"]["token_logprobs"] for c in exchange.json["choices"]] == [o.logprobs for o in expected]
    assert choices == [(o.text, o.token_ids, o.finish_reason) for o in expected]
    assert usage["completion_tokens"] == sum(len(o.token_ids) for o in expected)
    assert usage["prompt_tokens"] == sum(len(o.prompt_ids) for o in expected[::2])


@pytest.mark.parametrize("stream", [False, True])
def test_chats_have_the_tokens_of_the_template(app, engine, chat_tokens, stream):
    ids = chat_tokens.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False, think=1)
    body = {"messages": HELLO, "temperature": 0, "chat_template_kwargs": {"think": 1}, "return_token_ids": True}
    (exchange,) = served(app, ("/v1/chat/completions", body | {"stream": stream}))
    expected = reference(engine, ids, max_new_tokens=12)
    if stream:
        ((text, tokens, reason),), _ = streamed(exchange)
        assert exchange.events[0]["choices"][0]["prompt_token_ids"] == ids
    else:
        (choice,) = exchange.json["choices"]
        text, tokens, reason = choice["message"]["content"], choice["token_ids"], choice["finish_reason"]
        assert choice["prompt_token_ids"] == ids
    assert (text, tokens, reason) == (expected.text, expected.token_ids, expected.finish_reason)


def test_a_stream_interval_makes_fewer_events_of_the_same_tokens(make_engine):
    engine = make_engine(num_draft_tokens=0)
    body = {"prompt": PROMPTS[:2], "max_tokens": 50, "ignore_eos": True, "temperature": 0, "stream": True}
    for interval in (1, 20):
        app = create_app(engine, stream_interval=interval)
        (exchange,) = served(app, ("/v1/completions", body | {"return_token_ids": True}))
        choices, _ = streamed(exchange)
        expected = [reference(engine, prompt, max_new_tokens=50, ignore_eos=True) for prompt in PROMPTS[:2]]
        assert [choice[:2] for choice in choices] == [(o.text, o.token_ids) for o in expected]
    sizes = [len(choice["token_ids"]) for event in exchange.events[:-1] for choice in event["choices"]]
    assert len([size for size in sizes if size < 20]) <= 4, "the first and the last of each choice"


def test_many_requests_at_once_are_answered_as_if_alone(app, engine, prompts):
    bodies = [{"prompt": prompt, "temperature": 0, "stream": i % 2 == 0} for i, prompt in enumerate(prompts)]
    exchanges = served(app, *(("/v1/completions", body | {"return_token_ids": True}) for body in bodies))
    outputs = engine.engine.generate(prompts, sd.SamplingParams(max_new_tokens=16), progress=False)
    for i, (exchange, output) in enumerate(zip(exchanges, outputs, strict=True)):
        ids = streamed(exchange)[0][0][1] if i % 2 == 0 else exchange.json["choices"][0]["token_ids"]
        assert ids == output.token_ids


def test_models_are_listed_by_name(app):
    listed, one, other, unknown = served(
        app, ("/v1/models", None), ("/v1/models/demo", None), ("/v1/models/other-name", None), ("/v1/models/x/y", None)
    )
    assert [card["id"] for card in listed.json["data"]] == [MODEL, "other-name"]
    assert one.json == listed.json["data"][0]
    assert other.json["root"] == MODEL
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")
    (exchange,) = served(app, ("/v1/completions", {"model": "other-name", "prompt": "Hi"}))
    assert (exchange.status, exchange.json["model"]) == (200, "other-name")


HI = {"prompt": "Hi"}


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        (b'{"prompt": "Hi"', 400, None, "not valid JSON"),
        (b'{"prompt": "\xff\xfe"}', 400, None, "pars"),
        (b'{"prompt": "\\ud800"}', 400, None, "cannot encode"),
        (b"[" * 100_000, 400, None, "pars"),
        (b"", 400, None, "not a JSON object"),
        (b"5", 400, None, "not a JSON object"),
        ({"prompt": "Hi", "model": "gpt-4"}, 404, "model", "'gpt-4' does not exist; expected one of 'demo'"),
        ({"prompt": "Hi", "temperature": "hot"}, 400, "temperature", "'hot': .*valid number"),
        ({"prompt": "Hi", "temperature": -1}, 400, "temperature", "expected 0"),
        ({"prompt": "Hi", "top_p": 0}, 400, "top_p", "expected"),
        ({"prompt": "Hi", "stop": [""]}, 400, "stop", "non-empty"),
        ({"prompt": "Hi", "seed": 2**63}, 400, "seed", "expected an integer"),
        ({"prompt": "Hi", "num_draft_tokens": 50}, 400, None, "drafts at most 5"),
        ({"prompt": [10**9]}, 400, None, "outside the target's vocabulary"),
        ({"prompt": [[]]}, 400, None, "no tokens"),
        ({"prompt": "word " * 5000}, 400, None, "has 512 positions"),
        ({"prompt": ["Hi"] * 300, "n": 2}, 400, None, "600 choices in one request"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests_get_openais_errors(app, body, status, param, message, stream):
    if isinstance(body, dict):
        body = body | {"stream": stream}
    (exchange,) = served(app, ("/v1/completions", body))
    error = exchange.json["error"]
    assert (exchange.status, error["type"], error["param"]) == (status, "invalid_request_error", param)
    with pytest.raises(ValueError, match=message):
        raise ValueError(error["message"])


def test_too_many_choices_are_refused_before_any_is_made(app, monkeypatch):
    monkeypatch.setattr(RequestBody, "requests", None)
    (exchange,) = served(app, ("/v1/completions", {"prompt": ["a"] * 10_000, "n": 32}))
    assert exchange.status == 400
    assert "320000 choices in one request; the server takes" in exchange.json["error"]["message"]


def test_wrong_messages_get_openais_errors(app):
    wrong = (
        [{"role": "user"}],
        [{"role": "error", "content": "x"}],
        [{"role": "user", "content": [{"type": "image"}]}],
    )
    for exchange in served(app, *(("/v1/chat/completions", {"messages": messages}) for messages in wrong)):
        assert exchange.status == 400
        assert exchange.json["error"]["type"] == "invalid_request_error"


def test_paths_and_methods_that_do_not_exist(app):
    missing, method = served(app, ("/v1/embeddings", {}), ("/v1/completions", None))
    assert (missing.status, method.status) == (404, 405)
    assert missing.json["error"]["message"] == "Not Found"
    assert method.json["error"]["message"] == "Method Not Allowed"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "\xff"}', "can't decode byte 0xff"),
        (b"[" * 50_000, "recursion"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "4300 digits"),
    ],
    ids=["not UTF-8", "too deep", "too many digits"],
)
def test_a_body_that_no_parser_reads_gets_the_reason(app, body, message):
    exchange = asyncio.run(fetch(app, "/v1/completions", body))
    assert exchange.status == 400
    found = exchange.json["error"]["message"]
    assert found.startswith("the body is not JSON that can be read: ")
    assert message in found


def test_a_body_of_another_content_type_is_refused(app):
    async def main():
        return await fetch(app, "/v1/completions", b'{"prompt": "Hi"}', {"content-type": "text/plain"})

    exchange = asyncio.run(main())
    assert (exchange.status, "application/json" in exchange.json["error"]["message"]) == (400, True)


def test_every_response_has_a_request_id(app):
    async def main():
        own = await fetch(app, "/v1/completions", HI, {"X-Request-Id": "mine-7"})
        bad = await fetch(app, "/v1/completions", HI, {"X-Request-Id": "a b" + "c" * 200})
        missing = await fetch(app, "/nothing")
        return own, bad, missing

    own, bad, missing = asyncio.run(main())
    assert own.headers["x-request-id"] == "mine-7"
    assert own.json["id"] == "cmpl-mine-7"
    assert len({len(one.headers["x-request-id"]) for one in (bad, missing)}) == 1
    assert bad.headers["x-request-id"] != missing.headers["x-request-id"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"model_names": "qwen"}, r"model_names='qwen' is one string; .* \['qwen'\]"), ({"timeout": "5"}, "timeout='5'")],
    ids=str,
)
def test_wrong_settings_of_an_application(engine, wrong, message):
    with pytest.raises(sd.ConfigError, match=message):
        create_app(engine, **wrong)


def test_the_api_key_guards_everything_but_health_and_metrics(engine):
    app = create_app(engine, api_key="sécret", max_request_bytes=100)

    async def main():
        keys = [None, "Bearer wrong", "sécret", "Bearer sécret", "Bearer sécre", "Bearer sécrets"]
        found = []
        for key in keys:
            exchange = Exchange(app, "/v1/models")
            exchange.scope["headers"] += [(b"authorization", key.encode())] if key else []
            found.append(await exchange())
        return (
            found,
            [await fetch(app, path) for path in ("/docs", "/health", "/metrics")],
            await fetch(app, "/v1/completions", b"x" * 1000),
        )

    found, (docs, health, metrics), large = asyncio.run(main())
    assert [exchange.status for exchange in found] == [401, 401, 401, 200, 401, 401]
    assert found[0].json["error"]["code"] == "invalid_api_key"
    assert found[0].headers["www-authenticate"] == "Bearer"
    assert docs.status == 401
    assert (health.status, metrics.status) != (401, 401)
    assert large.status == 401, "nothing of a body is read without the key"


@pytest.mark.parametrize(
    ("length", "status"),
    [(b"\xb2", 200), (b"100", 200), (b"101", 413), (b"9" * 5000, 413), (b"0" * 5000 + b"7", 200)],
    ids=["superscript two", "the limit", "one more", "more digits than int() reads", "leading zeros"],
)
def test_the_declared_length_of_a_body(engine, length, status):
    app = create_app(engine, max_request_bytes=100)

    async def main():
        exchange = Exchange(app, "/v1/models")
        exchange.scope["headers"] = [(b"host", b"test"), (b"content-length", length)]
        return await exchange()

    assert asyncio.run(main()).status == status


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_beyond_the_limit_is_refused(engine, declared):
    app = create_app(engine, max_request_bytes=1000)
    body = json.dumps({"prompt": "a" * 2000}).encode()

    async def main():
        parts = body if declared else [body[:900], body[900:1500], body[1500:]]
        return await fetch(app, "/v1/completions", parts), await fetch(
            app, "/v1/completions", [b'{"prompt": ', b'"Hi"}']
        )

    exchange, fine = asyncio.run(main())
    assert (exchange.status, exchange.json["error"]["message"][:31]) == (413, "the body has more than 1000 byt")
    assert len(exchange.unread) == 1, "the rest is not read"
    assert fine.status == 200


def test_the_model_failing_is_the_servers_fault(make_engine, monkeypatch, caplog):
    engine = make_engine()
    app = create_app(engine)
    asyncio.run(fetch(app, "/v1/completions", HI))

    def fail(*args):
        raise ZeroDivisionError("a secret of the model")

    monkeypatch.setattr(engine.engine.target, "verify_step", fail)
    plain, stream = served(app, ("/v1/completions", HI), ("/v1/completions", HI | {"stream": True}))
    for exchange in (plain, stream):
        assert (exchange.status, exchange.json["error"]["type"]) == (500, "server_error")
        assert "secret" not in exchange.body.decode()
    assert "a secret of the model" in caplog.text


def test_an_unexpected_failure_is_a_response_too(engine, monkeypatch, caplog):
    app = create_app(engine)

    def fail(*args, **options):
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(engine, "generate", fail)
    (exchange,) = served(app, ("/v1/completions", HI))
    assert (exchange.status, "secret" in exchange.body.decode()) == (500, False)
    assert "x-request-id" in exchange.headers
    assert "a secret" in caplog.text


def test_the_application_can_be_mounted(engine):
    """Without its own start, the first look at /health makes the engine warm."""
    outer = FastAPI()
    outer.mount("/llm", create_app(engine, api_key="key"))

    async def main():
        transport = httpx.ASGITransport(app=outer)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            first = await client.get("/llm/health")
            while (await client.get("/llm/health")).status_code == 503:
                await asyncio.sleep(0.01)
            refused = await client.post("/llm/v1/completions", json=HI)
            headers = {"Authorization": "Bearer key"}
            return first, refused, await client.post("/llm/v1/completions", json=HI, headers=headers)

    first, refused, answered = asyncio.run(main())
    assert (first.status_code, first.json()["status"]) == (503, "warming up")
    assert (refused.status_code, answered.status_code) == (401, 200)


def test_a_warm_up_that_failed_is_logged_with_its_error(make_engine, caplog, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine.engine, "generate", lambda *_, **__: 1 / 0)

    async def main():
        app = create_app(engine)
        while (health := await fetch(app, "/health")).json["status"] == "warming up":
            await asyncio.sleep(0.01)
        return health

    health = asyncio.run(main())
    assert (health.status, health.json["status"]) == (503, "the warm-up failed; see the server's log")
    (record,) = [record for record in caplog.records if record.name == "specdec_fast.server"]
    assert record.exc_info[0] is ZeroDivisionError
