"""The HTTP application in its own event loop: every answer has the engine's tokens."""

from __future__ import annotations

import pytest

import specdec_fast as sd
from specdec_fast.server.app import create_app
from support.asgi import served
from support.chats import HELLO
from support.grids import each_value_once

MODEL = "demo"
PROMPTS = ["Once upon a time", "The little dog", [41, 84, 90]]


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


@each_value_once
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"temperature": 0}, {}),
        ({"temperature": 0, "max_tokens": 5, "num_draft_tokens": 0}, {"max_new_tokens": 5}),
        ({"temperature": 0.9, "seed": 3, "top_p": 0.9, "top_k": 50}, {"temperature": 0.9, "top_p": 0.9, "top_k": 50}),
        ({"temperature": 0, "stop": [" the", "."], "max_tokens": 40}, {"stop": (" the", "."), "max_new_tokens": 40}),
        ({"temperature": 0, "logprobs": 0, "ignore_eos": True}, {"logprobs": True, "ignore_eos": True}),
        (
            {"temperature": 0, "presence_penalty": 1, "logit_bias": {"41": 3}, "bad_words": ["the"], "min_tokens": 9},
            {"presence_penalty": 1, "logit_bias": {41: 3}, "bad_words": ["the"], "min_tokens": 9},
        ),
    ],
    ids=["greedy", "short", "sampled", "stop", "logprobs", "restricted"],
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
        assert exchange.events[0]["prompt_token_ids"] == ids
    else:
        (choice,) = exchange.json["choices"]
        text, tokens, reason = choice["message"]["content"], choice["token_ids"], choice["finish_reason"]
        assert exchange.json["prompt_token_ids"] == ids
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


def test_a_conversation_with_tool_calls_is_answered(app, engine, chat_tokens):
    """As clients send it back: without content, with arguments as JSON, and with fields that are null."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        HELLO[1],
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    written = [HELLO[1], {"role": "assistant", "content": ""}, {"role": "tool", "content": "sunny"}]
    ids = chat_tokens.apply_chat_template(written, add_generation_prompt=True, return_dict=False)
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": messages, "tools": [tool], "tool_choice": "none", "temperature": 0}
    (exchange,) = served(app, ("/v1/chat/completions", body | {"return_token_ids": True}))
    assert exchange.json["prompt_token_ids"] == ids, "the template has seen no tools"
    assert exchange.json["choices"][0]["message"]["content"] == reference(engine, ids, max_new_tokens=12).text


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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model_names": "qwen"}, r"model_names='qwen' is one string; .* \['qwen'\]"),
        ({"timeout": "5"}, "timeout='5'"),
        ({"default_params": {"top_k": 5}}, "default_params is a dict; expected SamplingParams"),
    ],
    ids=str,
)
def test_wrong_settings_of_an_application(engine, wrong, message):
    with pytest.raises(sd.ConfigError, match=message):
        create_app(engine, **wrong)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_has_the_prompt_tokens_that_were_found(make_engine, stream):
    """At first by the second text of the prompt alone, whose tokens do not count; then by both."""
    app = create_app(make_engine(max_batch_size=4), model_names=[MODEL])
    body = {"model": MODEL, "prompt": list(range(5, 45)), "max_tokens": 4, "n": 2, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    found = []
    for _ in range(2):
        (exchange,) = served(app, ("/v1/completions", body))
        usage = streamed(exchange)[1] if stream else exchange.json["usage"]
        assert usage["prompt_tokens"] == 40
        found.append(usage["prompt_tokens_details"])
    assert found == [{"cached_tokens": 0}, {"cached_tokens": 32}]
    (metrics,) = served(app, ("/metrics", None))
    values = dict(line.rsplit(" ", 1) for line in metrics.body.decode().splitlines() if not line.startswith("#"))
    labels = f'{{model_name="{MODEL}"}}'
    assert float(values[f"specdec_fast:prefix_cache_queries_total{labels}"]) == 160
    assert float(values[f"specdec_fast:prefix_cache_hits_total{labels}"]) == 96


def test_an_engine_without_a_prefix_cache_looks_nothing_up(make_engine):
    app = create_app(make_engine(max_batch_size=4, prefix_cache=False), model_names=[MODEL])
    body = {"model": MODEL, "prompt": list(range(5, 45)), "max_tokens": 4}
    *answers, metrics = served(app, ("/v1/completions", body), ("/v1/completions", body), ("/metrics", None))
    assert [a.json["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers] == [0, 0]
    assert b'prefix_cache_queries_total{model_name="demo"} 0.0' in metrics.body
