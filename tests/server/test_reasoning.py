"""Reasoning in chats over HTTP: apart from the content, limited, and in front of schemas and calls."""

from __future__ import annotations

import asyncio
import json

import jsonschema
import pytest

import specdec_fast as sd
from specdec_fast.server.answer_format import AnswerFormat
from specdec_fast.server.app import create_app
from specdec_fast.server.reading import AnswerReader
from support.asgi import served
from support.chats import HELLO, chat_tokenizer

pytest.importorskip("xgrammar")

# As hybrid models have it: the template begins the reasoning, or ends it at once.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content }}{% endfor %}{# <tool_call> #}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "it", "schema": CITY}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
BUDGET = 6
CHAT = {"messages": HELLO, "temperature": 0, "max_tokens": 300, "thinking_token_budget": BUDGET}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def reasoning_engine(target, draft):
    engine = sd.AsyncEngine(target, draft, tokenizer=chat_tokenizer(TEMPLATE), max_batch_size=4)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def reasoning_app(reasoning_engine):
    return create_app(reasoning_engine, model_names=["demo"])


def message_of(exchange):
    assert exchange.status == 200, exchange.json
    (choice,) = exchange.json["choices"]
    return choice["message"]


def streamed(exchange):
    """Return the reasoning, the content, the calls and the last usage of a stream."""
    reasoning = content = ""
    calls = []
    usage = None
    for event in exchange.events[:-1]:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            assert not content or "reasoning" not in delta
            reasoning += delta.get("reasoning") or ""
            content += delta.get("content") or ""
            calls += [call["function"] for call in delta.get("tool_calls", ())]
    return reasoning, content, calls, usage


def test_reasoning_is_apart_whole_and_in_streams(reasoning_app):
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    bodies = [CHAT, {**CHAT, **stream}, {**CHAT, "include_reasoning": False}]
    whole, parts, hidden = served(reasoning_app, *((PATH, body) for body in bodies))
    message = message_of(whole)
    assert message["reasoning"] == message["reasoning_content"] == message["reasoning"].strip()
    assert message["reasoning"]
    assert message["content"]
    assert "think" not in message["content"]
    reasoning, content, calls, usage = streamed(parts)
    assert (reasoning, content, calls) == (message["reasoning"], message["content"], [])
    names = ("completion_tokens", "completion_tokens_details")
    assert [usage[name] for name in names] == [whole.json["usage"][name] for name in names]
    assert BUDGET < usage["completion_tokens_details"]["reasoning_tokens"] <= BUDGET + len("</think>")
    assert message_of(hidden) == {"role": "assistant", "content": message["content"], "refusal": None}


def test_without_a_budget_reasoning_may_take_the_whole_answer(reasoning_app):
    body = {**CHAT, "thinking_token_budget": None, "max_tokens": 8}
    (exchange,) = served(reasoning_app, (PATH, body))
    message = message_of(exchange)
    assert message["content"] is None
    assert message["reasoning"]
    assert exchange.json["choices"][0]["finish_reason"] == "length"
    assert exchange.json["usage"]["completion_tokens_details"]["reasoning_tokens"] == 8


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("effort", ["high", "none"])
def test_a_schema_holds_behind_reasoning(reasoning_app, stream, effort):
    body = {**CHAT, "response_format": SCHEMA, "reasoning_effort": effort, "stream": stream, "temperature": 1.0}
    (exchange,) = served(reasoning_app, (PATH, body | {"seed": 3}))
    if stream:
        reasoning, content, *_ = streamed(exchange)
    else:
        message = message_of(exchange)
        reasoning, content = message.get("reasoning", ""), message["content"]
    jsonschema.validate(json.loads(content), CITY)
    assert bool(reasoning) is (effort == "high")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"response_format": SCHEMA}], ids=["required", "schema too"])
def test_a_call_may_follow_reasoning(reasoning_app, stream, fields):
    choice = {} if fields else {"tool_choice": "required", "parallel_tool_calls": False}
    body = {**CHAT, "tools": [TOOL], **choice, **fields, "stream": stream}
    (exchange,) = served(reasoning_app, (PATH, body))
    if stream:
        reasoning, content, calls, _ = streamed(exchange)
    else:
        message = message_of(exchange)
        reasoning, content = message["reasoning"], message["content"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
    assert reasoning
    if fields and not calls:
        jsonschema.validate(json.loads(content), CITY)
    else:
        (call,) = calls
        jsonschema.validate(json.loads(call["arguments"]), CITY)


def test_reasoning_of_earlier_turns_reaches_the_template(reasoning_app):
    """By either name."""
    turns = [*HELLO, {"role": "assistant", "content": "One", "reasoning": "Hm"}, {"role": "user", "content": "Two?"}]
    other = [*turns[:2], {"role": "assistant", "content": "One", "reasoning_content": "Hm"}, turns[-1]]
    without = [*turns[:2], {"role": "assistant", "content": "One"}, turns[-1]]
    exchanges = served(reasoning_app, *((PATH, {**CHAT, "messages": each}) for each in (turns, other, without)))
    lengths = [exchange.json["usage"]["prompt_tokens"] for exchange in exchanges]
    assert lengths[0] == lengths[1] > lengths[2]


def test_a_parser_of_none_leaves_reasoning_in_the_content(reasoning_engine):
    app = create_app(reasoning_engine, model_names=["demo"], reasoning_parser="none")
    bodies = [{**CHAT, "thinking_token_budget": None}, CHAT, {**CHAT, "thinking_token_budget": -1}]
    free, limited, unlimited = served(app, *((PATH, body) for body in bodies))
    assert set(message_of(free)) == {"role", "content", "refusal"}
    assert free.json["choices"] == unlimited.json["choices"]
    assert (limited.status, limited.json["error"]["param"]) == (400, "thinking_token_budget")
    assert "--reasoning-parser" in limited.json["error"]["message"]
    assert "completion_tokens_details" not in free.json["usage"]


def test_what_a_template_does_not_read_is_refused(app):
    """The templates of the other tests have no reasoning."""
    bodies = [{"messages": HELLO, "reasoning_effort": "low"}, {"messages": HELLO, "thinking_token_budget": 5}]
    for name, exchange in zip(
        ("reasoning_effort", "thinking_token_budget"), served(app, *((PATH, body) for body in bodies)), strict=True
    ):
        assert (exchange.status, exchange.json["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"thinking_token_budget": 10**12}, "thinking_token_budget", "2147483647"),
        ({"structured_outputs": {"structural_tag": {"type": "structural_tag"}}}, "structured_outputs", "format field"),
    ],
)
def test_refusals_name_the_field_of_the_request(reasoning_app, fields, param, message):
    (exchange,) = served(reasoning_app, (PATH, {**CHAT, **fields}))
    assert (exchange.status, exchange.json["error"]["param"]) == (400, param)
    assert message in exchange.json["error"]["message"]


class Broken:
    """A tokenizer of the caller's own, for prompts of token ids."""

    chat_template = "</think>"

    def decode(self, token_ids):
        return ""

    def __call__(self, text, **options):
        raise ValueError("no texts")


def test_a_tokenizer_need_not_encode_the_marks():
    assert AnswerFormat(Broken(), [2]).has_special_marks is False


def test_completions_have_no_reasoning(reasoning_app):
    prompt = {"prompt": "One day <think>\n", "temperature": 0, "max_tokens": 8}
    plain, refused = served(
        reasoning_app, ("/v1/completions", prompt), ("/v1/completions", {**prompt, "thinking_token_budget": 3})
    )
    assert plain.json["choices"][0]["text"]
    assert (refused.status, refused.json["error"]["param"]) == (400, "thinking_token_budget")


def test_unknown_parsers_are_refused(reasoning_engine):
    with pytest.raises(sd.ConfigError, match="reasoning_parser='thoughts': expected one of none, think"):
        create_app(reasoning_engine, reasoning_parser="thoughts")


class SpecialTokens:
    """A tokenizer whose marks and EOS are special tokens, as Mistral's are."""

    words = ("[THINK]", "[/THINK]", "</s>", "Hm", "Yes")
    all_special_ids = (0, 1, 2)
    chat_template = "[THINK]{{ messages }}"

    def decode(self, token_ids):
        return "".join(self.words[token] for token in token_ids)

    def __call__(self, text, add_special_tokens):
        return type("Encoding", (), {"input_ids": [self.words.index(text)]})


def test_special_tokens_that_mark_reasoning_are_read():
    found = AnswerFormat(SpecialTokens(), [2])
    assert found.has_special_marks
    reader = AnswerReader(found, SpecialTokens(), [4])
    parts = [reader.add(SpecialTokens().decode([token]), [token]) for token in (0, 3, 3, 1, 4)]
    parts.append(reader.add("</s>", [2], is_last=True))
    assert "".join(part.reasoning for part in parts) == "HmHm"
    assert "".join(part.content for part in parts) == "Yes"
    assert reader.num_reasoning_tokens == 4


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_token_that_ends_an_answer_is_no_part_of_its_reasoning(size):
    """A model may end in the midst of it; then the text has the end's, where special tokens are kept."""
    reader = AnswerReader(AnswerFormat(SpecialTokens(), [2]), SpecialTokens(), [4])
    tokens = [0, 3, 2]
    pieces = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    parts = [reader.add(SpecialTokens().decode(piece), piece, is_last=piece[-1] == 2) for piece in pieces]
    assert ("".join(part.reasoning for part in parts), "".join(part.content for part in parts)) == ("Hm", "")
    assert reader.num_reasoning_tokens == 3


@pytest.mark.parametrize("fields", [{"response_format": SCHEMA}, {"structured_outputs": {"choice": ["Oslo", "Rome"]}}])
def test_channels_of_gpt_oss_have_reasoning_and_a_final_answer(target, draft, fields):
    """Its messages, in the tokens of the bundled tokenizer; the final one follows what is asked for."""
    template = "{% for m in messages %}<|start|>{{ m.role }}<|channel|>{{ m.content }}{% endfor %}<|start|>assistant"
    engine = sd.AsyncEngine(target, draft, tokenizer=chat_tokenizer(template), max_batch_size=4)
    try:
        app = create_app(engine, model_names=["demo"])
        body = {"messages": HELLO, "max_tokens": 150, "temperature": 2.0, "n": 6, "seed": 0, **fields}
        (exchange,) = served(app, (PATH, body))
    finally:
        asyncio.run(engine.close())
    assert exchange.status == 200, exchange.json
    ended = [choice["message"] for choice in exchange.json["choices"] if choice["finish_reason"] == "stop"]
    assert ended
    for message in ended:
        found = message["content"]
        assert found in ("Oslo", "Rome") if "structured_outputs" in fields else json.loads(found)["city"]
