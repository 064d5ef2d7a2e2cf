"""Clients that leave, read slowly or come in a flood; deadlines, closing, health and metrics."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

import specdec_fast as sd
from specdec_fast.request import chat
from specdec_fast.server.app import create_app
from support.asgi import Exchange, fetch
from support.chats import HELLO, LOOP, TEMPLATE
from support.services import SOME_STEPS, Gate, num_served, until, vacant

LONG = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def tokens_of(exchange):
    return [token for event in exchange.events[:-1] for choice in event["choices"] for token in choice["token_ids"]]


def metrics_of(exchange):
    """Return the values of all metrics, by name and labels other than the model's."""
    families = text_string_to_metric_families(exchange.body.decode())
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
        found[(sample.name, *labels.values())] = sample.value
    return found


@pytest.mark.parametrize("kind", ["in the middle", "before the first token", "without a stream", "several choices"])
def test_a_client_that_leaves_frees_its_pages_within_a_step(make_engine, monkeypatch, kind):
    engine = make_engine(num_draft_tokens=0)
    app, gate = create_app(engine), Gate(monkeypatch, engine)

    async def main():
        num_choices = 3 if kind == "several choices" else 1
        body = LONG | {"stream": kind != "without a stream", "n": num_choices}
        exchange = Exchange(app, "/v1/completions", body)
        await until(lambda: num_served(engine) == num_choices)
        if kind in ("in the middle", "several choices"):
            gate.permits.release(SOME_STEPS)
            await exchange.first_part()
        exchange.leave()
        await exchange()
        before = gate.num_steps
        gate.open()
        await until(lambda: vacant(engine) if engine.engine.core.pool else not engine.engine.core.has_work)
        assert gate.num_steps - before <= 3
        await until(lambda: engine.stats().num_waiting == 0)
        return (await fetch(app, "/v1/completions", LONG | {"max_tokens": 3})).status

    assert asyncio.run(main()) == 200


def test_a_slow_reader_harms_no_other_request_and_keeps_only_its_tokens(make_engine):
    engine = make_engine()
    app = create_app(engine)
    expected = engine.engine.generate("Once upon a time", sd.SamplingParams(max_new_tokens=400, ignore_eos=True))

    async def main():
        slow = Exchange(app, "/v1/completions", LONG | {"stream": True})
        await slow.first_part()
        slow.may_send.clear()
        others = await asyncio.gather(*(fetch(app, "/v1/completions", LONG) for _ in range(3)))
        await until(lambda: not len(engine._live))
        await asyncio.wrap_future(engine._worker._writer.submit(bool))  # it has posted all that it has
        num_parts = len(slow.parts)
        slow.may_send.set()
        await slow()
        return slow, others, num_parts

    slow, others, num_parts = asyncio.run(main())
    assert tokens_of(slow) == expected[0].token_ids
    assert [other.json["choices"][0]["token_ids"] for other in others] == [expected[0].token_ids] * 3
    assert len(slow.parts) <= num_parts + 4, "what came meanwhile is one event"


def test_a_client_that_leaves_with_its_request_frees_its_place(make_engine, monkeypatch):
    engine = make_engine()
    app, gate = create_app(engine), Gate(monkeypatch, engine)

    async def main():
        exchange = Exchange(app, "/v1/completions", LONG | {"stream": True, "n": 2})
        exchange.leave()
        await exchange()
        assert exchange.status is None, "nobody reads a response"
        await until(lambda: engine.stats().num_waiting == 0)
        gate.open()

    asyncio.run(main())


def test_a_flood_is_refused_with_429_and_the_rest_is_served(make_engine, monkeypatch):
    engine = make_engine(max_batch_size=1, window_size=1, max_waiting=3)
    app, gate = create_app(engine), Gate(monkeypatch, engine)

    async def main():
        bodies = [LONG | {"max_tokens": 20, "stream": i % 2 == 0} for i in range(40)]
        flood = [Exchange(app, "/v1/completions", body) for body in bodies]
        # n choices are admitted together or not at all
        many = await fetch(app, "/v1/completions", LONG | {"n": 4})
        await until(lambda: sum(exchange.task.done() for exchange in flood) == 36)
        gate.open()
        return many, [await exchange() for exchange in flood]

    many, flood = asyncio.run(main())
    ids = engine.engine.generate("Once upon a time", sd.SamplingParams(max_new_tokens=20, ignore_eos=True))[0].token_ids
    assert sorted(exchange.status for exchange in flood) == [200] * 4 + [429] * 36
    for exchange in [*flood, many]:
        if exchange.status == 429:
            assert int(exchange.headers["retry-after"]) >= 1
            assert exchange.json["error"]["code"] == "rate_limit_exceeded"
        else:
            found = (
                tokens_of(exchange) if exchange.body.startswith(b"data") else exchange.json["choices"][0]["token_ids"]
            )
            assert found == ids
    assert many.status == 429
    assert vacant(engine)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"n": 3}, {"prompt": ["Once upon a time"] * 3}], ids=["choices", "prompts"])
def test_choices_that_exceed_the_budget_together_are_not_to_be_sent_again(make_engine, stream, fields):
    body = LONG | {"max_tokens": 20, "stream": stream, **fields}
    num_prompt_tokens = 5
    needed = 3 * (num_prompt_tokens + 20 - 1)
    found = []
    for budget in (needed - 1, needed):
        app = create_app(make_engine(kv_token_budget=budget))
        found.append(asyncio.run(fetch(app, "/v1/completions", body)))
    refused, served = found
    assert (refused.status, served.status) == (400, 200)
    assert f"together, {needed} KV positions" in refused.json["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_before_the_first_token_is_504(make_engine, monkeypatch, stream):
    engine, now = make_engine(), [1000.0]
    app, gate = create_app(engine, timeout=5.0), Gate(monkeypatch, engine)
    for module in ("async_engine", "worker"):
        monkeypatch.setattr(f"specdec_fast.service.{module}.monotonic", lambda: now[0])

    async def main():
        exchange = Exchange(app, "/v1/completions", LONG | {"stream": stream})
        await until(lambda: num_served(engine) == 1)
        now[0] += 10.0
        gate.open()
        return await exchange()

    exchange = asyncio.run(main())
    # A stream may have begun with the step that was under way.
    error = exchange.events[-2]["error"] if exchange.status == 200 else exchange.json["error"]
    assert error["code"] == "deadline_exceeded"
    assert exchange.status == 504 or stream


def test_a_chat_template_that_does_not_end_is_400_and_harms_no_other_request(make_engine, chat_tokens, monkeypatch):
    monkeypatch.setattr(chat, "TEMPLATE_SECONDS", 0.01)
    monkeypatch.setattr(chat_tokens, "chat_template", LOOP + TEMPLATE)
    app = create_app(make_engine())

    async def main():
        body = {"messages": HELLO, "max_tokens": 3}
        endless = body | {"chat_template_kwargs": {"n": 10**5}}
        paths = {"/v1/chat/completions": endless, "/v1/completions": LONG}
        return await asyncio.gather(*(fetch(app, path, body) for path, body in paths.items()))

    bad, good = asyncio.run(main())
    assert (bad.status, good.status) == (400, 200)
    assert "the chat template cannot write the messages: TimeoutError" in bad.json["error"]["message"]


def test_closing_finishes_or_cancels_and_refuses_the_rest(make_engine, monkeypatch):
    engine = make_engine(num_draft_tokens=0)
    app = create_app(engine)
    gate = Gate(monkeypatch, engine)

    async def main():
        stream = Exchange(app, "/v1/completions", LONG | {"stream": True})
        whole = Exchange(app, "/v1/completions", LONG)
        await until(lambda: num_served(engine) == 2)
        gate.permits.release(SOME_STEPS)
        await stream.first_part()
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        late, health = await fetch(app, "/v1/completions", LONG), await fetch(app, "/health")
        gate.open()
        await closing
        return await stream(), await whole(), late, health

    stream, whole, late, health = asyncio.run(main())
    assert (late.status, late.json["error"]["code"]) == (503, "engine_closed")
    assert (health.status, health.json) == (503, {"status": "closing"})
    assert (whole.status, whole.json["error"]["code"]) == (503, "engine_closed")
    assert stream.status == 200
    *_, error, done = stream.events
    assert (error["error"]["code"], done) == ("engine_closed", "[DONE]")


def test_health_is_ready_when_the_engine_is_warm(make_engine, monkeypatch, caplog):
    engine = make_engine()
    app, gate = create_app(engine), Gate(monkeypatch, engine)

    async def main():
        first = await fetch(app, "/health")
        gate.open()
        while (health := await fetch(app, "/health")).status == 503:
            await asyncio.sleep(0.005)
        return first, health

    first, health = asyncio.run(main())
    assert (first.status, first.json) == (503, {"status": "warming up"})
    assert (health.status, health.json) == (200, {"status": "ok"})
    assert engine.stats().decoding.num_emitted_tokens == 0, "the warm-up must not count as a request"


def test_a_warm_up_that_fails_is_tried_again(make_engine, monkeypatch):
    engine = make_engine()
    app = create_app(engine)
    generate, failed = engine.engine.generate, []

    def fail_once(*args, **options):
        if not failed:
            failed.append(True)
            raise ZeroDivisionError("by chance")
        return generate(*args, **options)

    monkeypatch.setattr(engine.engine, "generate", fail_once)

    async def main():
        seen = []
        while not seen or seen[-1].status == 503:
            seen.append(await fetch(app, "/health"))
            await asyncio.sleep(0.005)
        return [exchange.json["status"] for exchange in seen]

    found = asyncio.run(main())
    assert any("failed" in status for status in found)
    assert found[-1] == "ok"


def test_metrics_count_what_was_served(make_engine, monkeypatch):
    engine = make_engine(max_batch_size=2)
    app, other = create_app(engine, model_names=["demo"]), create_app(make_engine(), model_names=["second"])

    async def main():
        prompts = ["Once upon a time", [41, 84]]
        bodies = [LONG | {"prompt": prompt, "max_tokens": 20} for prompt in prompts]
        served = await asyncio.gather(*(fetch(app, "/v1/completions", body) for body in bodies))
        await fetch(app, "/v1/completions", {"prompt": 5})
        gate = Gate(monkeypatch, engine)
        leaves = Exchange(app, "/v1/completions", LONG | {"stream": True})
        gate.permits.release(SOME_STEPS)
        await leaves.first_part()
        leaves.leave()
        await leaves()
        gate.open()
        await until(lambda: vacant(engine))
        return served, await fetch(app, "/metrics"), await fetch(other, "/metrics")

    served, exchange, elsewhere = asyncio.run(main())
    found = metrics_of(exchange)
    stats = engine.stats()
    own = {name[0].removeprefix("specdec_fast:"): value for name, value in found.items() if len(name) == 1}
    assert exchange.headers["content-type"].startswith("text/plain")
    assert b'model_name="demo"' in exchange.body
    assert (own["num_requests_running"], own["num_requests_waiting"], own["kv_cache_usage_perc"]) == (0, 0, 0)
    assert own["generation_tokens_total"] == stats.decoding.num_emitted_tokens >= 41
    assert (
        own["prompt_tokens_total"] == stats.num_prompt_tokens >= sum(e.json["usage"]["prompt_tokens"] for e in served)
    )
    assert own["num_preemptions_total"] == 0
    counts = {"drafts": "num_drafts", "draft_tokens": "num_draft_tokens", "accepted_tokens": "num_accepted_tokens"}
    for name, attribute in counts.items():
        assert own[f"spec_decode_num_{name}_total"] == getattr(stats.decoding, attribute) > 0
    per_position = [found["specdec_fast:spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(5)]
    assert per_position == stats.decoding.accepted_per_position
    assert found["specdec_fast:request_success_total", "length"] == 2
    assert found["specdec_fast:request_success_total", "abort"] == 1
    assert found["specdec_fast:http_responses_total", "200"] == 3
    assert found["specdec_fast:http_responses_total", "400"] == 1
    for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time"):
        assert own[f"{name}_seconds_count"] == 3
        assert own[f"{name}_seconds_sum"] > 0
    assert own["request_time_per_output_token_seconds_count"] in (2, 3), "the one that left may have one token"
    assert own["request_time_per_output_token_seconds_sum"] > 0
    assert own["request_generation_tokens_sum"] == own["generation_tokens_total"]
    assert metrics_of(elsewhere)["specdec_fast:generation_tokens_total",] == 0, "each application counts its own"
