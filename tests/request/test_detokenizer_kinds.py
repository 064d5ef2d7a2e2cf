"""Text in pieces, and stop strings in it, for every kind of decoder: always what all tokens decode to."""

from __future__ import annotations

import random

import pytest
from tokenizers import decoders

from specdec_fast.request.detokenizer import Detokenizer
from specdec_fast.request.stopping import StopStrings
from specdec_fast.request.token_decoders import DecodingRule, rule_of
from support.decoder_kinds import KINDS, WAITING, random_ids

INCOMPLETE = "\ufffd"
EVERY = {**KINDS, **WAITING}
NUM_TEXTS = 125


@pytest.fixture(scope="module")
def made():
    return {}


@pytest.fixture(params=EVERY)
def kind(request, made):
    """Return the name and the tokenizer, made once."""
    if request.param not in made:
        made[request.param] = EVERY[request.param]()
    return request.param, made[request.param]


def blocks_of(token_ids, rng):
    """Cut ids into blocks of random lengths, as steps emit them."""
    blocks = []
    while token_ids:
        size = rng.randint(1, rng.choice((1, 3, 9)))
        blocks.append(token_ids[:size])
        token_ids = token_ids[size:]
    return blocks


def test_pieces_add_up(kind):
    """At every step the given out text and the rest are the text so far; what was given out never changes."""
    _, tokenizer = kind
    rng = random.Random(0)
    for _ in range(NUM_TEXTS):
        token_ids, given, so_far = random_ids(tokenizer, rng, rng.choice((5, 20, 90))), "", []
        detokenizer = Detokenizer(tokenizer)
        for block in blocks_of(token_ids, rng):
            given, so_far = given + detokenizer.add(block), so_far + block
            if rng.random() < 0.3:
                assert given + detokenizer.rest() == tokenizer.decode(so_far, skip_special_tokens=True)
        given += detokenizer.add([], last=True)
        assert given == tokenizer.decode(token_ids, skip_special_tokens=True)


def by_definition(tokenizer, token_ids, stop):
    """Return how many tokens there are and the text before the first stop string, by decoding every beginning."""
    for n in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:n], skip_special_tokens=True)
        begins = [text.index(s) for s in stop if s in text]
        if begins:
            return n, text[: min(begins)], "stop"
    return len(token_ids), tokenizer.decode(token_ids, skip_special_tokens=True), "length"


def test_stop_strings_are_found_where_the_text_has_them(kind):
    _, tokenizer = kind
    rng, num_found = random.Random(1), 0
    for _ in range(NUM_TEXTS):
        token_ids = random_ids(tokenizer, rng, rng.choice((5, 20, 40)))
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        starts = [rng.randrange(len(text) + 1) for _ in range(2)]
        stop = tuple(s for s in (text[i : i + rng.randint(1, 5)] for i in starts) if s and INCOMPLETE not in s)
        if not stop:
            continue
        want = by_definition(tokenizer, token_ids, stop)
        watched, emitted, given, reason = StopStrings(Detokenizer(tokenizer), stop), [], "", None
        blocks = blocks_of(token_ids, rng)
        for number, block in enumerate(blocks, start=1):
            tokens, reason = watched.cut(block, "length" if number == len(blocks) else None)
            emitted, given = emitted + tokens, given + watched.take(last=reason is not None)
            if reason is not None:
                break
        assert (len(emitted), given, reason) == want
        num_found += reason == "stop"
    assert num_found > 10


def test_what_is_broken_at_the_end_counts_there():
    """A text that ends in half a character contains the replacement character, which may be a stop string."""
    tokenizer = KINDS["Llama-2"]()
    token_ids = [tokenizer.convert_tokens_to_ids(word) for word in ("a", "<0xC3>")]
    watched = StopStrings(Detokenizer(tokenizer), (INCOMPLETE,))
    assert watched.cut(token_ids[:1], None) == (token_ids[:1], None)
    assert watched.cut(token_ids[1:], "length") == (token_ids[1:], "stop")
    assert watched.take(last=True) == "a"


@pytest.mark.parametrize("name", EVERY)
def test_only_unknown_decoders_wait(name):
    assert rule_of(EVERY[name]()).waits == (name in WAITING)


def test_text_before_a_run_of_bytes_is_given_out():
    tokenizer = KINDS["Llama-2"]()
    words = ["▁a", "▁é", "<0xC3>", "<0xA9>", "<0xC3>", "<0xA9>", "n", "<0xFF>"]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add([tokenizer.convert_tokens_to_ids(word)]) for word in words]
    assert pieces == ["a", " é", "", "", "", "", "één", ""]
    assert detokenizer.rest() == INCOMPLETE


def test_one_more_byte_changes_a_whole_run():
    """That is why complete characters are held back."""
    tokenizer = KINDS["Llama-2"]()
    ids = [tokenizer.convert_tokens_to_ids(word) for word in ("<0xC3>", "<0xA9>", "<0xFF>")]
    assert (tokenizer.decode(ids[:2]), tokenizer.decode(ids)) == ("é", INCOMPLETE * 3)


def test_clean_text_is_given_out_but_for_its_end():
    tokenizer = KINDS["WordPiece, cleaned"]()
    words = ["it", "'", "s", "do", "n't", "not", "a", "."]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add([tokenizer.convert_tokens_to_ids(word)]) for word in words]
    assert pieces == ["it", "", "'s", " do", "n't", " not", " a", "."]


def test_clean_up_changes_no_more_than_is_held_back():
    """The hold-back against the function itself, on texts of the letters that matter."""
    tokenizer = KINDS["WordPiece, cleaned"]()
    rng = random.Random(2)

    for _ in range(3000):
        text = "".join(rng.choice("    ''nvrtmse.,a") for _ in range(rng.randint(0, 14)))
        detokenizer = Detokenizer(tokenizer)
        detokenizer._decode = lambda ids: "".join(map(chr, ids))  # a token is a character
        detokenizer._rule = DecodingRule(cleans=True)
        given = ""
        for letter in text:
            given += detokenizer.add([ord(letter)])
        assert given + detokenizer.rest() == tokenizer.clean_up_tokenization(text), text


def test_tokens_added_later_are_known():
    tokenizer = KINDS["Llama-2"]()
    assert len(rule_of(tokenizer).special_ids) == 1
    tokenizer.add_tokens(["<tool>"], special_tokens=True)
    assert len(rule_of(tokenizer).special_ids) == 2


class CountingDecoder:
    """Counts the tokens that a tokenizer is made to decode."""

    def __init__(self, tokenizer):
        self.num_decoded, self._decode = 0, tokenizer._tokenizer.decode
        tokenizer._tokenizer = self
        self.decoder = decoders.Fuse()

    def decode(self, token_ids, **kwargs):
        self.num_decoded += len(token_ids)
        return self._decode(token_ids, **kwargs)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("seed", [3, None], ids=["random", "one token"])
def test_long_text_costs_no_more_per_token(name, seed):
    costs = []
    for length in (100, 800):
        tokenizer = KINDS[name]()
        rng = random.Random(seed)
        token_ids = [tokenizer.convert_tokens_to_ids("<0xFF>") or 5] * length if seed is None else []
        while len(token_ids) < length:
            token_ids += random_ids(tokenizer, rng, 50)
        detokenizer = Detokenizer(tokenizer)
        counting = CountingDecoder(tokenizer)
        for token in token_ids:
            detokenizer.add([token])
        costs.append(counting.num_decoded / len(token_ids))
    assert costs[1] <= 1.5 * costs[0] + 1
