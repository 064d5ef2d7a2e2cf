"""Text in pieces equals text as a whole, whatever the pieces; and which tokenizers have the same vocabulary."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdec_fast.assets import demo_pair
from specdec_fast.request.detokenizer import Detokenizer, load_tokenizer, same_vocabulary
from support.fuzzing import fuzz

INCOMPLETE = "\ufffd"
TOKENIZER = AutoTokenizer.from_pretrained(demo_pair() / "target")
# Characters of 1 to 4 bytes, none of which the tokenizer knows as one token: it splits them inside a character.
TEXTS = (
    "The quick brown fox.",
    "Grüße aus Köln: schöne Straße, naïve Œuvre",
    "I ❤️ 🚀 and 👩‍🚀👨‍👩‍👧 — 你好, мир!",
    "  spaces \n\n and\ttabs  ",
    "🚀" * 7,
)


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False).input_ids


def pieces_of(token_ids: list[int], cuts: list[int]) -> list[str]:
    """Give the ids to a Detokenizer in parts that begin at ``cuts``; the last part is announced as such."""
    bounds = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    detokenizer = Detokenizer(TOKENIZER)
    parts = [token_ids[a:b] for a, b in pairwise(bounds)]
    return [detokenizer.add(part, last=i == len(parts) - 1) for i, part in enumerate(parts)]


cuts = st.lists(st.integers(0, 500), max_size=30)


@pytest.mark.parametrize("text", TEXTS)
def test_token_by_token(text):
    token_ids = ids_of(text)
    assert TOKENIZER.decode(token_ids) == text
    pieces = pieces_of(token_ids, list(range(1, len(token_ids))))
    assert "".join(pieces) == text
    assert not any(INCOMPLETE in piece for piece in pieces)
    assert len(pieces) == len(token_ids)


def test_texts_do_split_characters():
    # otherwise nothing above would be held back, and decoding token by token would be right
    for text in TEXTS[1:3]:
        assert INCOMPLETE in "".join(TOKENIZER.decode([token]) for token in ids_of(text))


@fuzz(150)
@given(
    text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=30).filter(lambda t: INCOMPLETE not in t)),
    cuts=cuts,
)
def test_pieces_of_a_text_add_up(text, cuts):
    token_ids = ids_of(text)
    pieces = pieces_of(token_ids, cuts)
    assert "".join(pieces) == TOKENIZER.decode(token_ids, skip_special_tokens=True)
    assert not any(INCOMPLETE in piece for piece in pieces)


# What a model emits need not be a text: broken characters and special tokens anywhere.
@fuzz(150)
@given(token_ids=st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40), cuts=cuts)
@example(token_ids=[1, *ids_of("ü")[:1], 0, *ids_of("ü")[1:], 2], cuts=[1, 2, 3])
def test_pieces_of_any_tokens_add_up(token_ids, cuts):
    pieces = pieces_of(token_ids, cuts)
    assert "".join(pieces) == TOKENIZER.decode(token_ids, skip_special_tokens=True)
    detokenizer, given = Detokenizer(TOKENIZER), ""
    for n, token in enumerate(token_ids, start=1):
        given += detokenizer.add([token])
        text = TOKENIZER.decode(token_ids[:n], skip_special_tokens=True)
        num_broken = len(text) - len(text.rstrip(INCOMPLETE))
        assert given == text[: len(text) - min(num_broken, 3)], "no more than three bytes may yet be completed"


def test_last_piece_gives_out_what_was_held_back():
    token_ids = ids_of("a🚀")
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.add(token_ids[:-1]) in ("", "a")
    assert INCOMPLETE in detokenizer.add([], last=True)


def test_text_before_an_incomplete_character_is_certain():
    a_and_half, rest = ids_of("a🚀")[:-1], ids_of("a🚀")[-1:]
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.add(a_and_half), detokenizer.add(rest), detokenizer.add([], last=True)] == ["a", "🚀", ""]


def test_special_tokens_are_no_text():
    detokenizer = Detokenizer(TOKENIZER)
    eos = TOKENIZER.eos_token_id
    assert [detokenizer.add([eos]), detokenizer.add(ids_of("Hi")), detokenizer.add([eos], last=True)] == [
        "",
        "Hi",
        "",
    ]


class CountingTokenizer:
    """Counts the tokens it is made to decode."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, token_ids: list[int], **kwargs: object) -> str:
        self.num_decoded += len(token_ids)
        return TOKENIZER.decode(token_ids, **kwargs)


def test_long_text_costs_no_more_per_token():
    costs = []
    for repeats in (10, 40):
        tokenizer = CountingTokenizer()
        detokenizer, token_ids = Detokenizer(tokenizer), ids_of(TEXTS[2]) * repeats
        for token in token_ids:
            detokenizer.add([token])
        costs.append(tokenizer.num_decoded / len(token_ids))
    assert costs[1] <= 1.1 * costs[0]


def changed_tokenizer(change) -> PreTrainedTokenizerFast:
    """The demo tokenizer, its JSON description altered by ``change``."""
    description = json.loads(TOKENIZER.backend_tokenizer.to_str())
    change(description)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(description)))


def swap_two_words(description) -> None:
    vocab = description["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def drop_last_merge(description) -> None:
    left, right = description["model"]["merges"].pop()
    del description["model"]["vocab"][left + right]


def add_special_token(description) -> None:
    extra = {**description["added_tokens"][-1], "id": 1024, "content": "<tool>"}
    description["added_tokens"].append(extra)


def test_same_vocabulary():
    draft = AutoTokenizer.from_pretrained(demo_pair() / "draft")
    assert same_vocabulary(TOKENIZER, draft)
    assert same_vocabulary(TOKENIZER, changed_tokenizer(lambda description: None))


# Chat variants of one family add tokens of their own; their vocabulary is the same.
def test_same_vocabulary_but_for_added_tokens():
    more = changed_tokenizer(add_special_token)
    assert len(more) == len(TOKENIZER) + 1
    assert same_vocabulary(TOKENIZER, more)


@pytest.mark.parametrize("change", [swap_two_words, drop_last_merge], ids=lambda change: change.__name__)
def test_other_vocabulary(change):
    other = changed_tokenizer(change)
    assert not same_vocabulary(TOKENIZER, other)
    assert not same_vocabulary(other, TOKENIZER)


@pytest.mark.parametrize("name", [None, "", "no-such-folder/tokenizer"])
def test_no_tokenizer_beside_the_model(name):
    assert load_tokenizer(name) is None


def test_tokenizer_beside_the_model():
    assert load_tokenizer(str(demo_pair() / "target")).get_vocab() == TOKENIZER.get_vocab()
