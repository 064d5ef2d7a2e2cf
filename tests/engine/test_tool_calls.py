"""Tool calls in the messages of OpenAI's API, as clients send them back, with templates that write them differently."""

from __future__ import annotations

import json

import pytest

import specdec_fast as sd
from support.chats import chat_tokenizer

CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}]
TOOL_CHAT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": None, "tool_calls": CALLS, "refusal": None, "function_call": None},
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny.", "tool_calls": None},
]


@pytest.fixture(scope="module")
def engine(target):
    return sd.Engine(target, None, tokenizer=chat_tokenizer())


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("{{ call.arguments | tojson }}", '{"a": [1]}'),
        ("{% for name, value in call.arguments | items %}{{ name }}={{ value }}{% endfor %}", "a=[1]"),
        ("{{ 'f: ' + call.arguments }}", 'f: {"a": [1]}'),
    ],
    ids=["as JSON", "one by one", "joined to a text"],
)
def test_arguments_are_what_the_template_expects(engine, written, text):
    """Most templates expect a mapping; those of DeepSeek-V3 join the JSON of OpenAI's API to a text."""
    template = "{% for m in messages %}{% if 'tool_calls' in m %}{% set call = m.tool_calls[0].function %}"
    template += f"[{written}]{{% else %}}[{{{{ m.content }}}}]{{% endif %}}{{% endfor %}}"
    ids = engine.encode(TOOL_CHAT, chat_template=template)
    assert engine.tokenizer.decode(ids) == f"[Hello][{text}][sunny][It is sunny.]"


def test_a_field_that_is_null_is_left_out(engine):
    """Templates ask whether a message has it; and text of null would be "None"."""
    template = "{% for m in messages %}[{{ m.content }}{{ 'refusal' in m }}]{% endfor %}"
    ids = engine.encode(TOOL_CHAT, chat_template=template)
    assert engine.tokenizer.decode(ids) == "[HelloFalse][False][sunnyFalse][It is sunny.False]"


@pytest.mark.parametrize(("arguments", "text"), [("", "{}"), ("not JSON", '"not JSON"'), ("[1]", '"[1]"')])
def test_arguments_without_an_object(engine, arguments, text):
    """A model may have written anything; as in OpenAI's API that is no error."""
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    ids = engine.encode([{"role": "assistant", "tool_calls": calls}], chat_template=template)
    assert engine.tokenizer.decode(ids) == text


@pytest.mark.parametrize("calls", [5, [5], [{"function": 5}], [{"name": "f", "arguments": {}}]])
def test_other_tool_calls_are_left_to_the_template(engine, calls):
    message = {"role": "assistant", "tool_calls": calls}
    ids = engine.encode([message], chat_template="{{ messages[0].tool_calls | tojson }}")
    assert json.loads(engine.tokenizer.decode(ids)) == calls


def test_the_error_is_that_of_mappings(engine):
    """The arguments of the caller are not changed."""
    template = "{{ messages[1].tool_calls[0].function.arguments.b.c }}"
    with pytest.raises(sd.ChatTemplateError, match="has no attribute 'b'"):
        engine.encode(TOOL_CHAT, chat_template=template)
    assert CALLS[0]["function"]["arguments"] == '{"a": [1]}'
