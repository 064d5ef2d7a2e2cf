"""Grammars are compiled once, in a process apart; what cannot be compiled in time is refused, others are not."""

from __future__ import annotations

import string
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

import specdec_fast as sd
from specdec_fast.server.tool_calls.formats import FORMATS, Tool
from specdec_fast.structured_outputs import compiling
from specdec_fast.structured_outputs.compiling import Grammars, NotCompiledError
from support.grids import each_value_once
from support.slow_grammars import SLOW, stopped_process

pytest.importorskip("xgrammar")

EOS = [1]
BEGINNINGS = {
    "hermes": '<tool_call>\n{"name": "write", "arguments": ',
    "qwen3": '<tool_call>\n{"name": "write", "arguments": ',
    "llama3_json": '{"name": "write", "parameters": ',
    "mistral": '[TOOL_CALLS][{"name": "write", "arguments": ',
    "mistral_args": "[TOOL_CALLS]write[ARGS]",
    "openai": "<|channel|>commentary to=functions.write <|constrain|>json<|message|>",
    "deepseek_v3": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n"),
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>",
}  # of formats whose arguments are JSON


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, 1024, EOS)


def asked(**fields):
    return sd.StructuredOutputs(**fields)


def message(grammars, **fields):
    with pytest.raises(sd.GrammarError) as caught:
        grammars.masks(asked(**fields), EOS)
    return str(caught.value)


def test_a_grammar_is_compiled_once(grammars, monkeypatch):
    first = asked(regex="once|twice")
    with pytest.raises(NotCompiledError):
        grammars.masks(first, EOS, may_compile=False)
    grammars.masks(first, EOS)
    monkeypatch.setattr(compiling._processes, "answer", lambda *job: pytest.fail("it was compiled again"))
    (mask,) = grammars.masks(first, EOS, may_compile=False)
    assert mask.allows_any()


def test_what_is_prepared_is_not_waited_for(tokenizer, monkeypatch):
    """The process runs and has the vocabulary, and the vocabulary is read."""
    grammars = Grammars(tokenizer, 1024, EOS)
    grammars.prepare()
    assert [process.is_alive for process in compiling._processes._idle]
    monkeypatch.setattr(compiling, "_Process", lambda: pytest.fail("a process was started"))
    monkeypatch.setattr(grammars, "_read_vocabulary", lambda skips: pytest.fail("the vocabulary was read again"))
    (mask,) = grammars.masks(asked(regex="prepared"), EOS)
    assert mask.allows_any()


@pytest.mark.parametrize("missing", ["xgrammar", "tokenizer"])
def test_nothing_is_prepared_where_nothing_can_be(tokenizer, monkeypatch, missing):
    if missing == "xgrammar":
        monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.setattr(compiling._processes, "answer", lambda *job: pytest.fail("something was compiled"))
    Grammars(None if missing == "tokenizer" else tokenizer, 1024, EOS).prepare()


def test_a_schema_with_texts_has_two_masks(grammars):
    """The second one is that of JSON: xgrammar's own grammar of a limited text lets control characters through."""
    assert len(grammars.masks(asked(json={"type": "string"}), EOS)) == 1
    masks = grammars.masks(asked(json={"type": "string", "maxLength": 3}), EOS)
    assert len(masks) == 2
    tokenizer = grammars._tokenizer
    opened, control = (tokenizer(text, add_special_tokens=False).input_ids[-1] for text in ('"', "\x1b"))
    assert all(mask.advance(opened) for mask in masks)
    assert masks[0].advance(control), "xgrammar has been mended: one mask will do"
    assert not masks[1].advance(control)


@pytest.mark.parametrize("skips_special", [True, False])
def test_a_special_token_is_refused_without_a_word(grammars, capfd, skips_special):
    """A drafter that copies a chat's special tokens must not fill the log of a server."""
    (mask,) = grammars.masks(asked(choice=["yes", "no"]), EOS, skips_special)
    assert not any(mask.advance(token) for token in (*EOS, *grammars._tokenizer.all_special_ids))
    assert mask.advance(grammars._tokenizer("yes", add_special_tokens=False).input_ids[0])
    assert capfd.readouterr().err == ""


@each_value_once
@pytest.mark.parametrize("is_free", [False, True], ids=["required", "auto"])
@pytest.mark.parametrize("name", BEGINNINGS)
def test_arguments_of_calls_have_two_masks(grammars, name, is_free):
    schema = {"type": "object", "properties": {"note": {"type": "string", "maxLength": 9}}, "required": ["note"]}
    tools = [Tool("look", {"type": "object"}), Tool("write", schema)]
    element = (FORMATS[name]().free_text if is_free else FORMATS[name]().calls)(tools, 1)
    masks = grammars.masks(asked(structural_tag={"type": "structural_tag", "format": element}), EOS)
    assert len(masks) == 2
    head = BEGINNINGS[name] + '{"note": "a'
    tokenizer = grammars._tokenizer

    def follows(text):
        """Return which masks allow a text behind the beginning of a call, whose tokens all allow."""
        found = []
        for mask in masks:
            tokens = tokenizer(head + text, add_special_tokens=False).input_ids
            num_followed = 0
            while num_followed < len(tokens) and mask.advance(tokens[num_followed]):
                num_followed += 1
            found.append(num_followed == len(tokens))
            mask.rollback(num_followed)
        return found

    assert follows("b") == [True, True]
    assert follows("\x1b") == [True, False], "xgrammar's grammar of a limited text lets control characters through"
    assert follows("b" * 9) == [False, True]


def test_other_structural_tags_have_one_mask(grammars):
    """Without limits of texts xgrammar's grammar is JSON; other parts of a text are not JSON."""
    for content in (
        {"type": "json_schema", "json_schema": {"type": "object"}},
        {"type": "const_string", "value": '"pattern":'},
    ):
        assert len(grammars.masks(asked(structural_tag={"type": "structural_tag", "format": content}), EOS)) == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"regex": "(a"}, "Regex parsing error at position 3: The parenthesis is not closed."),
        ({"regex": r"(a)\1"}, "Backreference is not supported"),
        ({"grammar": "root ::= missing"}, 'Rule "missing" is not defined'),
        ({"grammar": 'start ::= "a"'}, 'root rule with name "root" is not found'),
        ({"json": {"type": "string", "pattern": "("}}, "The parenthesis is not closed"),
        ({"structural_tag": {"type": "other"}}, "structural_tag"),
    ],
)
def test_what_cannot_be_compiled_is_named(grammars, fields, expected):
    found = message(grammars, **fields)
    assert expected in found
    assert "/project/" not in found


@pytest.mark.grid
def test_a_process_that_takes_too_long_is_killed(grammars, monkeypatch):
    monkeypatch.setattr(grammars, "_seconds", 0.3)
    assert "takes more than 0.3 s" in message(grammars, json=SLOW)
    monkeypatch.undo()
    (mask,) = grammars.masks(asked(regex="afterwards"), EOS)
    assert mask.allows_any()


def test_a_process_that_does_not_start_refuses_the_request(grammars, monkeypatch):
    monkeypatch.setattr(compiling, "_START", "raise SystemExit(1)")
    monkeypatch.setattr(compiling._processes, "_idle", [])
    assert "the process that compiles grammars could not be started" in message(grammars, regex="not started")


def test_a_process_that_ends_leaves_no_open_pipe():
    process = compiling._Process()
    own = process._process
    assert not own.stdin.closed
    process.kill()
    assert own.stdin.closed
    assert own.stdout.closed
    process.kill()  # of one that has ended


@pytest.mark.grid
def test_a_process_that_dies_is_replaced(grammars):
    grammars.masks(asked(regex="before"), EOS)
    for process in compiling._processes._idle:
        process.kill()
    grammars.masks(asked(regex="after"), EOS)


@pytest.mark.grid
def test_a_slow_grammar_does_not_delay_others(grammars, monkeypatch):
    begun = stopped_process(monkeypatch)
    with ThreadPoolExecutor(1) as executor:
        refused = executor.submit(message, grammars, json=SLOW)
        slow = begun.get()
        grammars.masks(asked(regex="meanwhile"), EOS)
        assert not refused.done()
        slow.kill()
        assert "the process has ended" in refused.result()


def test_the_oldest_leave_a_full_cache(tokenizer, monkeypatch):
    grammars = Grammars(tokenizer, 1024, EOS)
    first, second = asked(json={"type": "object"}), asked(json={"type": "array"})
    grammars.masks(first, EOS)
    monkeypatch.setattr(compiling, "_MOST_CACHED_BYTES", int(1.5 * grammars._num_bytes))
    grammars.masks(second, EOS)
    assert grammars.masks(second, EOS, may_compile=False)
    with pytest.raises(NotCompiledError):
        grammars.masks(first, EOS, may_compile=False)
    monkeypatch.setattr(compiling, "_MOST_CACHED_BYTES", 10)
    assert "once compiled" in message(grammars, regex="large")


def test_without_the_package_the_error_says_so(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    assert "pip install 'specdec-fast[grammar]'" in message(Grammars(tokenizer, 1024, EOS), regex="a")


def test_tokenizers_that_have_no_vocabulary():
    class Own:
        def decode(self, ids, **options):
            return ""

    assert "tokenizer, a Own" in message(Grammars(Own(), 1024, EOS), regex="a")
    assert "no tokenizer is known" in message(Grammars(None, 1024, EOS), regex="a")


def test_tokenizers_whose_texts_are_not_those_of_their_tokens():
    """WordPiece decodes with spaces between words, so "ab1" could come out as "ab 1"."""
    words = ["[UNK]", "[SEP]", *(mark + letter for letter in string.printable for mark in ("", "##"))]
    vocabulary = {word: token for token, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[SEP]")
    found = message(Grammars(tokenizer, len(tokenizer), EOS), regex="a")
    assert "xgrammar reads tokens of the tokenizer" in found
    assert "which it decodes to '{ \" name" in found


def test_a_request_must_be_able_to_end(grammars):
    with pytest.raises(sd.GrammarError, match="no token ends the request"):
        grammars.masks(asked(regex="a"), [])
    assert "allows no text" in message(grammars, json={"anyOf": [{"$ref": "#"}]})
