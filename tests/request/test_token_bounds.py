"""The lower bound on the number of tokens holds for every text, and is 0 where nothing is known."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.request.token_bounds import least_tokens
from support.decoder_kinds import BYTES
from support.fuzzing import fuzz
from support.scripted import ByteTokenizer

METASPACE = pre_tokenizers.Metaspace(prepend_scheme="always")


def byte_level(normalizer=None, pre_tokenizer=None, added=()):
    """The tokenizer of the bundled pair with other steps."""
    backend = AutoTokenizer.from_pretrained(demo_pair() / "target").backend_tokenizer
    backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, backend.pre_tokenizer])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_tokens(list(added))
    return tokenizer


def single_bytes(normalizer, added=()):
    """A token for every byte, and added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_tokens(list(added))
    return tokenizer


def fallback(normalizer=None, pre_tokenizer=METASPACE, num_bytes=256, **options):
    """BPE over characters, with byte fallback."""
    words = ["<unk>", *BYTES[:num_bytes], *"▁abé", "aa", "aaaa", "▁a"]
    merges = [("a", "a"), ("aa", "aa"), ("▁", "a")]
    options = {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True, **options}
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges, **options))
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend)


KNOWN = {
    "bytes": byte_level(),
    "bytes, NFC": single_bytes(normalizers.NFC()),
    "bytes, split": byte_level(pre_tokenizer=pre_tokenizers.Split(Regex("a+"), "isolated")),
    "bytes, swallowed spaces": single_bytes(None, added=[AddedToken("ab", lstrip=True, rstrip=True)]),
    "bytes, an added token that its normalisation makes longer": single_bytes(
        normalizers.Replace("a", "bbbb"), added=[AddedToken("a", normalized=True)]
    ),
    "fallback": fallback(),
    "fallback, replaced spaces": fallback(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None
    ),
}
UNKNOWN = {
    "lower case": byte_level(normalizers.Lowercase()),
    "stripped": byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
    "accents dropped": byte_level(normalizers.StripAccents()),
    "runs replaced": byte_level(normalizers.Replace(Regex(" {2,}"), " ")),
    "shortened": byte_level(normalizers.Replace("ab", "c")),
    "spaces dropped": byte_level(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "found and removed": byte_level(pre_tokenizer=pre_tokenizers.Split("a", "removed")),
    "bytes missing": fallback(num_bytes=255),
    "no fallback": fallback(byte_fallback=False),
    "characters dropped": fallback(byte_fallback=False, unk_token=None),
    "unknown words": PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    ),
    "own": ByteTokenizer([b"a"]),
    "none": None,
}


class OwnCall(PreTrainedTokenizerFast):
    def __call__(self, text, **options):
        return super().__call__(text[:10], **options)


PARTS = [
    *("a" * 40, "b" * 40, " " * 40, "ab", "\t\x1c\u2003", "é", "e\u0301", "\u1f82", "\u03b1\u0313\u0300\u0345"),
    *("\ufb2c", "\u05e9\u05bc\u05c1", "🚀", "\ufffd", "Ġ▁"),
]


@pytest.mark.parametrize("kind", KNOWN)
@fuzz(30)
@given(parts=st.lists(st.sampled_from(PARTS) | st.text(), max_size=8))
@example(parts=["ab", " " * 40])
def test_no_text_has_fewer_tokens(kind, parts):
    tokenizer, text = KNOWN[kind], "".join(parts)
    assert least_tokens(tokenizer, text) <= len(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("kind", KNOWN)
def test_long_texts_have_many_tokens(kind):
    assert least_tokens(KNOWN[kind], "word" * 5000) >= 1000


@pytest.mark.parametrize("kind", UNKNOWN)
def test_nothing_is_known_of_tokenizers_that_may_drop_or_join_characters(kind):
    assert least_tokens(UNKNOWN[kind], "word" * 5000) == 0


def test_nothing_is_known_of_a_tokenizer_with_code_of_its_own():
    assert least_tokens(OwnCall(tokenizer_object=byte_level().backend_tokenizer), "word" * 5000) == 0


def test_no_composition_of_unicode_is_longer_than_the_bound_assumes():
    composed = (chr(code) for code in range(0x110000) if unicodedata.decomposition(chr(code)))
    assert max(len(unicodedata.normalize("NFD", character)) for character in composed) == 4


def test_added_tokens_are_noticed():
    tokenizer = byte_level()
    before = least_tokens(tokenizer, "word" * 5000)
    tokenizer.add_tokens(["word" * 100])
    assert 0 < least_tokens(tokenizer, "word" * 5000) <= 50 < before


@pytest.mark.parametrize("options", [{}, {"add_special_tokens": True}], ids=["ids", "text"])
def test_a_prompt_that_is_too_long_is_refused_before_it_is_tokenised(target, monkeypatch, options):
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ messages[0].content }}"
    engine = sd.Engine(target, None, tokenizer=tokenizer)
    limit, params = engine.target.max_positions, sd.SamplingParams(max_new_tokens=1)
    text = "word " * 10 * limit
    expected = len(engine.encode(text))

    def encode(*args, **keywords):
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", encode)
    for prompt in (text, [{"role": "user", "content": text}]):
        (output,) = engine.generate([prompt], params, **options)
        with pytest.raises(sd.PromptTooLongError, match=rf"has {len(text)} characters, so at least .* {limit} pos"):
            output.raise_for_error()
    assert expected > limit
