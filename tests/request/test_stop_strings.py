"""Stop strings: which token ends a request and where its text ends; speculating or not, whole or in chunks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from transformers import GenerationConfig

import specdec_fast as sd
from support.demo import MAX_NEW_TOKENS
from support.grids import each_value_once, grid
from support.models import tiny_model
from support.scripted import INCOMPLETE, ByteTokenizer, scripted_model

ROCKET = "🚀".encode()
K = 4


@dataclass(frozen=True)
class Case:
    """The pieces of text that a model emits, and where the text has to end."""

    name: str
    pieces: tuple[str | bytes, ...]
    stop: tuple[str, ...]
    num_tokens: int
    text: str
    reason: str = "stop"
    max_new_tokens: int | None = None  # None: as many as there are pieces
    stop_piece: int | None = None  # the index of a piece whose token is a stop id
    prompt: tuple[str, ...] = ()  # how the prompt ends


# Token 0 is not drafted. If all is accepted, 1 to 4 are the drafts of the first block, 5 its bonus, 6 the next first.
LETTERS = tuple("abcdefg")
CASES = (
    Case("inside one token", ("ab", "c END d", "e"), ("END",), 2, "abc "),
    Case("a whole token", ("ab", "END", "e"), ("END",), 2, "ab"),
    Case("over two tokens", ("ab", "cEN", "Dd", "e"), ("END",), 3, "abc"),
    Case("over three tokens", ("ab", "cE", "N", "Dd", "e"), ("END",), 4, "abc"),
    Case("first token", LETTERS, ("a",), 1, ""),
    Case("first draft", LETTERS, ("b",), 2, "a"),
    Case("second draft", LETTERS, ("c",), 3, "ab"),
    Case("middle draft", LETTERS, ("d",), 4, "abc"),
    Case("last draft", LETTERS, ("e",), 5, "abcd"),
    Case("bonus", LETTERS, ("f",), 6, "abcde"),
    Case("next block", LETTERS, ("g",), 7, "abcdef"),
    Case("over two blocks", LETTERS, ("efg",), 7, "abcd"),
    Case("two in a block", LETTERS, ("d", "b"), 2, "a"),
    Case("earlier token before earlier beginning", ("a", "bc", "d"), ("abcd", "bc"), 2, "a"),
    Case("one token completes two", ("x", "abcy", "z"), ("bc", "ab"), 2, "x"),
    Case("one token completes a long one and one inside", ("x", "abcdy", "z"), ("bc", "abcd"), 2, "x"),
    Case("overlapping", ("xa", "b", "c"), ("bc", "ab"), 2, "x"),
    Case("one begins another", ("xa", "bcd", "e"), ("abc", "ab"), 2, "x"),
    Case("overlapping, the other", ("xb", "ab", "c"), ("bc", "abb"), 3, "xba"),
    Case("begins again inside its own beginning", ("a", "a", "a", "b", "c"), ("aab",), 4, "a"),
    Case("almost, then not", ("E", "N", "x", "E", "N", "D", "y"), ("END",), 6, "ENx"),
    Case("almost, to the end", ("a", "E", "N"), ("END",), 3, "aEN", "length"),
    Case("longer than the text", ("a", "b", "c"), ("abcdefghijklmnopqrstuvwxyz",), 3, "abc", "length"),
    Case("not there", LETTERS, ("x", "ba"), 7, "abcdefg", "length"),
    Case("last token allowed", LETTERS, ("c",), 3, "ab", max_new_tokens=3),
    Case("just beyond the last token allowed", LETTERS, ("d",), 3, "abc", "length", max_new_tokens=3),
    Case("stop id first", LETTERS, ("c",), 2, "ab", stop_piece=1),
    Case("stop id later", LETTERS, ("b",), 2, "a", stop_piece=2),
    Case("stop id in the same token", LETTERS, ("b",), 2, "a", stop_piece=1),
    Case("stop id inside a beginning", ("a", "E", "N", "D"), ("END",), 3, "aEN", stop_piece=2),
    Case("in the prompt only", LETTERS, ("END",), 7, "abcdefg", "length", prompt=("END",)),
    Case("begins in the prompt", ("D", "a", "END"), ("END",), 3, "Da", prompt=("E", "N")),
    Case("a character over four tokens", ("a", *(bytes([b]) for b in ROCKET), "b"), ("🚀",), 5, "a"),
    Case("begins in a token with half a character", (b"x\xc3", b"\xbcy", "z"), ("üy",), 2, "x"),
    Case("begins before half a character", (b"wx\xc3", b"\xbcy", "z"), ("xü",), 2, "w"),
    Case("complete before half a character", (b"wx\xc3", b"\xbcy", "z"), ("x",), 1, "w"),
    Case("half a character is no match", (b"x\xc3", b"\xbcy", "z"), ("xé", "\xc3"), 3, "xüyz", "length"),
    Case("ends in half a character", ("a", ROCKET[:3]), ("ab",), 2, "a" + INCOMPLETE, "length"),
    Case("what is incomplete does not count", ("a", ROCKET[:3], ROCKET[3:], "b"), (INCOMPLETE,), 4, "a🚀b", "length"),
    Case("what is incomplete at the end counts", ("a", ROCKET[:3]), (INCOMPLETE,), 2, "a"),
    Case("what is broken counts", (b"a\xff", "b", "c"), (INCOMPLETE,), 2, "a"),
)  # fmt: skip


class Play:
    """One model whose script holds all cases in a row; the length of a case's prompt selects its place in it."""

    def __init__(self, cases: tuple[Case, ...]) -> None:
        self.cases = cases
        vocabulary: dict[bytes, int] = {b"-": 0}
        script: list[int] = []
        self.prompts, self.params, self.want = [], [], []

        def token_of(piece: str | bytes) -> int:
            return vocabulary.setdefault(piece.encode() if isinstance(piece, str) else piece, len(vocabulary))

        for case in cases:
            script += [0] * len(case.prompt)  # room for the prompt's end
            tokens = [token_of(piece) for piece in case.pieces]
            ends = [token_of(piece) for piece in case.prompt]
            self.prompts.append([0] * (len(script) + 1 - len(ends)) + ends)
            stop_ids = () if case.stop_piece is None else (tokens[case.stop_piece],)
            limit = len(tokens) if case.max_new_tokens is None else case.max_new_tokens
            self.params.append(sd.SamplingParams(max_new_tokens=limit, stop=case.stop, stop_token_ids=stop_ids))
            self.want.append((tokens[: case.num_tokens], case.text, case.reason))
            script += tokens
        self.tokenizer = ByteTokenizer(list(vocabulary))
        self.models = {
            "none": scripted_model(script, len(vocabulary)),
            # wrong at every third position
            "draft": scripted_model([0 if p % 3 == 2 else t for p, t in enumerate(script)], len(vocabulary)),
        }

    def engine(self, draft: str = "none", num_draft_tokens: int = K, method: str = "eqspec") -> sd.Engine:
        target = self.models["none"]
        drafts = {"none": None, "itself": target, "draft": self.models["draft"], "ngram": "ngram"}
        options = {"num_draft_tokens": num_draft_tokens, "method": method, "max_batch_size": 8}
        return sd.Engine(target, drafts[draft], tokenizer=self.tokenizer, **options)


def joined(chunks, num_prompts):
    """Add the chunks of each prompt up; return (ids, text, reason) of each."""
    whole = [([], "", None) for _ in range(num_prompts)]
    for chunk in chunks:
        token_ids, text, reason = whole[chunk.index]
        assert reason is None, "a chunk after the last"
        whole[chunk.index] = (token_ids + chunk.token_ids, text + chunk.text, chunk.finish_reason)
    return whole


def summary(outputs):
    return [(o.token_ids, o.text, o.finish_reason) for o in outputs]


@pytest.fixture(scope="module")
def play():
    return Play(CASES)


SETTINGS = [("none", 0, "eqspec"), ("none", 0, "exspec")] + [
    (draft, k, method) for draft in ("itself", "draft", "ngram") for k in range(1, 6) for method in ("eqspec", "exspec")
]


@each_value_once
@pytest.mark.parametrize(("draft", "num_draft_tokens", "method"), grid(SETTINGS, keep=SETTINGS[1::7]))
def test_every_case_in_one_batch(play, draft, num_draft_tokens, method):
    engine = play.engine(draft, num_draft_tokens, method)
    outputs = engine.generate(play.prompts, play.params)
    for case, output, want in zip(CASES, summary(outputs), play.want, strict=True):
        assert output == want, case.name
    chunks = list(engine.stream(play.prompts, play.params))
    for case, whole, want in zip(CASES, joined(chunks, len(CASES)), play.want, strict=True):
        assert whole == want, case.name
    texts = [chunk.text for chunk in chunks if chunk.finish_reason is None]
    assert not any(INCOMPLETE in text for text in texts), "a character was split"
    assert engine.core.pool.num_free_pages == engine.core.pool.num_pages


def test_a_text_may_have_the_stop_string_that_ended_it(play):
    """Of several that begin at its place the shortest; tokens are the same, and chunks join to the same text."""
    engine = play.engine("draft")
    params = [replace(each, include_stop_str_in_output=True) for each in play.params]
    found = summary(engine.generate(play.prompts, params))
    assert joined(engine.stream(play.prompts, params), len(CASES)) == found
    num_with_stop = 0
    for case, (token_ids, text, reason), want in zip(CASES, found, play.want, strict=True):
        assert (token_ids, reason) == (want[0], want[2]), case.name
        at_its_end = play.tokenizer.decode(token_ids)[len(case.text) :]
        stops = sorted((stop for stop in case.stop if at_its_end.startswith(stop)), key=len)
        assert text == case.text + (stops[0] if stops else ""), case.name
        num_with_stop += bool(stops)
    assert num_with_stop > len(CASES) / 2


def test_cases_stand_where_they_say(play):
    """With the target as its own draft the block behind the first token has K + 1 tokens, or is cut."""
    engine = play.engine("itself")
    blocks = {case.name: [] for case in CASES}
    for chunk in engine.stream(play.prompts, play.params):
        blocks[CASES[chunk.index].name].append((len(chunk.token_ids), chunk.finish_reason))
    assert blocks["first token"] == [(1, "stop")]
    for number, name in enumerate(("first draft", "second draft", "middle draft", "last draft", "bonus"), start=1):
        assert blocks[name] == [(1, None), (number, "stop")]
    assert blocks["next block"] == [(1, None), (K + 1, None), (1, "stop")]


# What a stream gives out token by token: nothing that may still become a stop string, everything else at once.
@pytest.mark.parametrize(
    ("name", "texts"),
    [("almost, then not", ["", "", "ENx", "", "", ""]), ("almost, to the end", ["a", "", "EN"]),
     ("begins again inside its own beginning", ["", "", "a", ""]), ("over three tokens", ["ab", "c", "", ""]),
     ("not there", ["a", "", "bc", "d", "e", "f", "g"]), ("longer than the text", ["", "", "abc"]),
     ("half a character is no match", ["", "xüy", "z"]), ("complete before half a character", ["w"]),
     ("begins before half a character", ["w", ""]), ("ends in half a character", ["", "a" + INCOMPLETE])],
)  # fmt: skip
def test_what_is_held_back(play, name, texts):
    index = next(i for i, case in enumerate(CASES) if case.name == name)
    chunks = play.engine().stream([play.prompts[index]], play.params[index])
    assert [chunk.text for chunk in chunks] == texts


@pytest.fixture(scope="module")
def stopped(expected, tokenizer):
    """Per bundled prompt a stop string out of the middle of its text, the tokens up to it and the text before it."""
    found = []
    for tokens in expected:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        stop = text[len(text) // 2 :][:4]
        texts = (tokenizer.decode(tokens[:n], skip_special_tokens=True) for n in range(1, len(tokens) + 1))
        n = next((n for n, text in enumerate(texts, start=1) if stop in text.rstrip(INCOMPLETE)), None)
        assert n is not None, "some stop string is found in every text"
        found.append((stop, tokens[:n], text[: text.index(stop)]))
    assert sum(len(tokens) > K + 1 for _, tokens, _ in found) > 8, "most are found after the first block"
    return found


@each_value_once
@pytest.mark.parametrize("method", ["eqspec", "exspec"])
@pytest.mark.parametrize("drafter", ["none", "model", "ngram"])
def test_bundled_pair(target, draft, tokenizer, prompt_ids, stopped, drafter, method):
    drafts = {"none": None, "model": draft, "ngram": "ngram"}
    engine = sd.Engine(target, drafts[drafter], method=method, max_batch_size=4, tokenizer=tokenizer)
    params = [sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS, stop=stop) for stop, _, _ in stopped]
    want = [(tokens, text, "stop") for _, tokens, text in stopped]
    assert summary(engine.generate(prompt_ids, params)) == want
    assert joined(engine.stream(prompt_ids, params), len(want)) == want


def test_others_of_the_batch_go_on(target, draft, tokenizer, prompt_ids, expected, stopped):
    params = [
        sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS, stop=stop if i % 2 else ())
        for i, (stop, _, _) in enumerate(stopped)
    ]
    outputs = sd.Engine(target, draft, tokenizer=tokenizer).generate(prompt_ids, params)
    want = [stopped[i][1] if i % 2 else tokens for i, tokens in enumerate(expected)]
    assert [o.token_ids for o in outputs] == want
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in expected]
    assert [o.text for o in outputs] == [stopped[i][2] if i % 2 else text for i, text in enumerate(texts)]


def test_tokens_are_those_of_transformers(target, draft, tokenizer, prompt_ids, stopped):
    """``stop_strings`` of a GenerationConfig end both at the same token; transformers' text has the stop string too."""
    engine = sd.Engine(target, draft, tokenizer=tokenizer)
    for prompt, (stop, tokens, _) in list(zip(prompt_ids, stopped, strict=True))[:6]:
        config = GenerationConfig(max_new_tokens=MAX_NEW_TOKENS, do_sample=False, stop_strings=[stop])
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        theirs = target.generate(ids, attention_mask=mask, generation_config=config, tokenizer=tokenizer)
        assert theirs[0, len(prompt) :].tolist() == tokens
        assert engine.generate([prompt], config)[0].token_ids == tokens


def test_without_a_tokenizer_only_the_request_that_needs_one_fails():
    engine = sd.Engine(tiny_model("llama"), None)
    params = [sd.SamplingParams(max_new_tokens=3, stop=stop) for stop in ((), ("END",), ())]
    outputs = engine.generate([[5], [6], [7]], params)
    alone = [engine.generate([[token]], params[0])[0].token_ids for token in (5, 7)]
    assert [outputs[0].token_ids, outputs[2].token_ids] == alone
    assert (outputs[1].token_ids, outputs[1].text, outputs[1].finish_reason) == ([], None, "error")
    with pytest.raises(sd.MissingTokenizerError, match=r"stop=\('END',\), but no tokenizer.*pass tokenizer="):
        outputs[1].raise_for_error()
    (chunk,) = engine.stream([[6]], params[1])
    assert (chunk.finish_reason, type(chunk.error)) == ("error", sd.MissingTokenizerError)
