"""Answers that follow a schema, and calls of functions, over HTTP; errors that name the field; other requests go on."""

from __future__ import annotations

import asyncio
import json
import re

import jsonschema
import pytest

from specdec_fast.server.app import create_app
from specdec_fast.server.tool_calls.formats import FORMATS
from support.asgi import Exchange, served
from support.chats import HELLO
from support.grids import each_value_once
from support.slow_grammars import SLOW, stopped_process

pytest.importorskip("xgrammar")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CHAT = {"messages": HELLO, "temperature": 0, "max_tokens": 400}
TEXT = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 60}


@pytest.fixture(scope="module")
def tools_app(engine):
    return create_app(engine, model_names=["demo"], tool_call_parser="hermes")


def response_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def streamed(exchange):
    """Return the content, the calls and the finish reason of a stream of one choice."""
    content = ""
    calls = {}
    reason = None
    for event in exchange.events[:-1]:
        (choice,) = event["choices"]
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            assert call["index"] not in calls
            calls[call["index"]] = call["function"]
        reason = choice["finish_reason"] or reason
    assert list(calls) == list(range(len(calls)))
    return content, list(calls.values()), reason


def test_response_format(app):
    bodies = [
        {**CHAT, "response_format": response_format(PERSON)},
        {**CHAT, "structured_outputs": {"json": PERSON, "disable_any_whitespace": True}},
        {**CHAT, "response_format": {"type": "text"}},
    ]
    schema, compact, _ = served(app, *(("/v1/chat/completions", body) for body in bodies))
    for exchange in (schema, compact):
        (choice,) = exchange.json["choices"]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    assert schema.json["choices"][0]["message"].get("tool_calls") is None


@pytest.mark.parametrize(
    ("asked", "texts"),
    [
        ({"regex": "(yes|no)!"}, ("yes!", "no!")),
        ({"choice": ["north", "south"]}, ("north", "south")),
        ({"grammar": 'root ::= "a" [0-9] "z"'}, [f"a{digit}z" for digit in range(10)]),
    ],
)
def test_structured_outputs_of_completions(app, asked, texts):
    (exchange,) = served(app, ("/v1/completions", {**TEXT, "structured_outputs": asked}))
    (choice,) = exchange.json["choices"]
    assert choice["text"] in texts
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"structured_outputs": {"json": {"type": "strnig"}}}, "structured_outputs", "#/type: 'strnig' is no type"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "parenthesis is not closed"),
        ({"structured_outputs": {"json": {"enum": ["x" * 500_000, "y" * 500_000]}}}, "structured_outputs", "131072"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"jsno": {}}}, "structured_outputs", "unknown field 'jsno'"),
        ({"structured_outputs": {"grammar": "root ::= missing"}}, "structured_outputs", 'Rule "missing"'),
        ({"response_format": {"type": "jsn"}}, "response_format", "'jsn'"),
        ({"response_format": response_format({"properties": {"a": {"not": {}}}})}, "response_format",
         "#/properties/a/not"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs", "no token ends"),
        ({"guided_json": {}}, "guided_json", "use structured_outputs"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(app, fields, param, message):
    (exchange,) = served(app, ("/v1/completions", {**TEXT, **fields}))
    assert exchange.status == 400
    error = exchange.json["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"weather", "clock"}),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, {"weather"}),
    ],
)
def test_calls_that_are_required(tools_app, fields, names, stream):
    body = {**CHAT, "tools": [WEATHER, CLOCK], **fields, "stream": stream}
    (exchange,) = served(tools_app, ("/v1/chat/completions", body))
    assert exchange.status == 200
    if stream:
        content, calls, reason = streamed(exchange)
    else:
        (choice,) = exchange.json["choices"]
        message, reason = choice["message"], choice["finish_reason"]
        content = message["content"] or ""
        calls = [call["function"] for call in message["tool_calls"]]
        assert all(call["type"] == "function" and call["id"].startswith("call_") for call in message["tool_calls"])
    assert (content, reason, len(calls)) == ("", "tool_calls", 1)
    assert calls[0]["name"] in names
    arguments = json.loads(calls[0]["arguments"])
    if calls[0]["name"] == "weather":
        jsonschema.validate(arguments, WEATHER["function"]["parameters"])


NOTE = {
    "type": "function",
    "function": {
        "name": "note",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "minLength": 3, "maxLength": 12},
                "key": {"type": "string", "pattern": "^[^a]{2,6}$"},
            },
            "required": ["text", "key"],
            "additionalProperties": False,
        },
    },
}


@each_value_once
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "note"}}], ids=["required", "named"]
)
@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_json_that_follows_the_schema(engine, name, choice):
    """Also where a model writes anything: xgrammar's grammars of such texts let raw control characters through."""
    app = create_app(engine, model_names=["demo"], tool_call_parser=name)
    body = {**CHAT, "tools": [NOTE], "tool_choice": choice, "temperature": 9.0, "n": 6, "seed": 1}
    body |= {"parallel_tool_calls": False}
    (exchange,) = served(app, ("/v1/chat/completions", body))
    assert exchange.status == 200
    answers = [answer for answer in exchange.json["choices"] if answer["finish_reason"] != "length"]
    assert len(answers) == 6 or name == "openai", "which may think first, without an end at this temperature"
    assert answers
    for answer in answers:
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "note"
        jsonschema.validate(json.loads(call["function"]["arguments"]), NOTE["function"]["parameters"])


@pytest.mark.parametrize("stream", [False, True])
def test_calls_have_the_ids_that_the_model_writes(engine, stream):
    """Kimi's templates show them again beside the results."""
    app = create_app(engine, model_names=["demo"], tool_call_parser="kimi_k2")
    body = {**CHAT, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "stream": stream}
    (exchange,) = served(app, ("/v1/chat/completions", body))
    if stream:
        deltas = [choice["delta"] for event in exchange.events[:-1] for choice in event["choices"]]
        (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
    else:
        (call,) = exchange.json["choices"][0]["message"]["tool_calls"]
    assert re.fullmatch(r"functions\.weather:[0-9]+", call["id"])


@pytest.mark.parametrize("stream", [False, True])
def test_the_types_of_arguments_come_from_the_schema(engine, stream):
    """Of a format that writes them as plain texts."""
    app = create_app(engine, model_names=["demo"], tool_call_parser="qwen3_coder")
    schema = {
        "type": "object",
        "properties": {"id": {"enum": ["12"]}, "count": {"enum": [7]}},
        "required": ["id", "count"],
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = {**CHAT, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "stream": stream}
    (exchange,) = served(app, ("/v1/chat/completions", body))
    if stream:
        content, (function,), reason = streamed(exchange)
    else:
        (choice,) = exchange.json["choices"]
        content, reason = choice["message"]["content"] or "", choice["finish_reason"]
        function = choice["message"]["tool_calls"][0]["function"]
    assert (content, reason) == ("", "tool_calls")
    assert json.loads(function["arguments"]) == {"id": "12", "count": 7}


def test_a_call_or_a_schema(tools_app):
    """With both, an answer is a call or follows the schema."""
    body = {**CHAT, "tools": [WEATHER], "response_format": response_format(PERSON)}
    (exchange,) = served(tools_app, ("/v1/chat/completions", body))
    message = exchange.json["choices"][0]["message"]
    if calls := message.get("tool_calls"):
        jsonschema.validate(json.loads(calls[0]["function"]["arguments"]), WEATHER["function"]["parameters"])
    else:
        jsonschema.validate(json.loads(message["content"]), PERSON)


def test_tools_that_may_be_called_change_nothing_else(app, tools_app):
    """Without a call, the answer is that of the prompt; with "none", that without tools."""
    plain, none, auto = (
        served(each, ("/v1/chat/completions", {**CHAT, "max_tokens": 12, **fields}))[0].json
        for each, fields in (
            (app, {}),
            (app, {"tools": [WEATHER], "tool_choice": "none"}),
            (tools_app, {"tools": [{**WEATHER, "name": "w"}], "tool_choice": "auto"}),
        )
    )
    assert none["choices"] == plain["choices"]
    assert auto["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"], "the template shows the tools"
    assert auto["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [WEATHER]}, "tools", "--tool-call-parser"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools", "tools.0.function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "one name"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "'any'"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "weather",
        ),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ],
)
def test_wrong_tools_are_named(app, fields, param, message):
    (exchange,) = served(app, ("/v1/chat/completions", {**CHAT, **fields}))
    assert exchange.status == 400
    error = exchange.json["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_a_wrong_schema_of_a_function_is_named(tools_app):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["a"]}}}
    body = {**CHAT, "tools": [WEATHER, tool], "tool_choice": "required"}
    (exchange,) = served(tools_app, ("/v1/chat/completions", body))
    assert exchange.status == 400
    assert exchange.json["error"]["param"] == "tools"
    assert "tools.1.function.parameters: #/required: 'a'" in exchange.json["error"]["message"]


def test_a_grammar_that_takes_long_delays_no_other_request(app, monkeypatch):
    """It is compiled apart; a request that comes later has its answer before. When the process ends, it is refused."""
    begun = stopped_process(monkeypatch)

    async def both():
        slow = Exchange(app, "/v1/completions", {**TEXT, "structured_outputs": {"json": SLOW}})
        process = await asyncio.to_thread(begun.get)
        other = Exchange(app, "/v1/completions", TEXT)
        await other()
        was_waiting = slow.status is None
        process.kill()
        await slow()
        return was_waiting, slow, other

    was_waiting, slow, other = asyncio.run(both())
    assert was_waiting
    assert other.status == 200
    assert slow.status == 400
    assert slow.json["error"]["param"] == "structured_outputs"
    assert "the process has ended" in slow.json["error"]["message"]
