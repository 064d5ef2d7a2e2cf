"""Tokenizers that raise: the request they were called for ends with a typed error, and no other does."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import specdec_fast as sd
from specdec_fast.request.detokenizer import load_tokenizer
from support.grids import each_value_once
from support.scripted import ByteTokenizer, scripted_model

PIECES = [b"-", b"a", b"b", b"c", b"d", b"X", b"e", b"f", b"g", *(bytes([byte]) for byte in "é🚀".encode())]
BAD = PIECES.index(b"X")
SCRIPTS = [b"abcdefg", b"abXcdef", b"gfedcba"]  # each begins at another position
NUM_TOKENS = 7


def panic():
    """Let Rust code panic: a decoder looks for the last character of an empty text."""
    backend = Tokenizer(models.WordLevel({"!!!": 0}, unk_token="!!!"))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip("!", 2, 2)])
    backend.decode([0])


def interrupt():
    raise KeyboardInterrupt


def error(kind, *args):
    def fail():
        raise kind(*args)

    return fail


FAILURES = {
    "RuntimeError": error(RuntimeError, "broken"),
    "KeyError": error(KeyError, BAD),
    "StopIteration": error(StopIteration),
    "AssertionError": error(AssertionError),
    "PanicException": panic,
    "TypeError": lambda: None,  # and decode returns None
}


class Failing(ByteTokenizer):
    """Decodes bytes, but calls a function on one token."""

    def __init__(self, fail):
        super().__init__(PIECES)
        self.fail = fail

    def decode(self, token_ids, **kwargs):
        return self.fail() if BAD in token_ids else super().decode(token_ids, **kwargs)


@pytest.fixture(scope="module")
def model():
    return scripted_model([PIECES.index(bytes([byte])) for byte in b"".join(SCRIPTS)], len(PIECES))


def prompts():
    return [[0] * (1 + NUM_TOKENS * i) for i in range(len(SCRIPTS))]


def engine_of(model, tokenizer, num_draft_tokens):
    return sd.Engine(model, model, tokenizer=tokenizer, num_draft_tokens=num_draft_tokens)


def streamed(engine, params):
    """Return ids, text and last chunk of every prompt."""
    whole = [([], "", None) for _ in SCRIPTS]
    for chunk in engine.stream(prompts(), params):
        token_ids, text, last = whole[chunk.index]
        assert last is None or last.finish_reason is None, "a chunk after the last"
        whole[chunk.index] = (token_ids + chunk.token_ids, text + chunk.text, chunk)
    return whole


@each_value_once
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
@pytest.mark.parametrize("kind", FAILURES)
def test_tokens_that_cannot_be_decoded(model, kind, num_draft_tokens):
    engine = engine_of(model, Failing(FAILURES[kind]), num_draft_tokens)
    params = sd.SamplingParams(max_new_tokens=NUM_TOKENS)
    outputs = engine.generate(prompts(), params)
    assert [b"".join(PIECES[t] for t in o.token_ids) for o in outputs] == SCRIPTS
    assert [o.text for o in outputs] == ["abcdefg", "ab", "gfedcba"]
    assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
    with pytest.raises(sd.DetokenizationError, match=rf"cannot decode token_ids, which are kept .*: {kind}"):
        outputs[1].raise_for_error()
    for output, (token_ids, text, last) in zip(outputs, streamed(engine, params), strict=True):
        assert (token_ids, text, last.finish_reason) == (output.token_ids, output.text, output.finish_reason)
        assert (last.error is None) == (output.error is None)
    assert engine.core.pool.num_free_pages == engine.core.pool.num_pages


@each_value_once
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
@pytest.mark.parametrize("kind", FAILURES)
def test_stop_strings_end_where_they_cannot_be_looked_for(model, kind, num_draft_tokens):
    engine = engine_of(model, Failing(FAILURES[kind]), num_draft_tokens)
    params = sd.SamplingParams(max_new_tokens=NUM_TOKENS, stop=("ef", "ba", "bc"), logprobs=True)
    params = [params, params, sd.SamplingParams(max_new_tokens=NUM_TOKENS, stop="zzz")]
    outputs = engine.generate(prompts(), params)
    assert [o.text for o in outputs] == ["a", "ab", "gfedcba"]
    assert [o.finish_reason for o in outputs] == ["stop", "error", "length"]
    assert [len(o.token_ids) for o in outputs] == [3, 3, NUM_TOKENS]
    assert [o.logprobs and len(o.logprobs) for o in outputs] == [3, 3, None]
    with pytest.raises(sd.DetokenizationError, match=kind):
        outputs[1].raise_for_error()
    for output, (token_ids, text, last) in zip(outputs, streamed(engine, params), strict=True):
        assert (token_ids, text, last.finish_reason) == (output.token_ids, output.text, output.finish_reason)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit], ids=lambda kind: kind.__name__)
def test_what_ends_a_program_is_no_failure(model, kind):
    engine = engine_of(model, Failing(error(kind)), 4)
    with pytest.raises(kind):
        engine.generate(prompts(), sd.SamplingParams(max_new_tokens=NUM_TOKENS))
    with pytest.raises(kind):
        list(engine.stream(prompts(), sd.SamplingParams(max_new_tokens=NUM_TOKENS, stop="zzz")))
    assert engine.core.pool.num_free_pages == engine.core.pool.num_pages


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_a_text_that_is_whole_at_the_end_is_no_failure(num_draft_tokens):
    """A strict UTF-8 decoder raises while the last character lacks some of its bytes."""

    class Strict(ByteTokenizer):
        def decode(self, token_ids, **kwargs):
            return b"".join(self.pieces[token] for token in token_ids).decode()

    script = [PIECES.index(bytes([byte])) for byte in "aé🚀b".encode()]
    engine = engine_of(scripted_model(script, len(PIECES)), Strict(PIECES), num_draft_tokens)
    params = sd.SamplingParams(max_new_tokens=len(script))
    (output,) = engine.generate([[0]], params)
    assert (output.text, output.error) == ("aé🚀b", None)
    chunks = list(engine.stream([[0]], params))
    assert ("".join(chunk.text for chunk in chunks), chunks[-1].error) == ("aé🚀b", None)


class Own:
    """A tokenizer with nothing but what the engine calls; its vocabulary is empty."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __len__(self):
        return 0

    def __call__(self, text):
        return self.tokenizer(text)

    def decode(self, token_ids, skip_special_tokens):
        return "own"


def test_a_custom_tokenizer_beside_a_draft_model(target, draft, tokenizer):
    """It need not list its vocabulary, which then is not compared; it is accepted even if its length is 0."""
    assert load_tokenizer(draft.config._name_or_path) is not None
    engine = sd.Engine(target, draft, tokenizer=Own(tokenizer))
    (output,) = engine.generate("Items:", sd.SamplingParams(max_new_tokens=3))
    assert output.text == "own"


def test_prompt_on_which_a_tokenizer_panics(target, tokenizer):
    class Panicking:
        decode = tokenizer.decode

        def __call__(self, text):
            if text == "bad":
                backend = Tokenizer(models.WordLevel({"u": 0}, unk_token="u"))
                backend.pre_tokenizer = pre_tokenizers.FixedLength(0)
                backend.encode(text)
            return tokenizer(text)

    engine = sd.Engine(target, None, tokenizer=Panicking())
    outputs = engine.generate(["Items:", "bad", "One day"], sd.SamplingParams(max_new_tokens=3))
    assert [o.finish_reason == "error" for o in outputs] == [False, True, False]
    with pytest.raises(sd.InvalidPromptError, match="cannot encode the prompt: PanicException: chunk size"):
        outputs[1].raise_for_error()
