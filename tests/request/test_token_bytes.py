"""The bytes of tokens: what a tokenizer makes of a text is that text again, byte by byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from specdec_fast.drafters.draft_model.text_tokens import TextTokens
from specdec_fast.request.token_bytes import bytes_of_tokens, complete
from support.other_tokenizers import byte_level, fast, sentencepiece

TEXTS = ["One day, a little bird flew over the park. ", "Zoë ate 3 crêpes — naïve!\n\n", "数 を 数える 🙂🙂 "] * 8
KINDS = {"byte-level": byte_level(TEXTS), "sentencepiece": sentencepiece(TEXTS)}
TOKENS = {kind: TextTokens.of(tokenizer, len(tokenizer)) for kind, tokenizer in KINDS.items()}

texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=24) | st.lists(
    st.sampled_from([*" \n.,'", "the", "🙂", "é", "数", "  ", "\t", "a", "</s", "▁"]), max_size=12
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts.filter(bool))
def test_tokens_of_a_text_have_its_bytes(kind, text):
    if kind == "sentencepiece":
        text = text.replace("▁", " ")  # its mark for a space
    data = text.encode()
    tokens = TOKENS[kind]
    assert tokens.bytes_of(tokens.encode_beginning(text)) == b" " * tokens.adds_space + data
    found = tokens.encode(data)
    assert found is not None
    assert tokens.bytes_of(found) == data


@pytest.mark.parametrize("kind", KINDS)
@given(before=texts, text=texts.filter(bool))
def test_tokens_behind_a_text_begin_where_it_ends(kind, before, text):
    tokens = TOKENS[kind]
    data = text.replace("▁", " ").encode()
    found = tokens.encode_behind(before.encode(), data)
    assert found is not None
    assert tokens.bytes_of(found) == data


def test_a_text_is_encoded_as_behind_the_text_before():
    tokens = TextTokens.of(byte_level(["a thereof the"] * 9, 300), 300)
    whole = tokens.encode(b"a thereof")
    tail = tokens.tail(whole[:-1])
    assert tokens.encode_behind(tokens.bytes_of(whole[tail:-1]), tokens.bytes_of(whole[-1:])) == whole[-1:]


@given(text=texts, cut=st.integers(0, 3))
def test_whole_characters(text, cut):
    data = text.encode()
    begun = data[: len(data) - cut]
    end = complete(begun)
    assert len(begun) - 3 <= end <= len(begun)
    assert text.startswith(begun[:end].decode())
    assert end == len(begun) or complete(begun[end:]) == 0


def test_bytes_that_no_byte_completes_are_whole():
    assert complete(b"ab\xff") == 3
    assert complete(b"ab\xc1") == 3
    assert complete(b"ab\xf4\x8f\xbf") == 2
    assert complete(b"\x80\x80\x80\x80") == 4
    assert complete(b"") == 0


def test_special_tokens_have_no_text_and_other_added_ones_have():
    tokenizer = byte_level(TEXTS)
    tokenizer.add_tokens(["<note>"])
    found = bytes_of_tokens(tokenizer)
    assert tokenizer.eos_token_id not in found
    assert found[tokenizer.convert_tokens_to_ids("<note>")] == b"<note>"


def test_tokens_come_in_the_order_of_ids():
    """A tokenizer lists its vocabulary in another order each time, and processes of one run must agree."""
    for tokenizer in KINDS.values():
        found = list(bytes_of_tokens(tokenizer))
        assert found == sorted(found)


def test_ids_that_only_the_tokenizer_has_are_left_out():
    tokenizer = byte_level(TEXTS)
    num_ids = len(tokenizer)
    tokenizer.add_tokens(["<note>"])
    tokenizer.add_special_tokens({"bos_token": "<begin>"})
    assert max(tokenizer("a bird <note>").input_ids) == num_ids
    tokens = TextTokens.of(tokenizer, num_ids)
    assert max(tokens.encode_beginning("a bird <note>")) < num_ids
    assert tokens.encode(b"a bird <note>") is None
    assert max(tokens.bytes_by_id) < num_ids
    assert "bos" not in tokens.roles
    assert "<note>" not in tokens.added


def test_other_kinds_are_not_known():
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    words.decoder = decoders.WordPiece()
    assert bytes_of_tokens(fast(words, None, None)) is None
    assert bytes_of_tokens(object()) is None


def test_a_tokenizer_with_steps_in_python_is_not_known():
    class Whole:
        def pre_tokenize(self, text):
            text.split(lambda _, piece: [piece])

    tokenizer = byte_level(TEXTS)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Whole())
    assert TextTokens.of(tokenizer, len(tokenizer)) is None


def panics(backend, text):
    try:
        backend.encode(text)
    except BaseException as error:
        return type(error).__name__ == "PanicException"
    return False


def test_a_text_that_makes_a_tokenizer_panic_has_no_tokens():
    """Two spaces that were added panic before a character of several bytes, if a step strips texts."""
    tokenizer = byte_level(TEXTS)
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    tokenizer.add_tokens(["  "])
    tokens = TextTokens.of(tokenizer, len(tokenizer))
    if not panics(tokenizer.backend_tokenizer, "é"):
        pytest.skip("this version of tokenizers does not panic")
    assert tokens.encode("é".encode()) is None
    assert tokens.encode_beginning("é") == []
    assert tokens.encode(b"bird") is not None


def test_neither_the_callers_settings_nor_spelt_special_tokens_matter():
    tokenizer = byte_level(TEXTS)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokens = TextTokens.of(tokenizer, len(tokenizer))
    found = tokens.encode(b"a bird <|end|> flew")
    assert tokens.bytes_of(found) == b"a bird <|end|> flew"
    assert tokenizer.eos_token_id not in found
