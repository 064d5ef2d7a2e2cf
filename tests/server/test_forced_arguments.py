"""Forced calls in formats that write arguments as plain texts: what is read follows the schema, whatever is written."""

from __future__ import annotations

import json
from copy import deepcopy

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import specdec_fast as sd
from specdec_fast.server.answer_format import AnswerFormat
from specdec_fast.server.constraints import ToolChoice, constraint_of
from specdec_fast.server.tool_calls.formats import FORMATS, Tool, argument_elements
from specdec_fast.server.tool_calls.formats.narrow_patterns import NEVER, narrowed
from specdec_fast.server.tool_calls.reading import reader_of
from specdec_fast.structured_outputs.compiling import Grammars
from support.grammar_walks import Walker
from support.grids import each_value_once
from support.schemas import SCHEMAS
from support.tool_templates import written

pytest.importorskip("xgrammar")

EOS = 1
SIZE = 1024
TAGGED = ("qwen3_coder", "glm45", "glm47", "minimax_m2", "deepseek_v32")
MARKS = (
    "<tool_call>\n<function=f>\n<parameter=a>\n", "</parameter>\n<parameter=b>\n",
    "\n</parameter>\n", "</arg_value>", "</｜DSML｜parameter>", "<parameter=b>\n", "</function>\n</tool_call>", "</",
    "</invoke>", "</minimax:tool_call>", "</｜DSML｜invoke>", "null", "5", '{"a": "', "None", '"', "\n",
)  # fmt: skip
DEFINITIONS = ("$defs", "definitions")


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, SIZE, [EOS])


@pytest.fixture(scope="module")
def walker(tokenizer):
    return Walker(tokenizer, SIZE, EOS, MARKS)


def forced(name, tools, is_strict=False):
    choice = ToolChoice(tuple(tools), not is_strict, is_strict, 1)
    return constraint_of(None, None, choice, FORMATS[name]())


def parameters(required=("a", "b"), **properties):
    definitions = {}
    for schema in properties.values():
        for name in DEFINITIONS if isinstance(schema, dict) else ():
            definitions |= {name: schema[name]} if name in schema else {}
    bare = {
        name: {key: value for key, value in schema.items() if key not in DEFINITIONS}
        for name, schema in properties.items()
    }
    return {
        "type": "object",
        "properties": bare,
        "required": [name for name in required if name in bare],
        **definitions,
    }


def read_arguments(name, tool, text):
    """Return the arguments of the only call in a text."""
    content, calls = reader_of(FORMATS[name](), [], [tool]).add(text, is_last=True)
    assert content == "", text
    (call,) = calls
    assert call.name == tool.name
    return json.loads(call.arguments)


def expect_walks_valid(name, schema, grammars, walker, seeds):
    """Write texts of a call, and expect all to be valid; return how many came to their end."""
    tool = Tool("f", schema)
    asked = forced(name, [tool])
    texts = [walker.text(grammars.masks(asked, [EOS]), seed) for seed in seeds]
    whole = [text for text in texts if text is not None]
    for text in whole:
        jsonschema.validate(read_arguments(name, tool, text), tool.parameters)
    return len(whole)


# What cannot be guaranteed, and where. DSML writes which values are texts, so it takes mixed ones.
MIXED = {"a count or a word": "/anyOf/0", "exactly one type": "/oneOf/1"}
REFUSED = {"a property again": "", "a thread of comments": "", **MIXED}


@each_value_once
@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("kind", SCHEMAS)
def test_arguments_of_every_schema_are_valid_or_refused(kind, name, grammars, walker):
    schema = parameters(a=SCHEMAS[kind], b={"type": "string"})
    if kind in REFUSED and not (kind in MIXED and name == "deepseek_v32"):
        with pytest.raises(sd.GrammarError) as caught:
            forced(name, [Tool("f", schema)])
        assert caught.value.place == f"#/properties/a{REFUSED[kind]}"
    else:
        assert expect_walks_valid(name, schema, grammars, walker, range(6))


TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
PATTERNS = (
    "^[^a]{2,6}$", "^.+$", r"^[\s\S]{1,3}$", "^[ -~]*$", r"^\S+ \S+$", "^(a|b<)$", r"^\w+=[0-9]{2}$", "x",
)  # fmt: skip
CONSTANTS = ("a", "", "5", "null", "</", "\n", " x ", 5, None, True, [1], {"k": "</parameter>"})


def limited(least, more):
    return {"type": "string", "minLength": least, "maxLength": least + more}


leaves = st.one_of(
    st.sampled_from(TYPES).map(lambda name: {"type": name}),
    st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True).map(lambda names: {"type": names}),
    st.builds(limited, st.integers(0, 3), st.integers(0, 9)),
    st.integers(0, 3).map(lambda least: {"type": "string", "minLength": least}),
    st.integers(0, 5).map(lambda most: {"type": "string", "maxLength": most}),
    st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.sampled_from(["date", "email", "uri", "duration", "unknown"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    st.lists(st.sampled_from(CONSTANTS), min_size=1, max_size=4).map(lambda values: {"enum": values}),
    st.just({}),
    st.integers(0, 9).map(lambda least: {"type": "integer", "minimum": least}),
    st.just({"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3}),
    st.just({"type": "array", "items": {"type": "string", "pattern": "^[^a]{1,20}$"}, "minItems": 1, "maxItems": 2}),
    st.just({"$ref": "#/$defs/d"}),
)
values = st.one_of(leaves, st.lists(leaves, min_size=1, max_size=3).map(lambda each: {"anyOf": each}))
functions = st.builds(
    lambda a, b, c, required, d: {**parameters(required, a=a, b=b, c=c), "$defs": {"d": d}},
    *(values, values, values),
    st.sets(st.sampled_from("abc")),
    st.sampled_from([{"type": "string"}, {"type": "integer"}]),
)


@pytest.mark.parametrize("name", TAGGED)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(schema=functions, seed=st.integers(0, 2**16))
def test_arguments_of_random_schemas_are_valid_or_refused(schema, seed, name, grammars, walker):
    try:
        forced(name, [Tool("f", schema)])
    except sd.GrammarError as error:
        place = error.place or ""
    else:
        place = None
        expect_walks_valid(name, schema, grammars, walker, range(seed, seed + 2))
    assert place is None or place.startswith("#/properties/")


def test_a_grammar_that_lets_a_mark_through_is_found(grammars, walker, monkeypatch):
    """The control: the walks find what is wrong, if a text may contain the mark of its end."""
    tool = Tool("f", parameters(a={"type": "string", "minLength": 9, "maxLength": 60}, b={"type": "string"}))
    monkeypatch.setattr(argument_elements, "NEVER", "\x01")
    asked = forced("qwen3_coder", [tool])

    texts = [walker.text(grammars.masks(asked, [EOS]), seed) for seed in range(60)]
    found = [read_arguments("qwen3_coder", tool, text) for text in texts if text is not None]
    assert not all(jsonschema.Draft202012Validator(tool.parameters).is_valid(each) for each in found)


@pytest.mark.parametrize(
    ("schema", "place", "message"),
    [
        (parameters(a={"type": "string", "pattern": "^<[a-z]+>$"}), "#/properties/a/pattern", "asks for '<'"),
        (parameters(a={"type": "string", "pattern": r"^[\S,]+$"}), "#/properties/a/pattern", "in a class"),
        (parameters(a={"enum": ["</parameter>"]}), "#/properties/a", "</parameter>, which ends a value"),
        (parameters(a={"enum": ["5", 5]}), "#/properties/a", "'5' would be read as a value of another type"),
        (parameters(a={"type": ["string", "integer"], "minimum": 3}), "#/properties/a", "leave out the limits"),
        (parameters(a={"type": "string", "format": "json-pointer"}), "#/properties/a/format", "'json-pointer'"),
        ({"type": "object", "properties": {"a<": {}}}, "#/properties/a<", "cannot be written"),
        ({"anyOf": [{"type": "object"}]}, "#/anyOf", "name each of them"),
        ({"type": "array"}, "#/type", "an object"),
        ({"type": "object", "patternProperties": {"^a": {}}}, "#/patternProperties", "name each of them"),
        ({**parameters(("b",), a={}, b={}), "minProperties": 2}, "#/minProperties", "name required parameters"),
        ({**parameters(a={}, b={}), "maxProperties": 1}, "#/maxProperties", "leave it out"),
    ],
)
def test_what_cannot_be_guaranteed_is_named(schema, place, message):
    with pytest.raises(sd.GrammarError) as caught:
        forced("qwen3_coder", [Tool("g", {"type": "object"}), Tool("f", schema)])
    assert caught.value.place == place
    assert str(caught.value).startswith(f"tools.1.function.parameters: {place}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^[A-Z]{3}$", "^[A-Z]{3}$"),
        ("a.b", rf"a[^{NEVER}\n\r]b"),
        ("[^ab]", f"[^{NEVER}ab]"),
        (r"[\s\S]*|\.", rf"[^{NEVER}]*|\."),
        ("[ -~]", "[ -;=-~]"),
        ("[!-<]|[<-z]|[a<]", "[!-;]|[=-z]|[a]"),
        (r"[\x20-\u007e]", r"[\x20-;=-\u007e]"),
        (r"[\w.-]+\D", rf"[\w.-]+[^{NEVER}0-9]"),
        ("[]a]", "[]a]"),
    ],
)
def test_patterns_are_narrowed_to_texts_without_marks(pattern, expected):
    assert narrowed(pattern) == expected


@pytest.mark.parametrize(
    "pattern", ["<", r"\x3c", r"\u{3c}", "[<]", "(?<a>b)", "[a", "\\", r"\p{L}", r"[\W]", r"[\d-z]"]
)
def test_patterns_of_which_too_little_is_known_are_refused(pattern):
    with pytest.raises(ValueError, match=r"it (asks|has|ends)"):
        narrowed(pattern)


@pytest.mark.parametrize("name", TAGGED)
def test_surrogates_count_as_what_they_decode_to(name):
    """Three bytes that are one surrogate decode to three characters, so a text of one character has none."""
    xgrammar = pytest.importorskip("xgrammar")
    vocabulary = [bytes([code]) for code in range(256)] + [b"<end>"]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[256]), max_threads=1)
    element = FORMATS[name]().calls([Tool("f", parameters(a={"type": "string", "maxLength": 1}))], 1)
    compiled = compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": element}))

    def accepts(value):
        matcher = xgrammar.GrammarMatcher(compiled)
        text = written(name, ("f", {"a": "@"})).strip("\n")
        return all(matcher.accept_token(code) for code in text.encode().replace(b"@", value))

    assert accepts("\ud7ff".encode())
    assert not accepts("\ud800".encode(errors="surrogatepass"))


def test_strict_calls_follow_the_schema_in_free_text(grammars, walker):
    """Whatever stands before them, and where a model leaves out the mark before a call."""
    tool = Tool("f", parameters(a={"type": "string", "maxLength": 5}))
    asked = forced("qwen3_coder", [tool], is_strict=True)
    for seed in range(12):
        text = walker.text(grammars.masks(asked, [EOS]), seed, begin="I call it.\n<tool_call>\n<function=f>\n")
        content, calls = reader_of(FORMATS["qwen3_coder"](), [], [tool]).add(text or "", is_last=True)
        assert content.startswith("I call it.") == bool(calls) == (text is not None)
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), tool.parameters)
    (mask,) = grammars.masks(asked, [EOS])
    tokens = grammars._tokenizer("x <function=f>", add_special_tokens=False).input_ids
    assert not all(mask.advance(token) for token in tokens)


def test_marks_that_are_special_tokens_are_kept(tokenizer):
    special = deepcopy(tokenizer)
    assert not AnswerFormat(special, [], tool_call_parser="qwen3_coder").calls.has_special_tokens
    special.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    assert AnswerFormat(special, [], tool_call_parser="qwen3_coder").calls.has_special_tokens
    assert not FORMATS["qwen3_coder"]().has_special_tokens
