"""Tool calls in texts of each format: whole, in pieces of any size, malformed, and beside content."""

from __future__ import annotations

import json
from functools import partial

import pytest

from specdec_fast.server.tool_calls.formats import FORMATS, Tool, format_of_template
from specdec_fast.server.tool_calls.reading import reader_of
from support.tool_templates import TEMPLATES, written

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
    "openai": harmony, **{name: partial(written, name) for name in TEMPLATES},
}  # fmt: skip


TOOLS = [
    Tool("weather", {"type": "object", "properties": {"city": {"type": "string"}, "note": {"type": "string"}},
                     "required": ["city", "note"]}),
    Tool("time", {"type": "object", "properties": {"zones": {"type": "array"}, "at": {"type": "null"}},
                  "required": ["zones", "at"]}),
]  # fmt: skip


def read(name, text, size=None, tools=TOOLS):
    """Return the content and the calls of a text that comes in pieces of so many characters (None: whole)."""
    reader = reader_of(FORMATS[name](), ENDS, tools)
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
    reader = reader_of(FORMATS["qwen3_coder"](), ENDS)
    assert reader.add("Write <function=f>") == ("Write", [])
    assert reader.add(" to call it.") == (" <function=f> to call it.", [])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\n{{ c }}\n</tool_call>", "hermes"),
        ("<tool_call>\n<function={{ f }}>", "qwen3_coder"),
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
        both = WRITERS["qwen3_xml" if name == "qwen3_coder" else name](WEATHER, TIME)  # null, where Python has None
        assert is_whole(several, both)
        assert not is_whole(one, both)


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_in_free_text_follows_its_schema(name):
    free = FORMATS[name]().free_text(TOOLS, None)
    text = WRITERS[name](WEATHER).removesuffix("<|call|>")
    assert is_whole(free, text)
    assert is_whole(free, "<|channel|>final<|message|>Hello." if name == "openai" else "Hello.")
    assert not matcher_of(free).accept_string(text.replace("city", "town"))


VALUES = (
    "write",
    {
        "text": 'a\n\n</function>\n</tool_call>\n<b>&amp;</parameter> \u00e9 "x"\n',
        "digits": "007",
        "word": "null",
        "count": 12,
        "ratio": 1.50,
        "flag": False,
        "lines": ["</arg_value>", "a\nb", "</parameter>\n</function>\n</tool_call>"],
        "options": {"a": None, "b": {"c": [1, "</\uff5cDSML\uff5cparameter>"]}},
        "nothing": None,
        "empty": "",
    },
)
WRITE = Tool(
    "write",
    {
        "type": "object",
        "properties": {
            **{name: {"type": "string"} for name in ("text", "digits", "word", "empty")},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "flag": {"type": ["boolean", "null"]},
            "lines": {"$ref": "#/$defs/lines"},
            "options": {"type": "object"},
            "nothing": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"lines": {"type": "array", "items": {"type": "string"}}},
    },
)
IDLE = ("idle", {})


@pytest.mark.parametrize("size", [None, 1, 9])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read(name, size):
    """Values have their types, whatever they look like; marks, quotes and line ends in them stay."""
    text = written(name, VALUES, IDLE, WEATHER, content="I write <it>.")
    assert read(name, text, size, [WRITE, *TOOLS]) == ("I write <it>.", [VALUES, IDLE, WEATHER])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_its_format(name):
    found = format_of_template(TEMPLATES[name])
    assert type(found) is FORMATS[name]


def test_templates_that_show_no_tools_have_no_format():
    """The model of such a template does not know what it may call."""
    assert format_of_template(TEMPLATES["deepseek_v31"].replace("tools", "")) is None


@pytest.mark.parametrize("size", [None, 1, 4])
@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_that_ends_in_a_call_has_the_calls_before(name, size):
    """The call that is not complete is content, as what is no call."""
    whole = written(name, WEATHER)
    both = written(name, WEATHER, TIME)
    for stop in (both.index("time") + 4, len(both) - 30):
        content, calls = read(name, both[:stop], size)
        assert calls == [WEATHER]
        assert both[:stop].endswith(content)
        assert "time" in content
    content, calls = read(name, whole[:20], size)
    assert (content.strip(), calls) == (whole[:20].strip(), [])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_is_shown_when_the_next_one_begins(name):
    text = written(name, WEATHER, TIME)
    reader = reader_of(FORMATS[name](), ENDS, TOOLS)
    stop = text.index("time")
    _, (call,) = reader.add(text[:stop])
    assert call.name == "weather"
    content, (call,) = reader.add(text[stop:])
    assert (content, call.name) == ("", "time")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, '"a"', '"a"'),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, " 12\n", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "number"}, "1e400", float("inf")),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "integer"}, "1" * 5000, "1" * 5000),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}, "5", "5"),
        ({"$ref": "#/$defs/missing"}, "5", 5),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"type": "array"}, '["a\nb"]', ["a\nb"]),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        ({"type": "wrong"}, "[1]", [1]),
        ({}, "True", "True"),
        ({}, "{}", {}),
    ],
)
def test_values_are_converted_by_the_schema(schema, text, value):
    definitions = {"t": {"type": "string"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]}}
    tool = Tool("f", {"type": "object", "properties": {"a": schema}, "$defs": definitions})
    call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    _, (call,) = reader_of(FORMATS["qwen3_coder"](), ENDS, [tool]).add(call, is_last=True)
    parsed = json.loads(call.arguments, parse_int=lambda digits: int(digits) if len(digits) < 99 else digits)
    assert parsed == {"a": value}
    assert type(parsed["a"]) is type(value)


def test_a_schema_of_any_depth_is_read():
    deep = {"type": "string"}
    for _ in range(5000):
        deep = {"anyOf": [deep]}
    tool = Tool("f", {"properties": {"a": deep}})
    assert "string" in tool.types["a"]


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>"),
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>Oslo</parameter></function></tool_call>"),
        ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"),
        ("glm47", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="weather"><parameter name="city">Oslo</parameter></invoke>'),
        ("deepseek_v31", '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>\n{"city":"Oslo"}<｜tool▁call▁end｜>'),
    ],
)  # fmt: skip
def test_calls_in_a_slightly_other_form_are_read(name, text, size):
    before = "<｜tool▁calls▁begin｜>\n" if name == "deepseek_v31" else ""
    assert read(name, before + text, size) == ("", [("weather", {"city": "Oslo"})])


@pytest.mark.parametrize("size", [None, 1, 6])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nb\n</function>\n</tool_call>"),
        ("qwen3_coder", "Write <function=f> to call it."),
        ("glm45", "<tool_call>f and more</tool_call>"),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>f"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>call_1<|tool_call_argument_begin|>{}"),
        ("minimax_m2", "<minimax:tool_call> is a mark, as </minimax:tool_call> is"),
        ("minimax_m2", '<invoke name="f">\n</invoke>'),
        ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a">b'),
    ],
)  # fmt: skip
def test_what_is_no_call_in_marks_is_content(name, text, size):
    assert read(name, text, size) == (text, [])


def test_a_call_behind_one_that_is_none_is_read():
    wrong = {
        "qwen3_coder": "<tool_call>\n<function=f>\n</tool_call>",
        "glm45": "<tool_call>f\n<arg_key>a\n</tool_call>",
    }
    for name, text in wrong.items():
        content, calls = read(name, text + written(name, WEATHER))
        assert content.strip() == text.strip()
        assert calls == [WEATHER]


def test_the_ids_that_a_model_writes_are_kept():
    reader = reader_of(FORMATS["kimi_k2"](), ENDS, TOOLS)
    _, calls = reader.add(written("kimi_k2", WEATHER, TIME), is_last=True)
    assert [call.id for call in calls] == ["functions.weather:0", "functions.time:1"]
