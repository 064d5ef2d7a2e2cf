"""Tool calls in texts of each format: whole, in pieces of any size, malformed, and beside content."""

from __future__ import annotations

import json

import pytest

from specdec_fast.server.tool_calls.formats import FORMATS, Tool, format_of_template
from specdec_fast.server.tool_calls.reading import reader_of

WEATHER = ("weather", {"city": "Oslo", "note": 'a "b" }</tool_call'})
TIME = ("time", {"zones": [{"name": "CET"}], "at": None})
ENDS = ("<|im_end|>", "<|eot_id|>", "</s>", "<|call|>", "<|return|>")


def hermes(*calls):
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )


def llama(*calls):
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def mistral(*calls):
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def mistral_args(*calls):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def harmony(*calls):
    heads = ("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
             " to=functions.{}<|channel|>commentary json<|message|>")  # fmt: skip
    texts = [
        heads[i % 2].format(name) + json.dumps(arguments) + "<|call|>" for i, (name, arguments) in enumerate(calls)
    ]
    return "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant" + "<|start|>assistant".join(texts)


WRITERS = {
    "hermes": hermes, "qwen3": hermes, "llama3_json": llama, "mistral": mistral, "mistral_args": mistral_args,
    "openai": harmony,
}  # fmt: skip


def read(name, text, size=None):
    """Return the content and the calls of a text that comes in pieces of so many characters (None: whole)."""
    reader = reader_of(FORMATS[name](), ENDS)
    size = size or max(1, len(text))
    pieces = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    content = ""
    calls = []
    for index, piece in enumerate(pieces):
        more, found = reader.add(piece, index == len(pieces) - 1)
        content += more
        calls += [(call.name, json.loads(call.arguments)) for call in found]
    return content, calls


def test_every_format_has_a_case():
    assert set(WRITERS) == set(FORMATS)


@pytest.mark.parametrize("size", [None, 1, 2, 7])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read(name, size):
    for calls in ([WEATHER], [WEATHER, TIME], [TIME, WEATHER, TIME]):
        assert read(name, WRITERS[name](*calls), size) == ("", calls)


@pytest.mark.parametrize("size", [None, 1, 5])
@pytest.mark.parametrize("name", FORMATS)
def test_the_text_of_the_last_token_is_no_content(name, size):
    end = "" if name == "openai" else "<|im_end|>"
    assert read(name, WRITERS[name](WEATHER) + end, size) == ("", [WEATHER])
    if name == "openai":  # a request may end with a token that the format does not know
        assert read(name, WRITERS[name](WEATHER).removesuffix("<|call|>") + "<|im_end|>", size) == ("", [WEATHER])
    content = "<|channel|>final<|message|>Hello.<|return|>" if name == "openai" else "Hello.<|im_end|>"
    assert read(name, content, size) == ("Hello.", [])


@pytest.mark.parametrize("size", [None, 1, 4])
@pytest.mark.parametrize("text", ["", "Hello", " [a] <b> {c}; ", "1 < 2", "<tool", "[TOOL", "\n\n", '"{}"'])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "openai"])
def test_other_texts_are_content(name, text, size):
    assert read(name, text, size) == (text, [])


@pytest.mark.parametrize("size", [None, 1, 3])
def test_content_before_and_between_calls(size):
    text = f"I look.\n\n{hermes(WEATHER)}\n{hermes(TIME)}\n"
    assert read("hermes", text, size) == ("I look.", [WEATHER, TIME])
    assert read("mistral", f"I look. {mistral(WEATHER)}", size) == ("I look.", [WEATHER])
    text = f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{harmony(TIME)}"
    assert read("openai", text, size) == ("I look.", [TIME])


@pytest.mark.parametrize("size", [None, 1, 6])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a"}}\n</tool_call>'),
        ("hermes", "<tool_call>[1]</tool_call> and more"),
        ("hermes", '<tool_call>{"nome": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "argu'),
        ("llama3_json", '{"city": "Oslo"}'),
        ("llama3_json", '{"name": "f", "parameters": {}} is what I would call'),
        ("llama3_json", '{"name": "f", "para'),
        ("mistral", "[TOOL_CALLS]nothing"),
        ("mistral", '[TOOL_CALLS][{"name": 3}]'),
        ("mistral_args", "[TOOL_CALLS]f[ARGS]{"),
    ],
)
def test_what_is_no_call_is_content(name, text, size):
    assert read(name, text, size) == (text, [])


def test_a_stream_shows_content_as_soon_as_it_is_certain():
    reader = reader_of(FORMATS["hermes"](), ENDS)
    assert reader.add("I look <") == ("I look", [])
    assert reader.add("b>") == (" <b>", [])
    assert reader.add("<tool_call>") == ("", [])
    _, (call,) = reader.add('{"name": "f", "arguments": "{}"}</tool_call>')
    assert (call.name, call.arguments) == ("f", "{}")
    reader = reader_of(FORMATS["openai"](), ENDS)
    assert reader.add("<|channel|>final<|message|>Hel") == ("Hel", [])
    assert reader.add("lo<|ret") == ("lo", [])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\n{{ c }}\n</tool_call>", "hermes"),
        ("<tool_call>\n<function={{ f }}>", None),
        ("[TOOL_CALLS]{{ c }}", "mistral"),
        ("[TOOL_CALLS]{{ n }}[ARGS]{{ c }}", "mistral_args"),
        ("<|start_header_id|>{# #}{{ '\"parameters\": ' }}", "llama3_json"),
        ("<|channel|>commentary", "openai"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_a_template_shows_the_format(template, name):
    found = format_of_template(template)
    assert type(found) is (type(None) if name is None else FORMATS[name])


def matcher_of(element):
    xgrammar = pytest.importorskip("xgrammar")
    vocabulary = [bytes([code]) for code in range(256)] + [b"<end>"]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[256]), max_threads=1)
    compiled = compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": element}))
    return xgrammar.GrammarMatcher(compiled)


def is_whole(element, text):
    """Return whether a grammar takes a text as a whole."""
    matcher = matcher_of(element)
    return matcher.accept_string(text) and matcher.is_completed()


TOOLS = [
    Tool("weather", {"type": "object", "properties": {"city": {"type": "string"}, "note": {"type": "string"}},
                     "required": ["city", "note"]}),
    Tool("time", {"type": "object", "properties": {"zones": {"type": "array"}, "at": {"type": "null"}},
                  "required": ["zones", "at"]}),
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_forced_is_what_the_model_writes(name):
    """And what is read: a grammar of calls takes their texts, and no other."""
    found = FORMATS[name]()
    several, one = found.calls(TOOLS, None), found.calls(TOOLS, 1)
    text = WRITERS[name](WEATHER).removesuffix("<|call|>")  # that token ends the request
    assert is_whole(one, text)
    assert is_whole(several, text)
    assert not is_whole(one, "Hello")
    assert not is_whole(one, WRITERS[name](("weather", {"city": "Oslo"})).removesuffix("<|call|>"))
    if name != "openai":  # one message, one call
        both = WRITERS[name](WEATHER, TIME)
        assert is_whole(several, both)
        assert not is_whole(one, both)


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_in_free_text_follows_its_schema(name):
    free = FORMATS[name]().free_text(TOOLS, None)
    text = WRITERS[name](WEATHER).removesuffix("<|call|>")
    assert is_whole(free, text)
    assert is_whole(free, "<|channel|>final<|message|>Hello." if name == "openai" else "Hello.")
    assert not matcher_of(free).accept_string(text.replace("city", "town"))
