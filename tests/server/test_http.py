"""The HTTP application as a member of a service: request ids, the API key, limits of bodies, mounting, warm-up."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from fastapi import FastAPI

from specdec_fast.server.app import create_app
from support.asgi import Exchange, fetch

HI = {"prompt": "Hi"}


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


def test_the_api_key_guards_everything_but_health_and_metrics(engine):
    app = create_app(engine, api_key="sécret", max_request_bytes=100)

    async def main():
        keys = [None, "Bearer wrong", "sécret", "Bearer sécret", "bearer sécret", "Basic sécret", "Bearer sécre"]
        keys += ["Bearer sécrets", "Bearer", "Bearer "]
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
    assert [exchange.status for exchange in found] == [401, 401, 401, 200, 200, 401, 401, 401, 401, 401]
    assert found[0].json["error"]["code"] == "invalid_api_key"
    assert found[0].headers["www-authenticate"] == "Bearer"
    assert docs.status == 401
    assert (health.status, metrics.status) != (401, 401)
    assert large.status == 401, "nothing of a body is read without the key"


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/demo", "/v1/models/x"])
def test_head_is_answered_as_get(app, path):
    """Load balancers look at /health with HEAD; whatever serves the application leaves the body out."""

    async def main():
        head = Exchange(app, path)
        head.scope["method"] = "HEAD"
        return await head(), await fetch(app, path), await fetch(app, "/openapi.json")

    head, get, schema = asyncio.run(main())
    assert head.headers["content-type"] == get.headers["content-type"]
    assert head.status == get.status or {head.status, get.status} == {200, 503}, "the engine is warm by now"
    assert schema.status == 200


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
