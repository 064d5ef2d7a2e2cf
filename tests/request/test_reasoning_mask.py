"""Masks of reasoning: its end comes in time, whatever is drafted, and only there may the request end."""

from __future__ import annotations

import random

import numpy as np
import pytest

import specdec_fast as sd
from specdec_fast.request.token_masks import ALL_ALLOWED, TokenMasks, num_words

pytest.importorskip("xgrammar")

PROMPTS = {sd.ReasoningState.AHEAD: "One day", sd.ReasoningState.BEGUN: "One day <think>\n"}
CHOICE = {"choice": ["yes", "no"]}
# Of one byte and of several each; the last one begins with whitespace.
ENDS = ["</think>", "[/THINK]", "»»", "」終", " end"]


@pytest.fixture(scope="module")
def engine(target, tokenizer):
    return sd.Engine(target, None, tokenizer=tokenizer)


def masks_of(engine, prompt, **fields) -> TokenMasks:
    sequence = engine.request_builder().build(0, prompt, sd.SamplingParams(**fields))
    assert sequence.error is None
    assert sequence.masks is not None
    return sequence.masks


def allowed_of(row) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def rows_of(masks, emitted, drafted=(), parents=()):
    rows = np.full((len(drafted) + 1, num_words(masks.vocab_size)), ALL_ALLOWED, np.int32)
    masks.fill_rows(emitted, list(drafted), list(parents), rows)
    return rows


def confusing(tokenizer, end) -> list[int]:
    """Return tokens that may be a part of the end."""
    return sorted(
        {token for text in (end, end[:1], *end) for token in tokenizer(text, add_special_tokens=False).input_ids}
    )


@pytest.mark.parametrize("fields", [{}, {"structured_outputs": CHOICE}], ids=["any answer", "choice"])
@pytest.mark.parametrize("state", PROMPTS)
@pytest.mark.parametrize("end", ENDS)
def test_rows_do_not_depend_on_draft_tokens(engine, tokenizer, end, state, fields):
    """Trees of draft tokens are asked for on the way, in one of two sets of masks that follow the same text."""
    dice = random.Random(0)
    near = confusing(tokenizer, end)
    size = engine.target.vocab_size
    for most in (0, 1, 2, 5):
        fields = {**fields, "reasoning": sd.Reasoning(end=end, max_tokens=most), "max_new_tokens": 40}
        drafting, plain = (masks_of(engine, PROMPTS[state], **fields) for _ in range(2))
        emitted = tokenizer("<think>", add_special_tokens=False).input_ids if state is sd.ReasoningState.AHEAD else []
        for _ in range(20):
            drafted = [dice.choice(near) if dice.random() < 0.7 else dice.randrange(size) for _ in range(6)]
            parents = [dice.randrange(-1, node) for node in range(6)]
            for path in ([], drafted[:1], drafted[1:3]):
                drafting.row_behind(emitted, path)
            drafting.completed(emitted, [], 4)
            row = rows_of(drafting, emitted, drafted, parents)[0]
            (expected,) = rows_of(plain, emitted)
            assert (row == expected).all(), tokenizer.decode(emitted)
            allowed = [token for token in allowed_of(row) if token < size and token not in engine.target.eos_token_ids]
            if not allowed:
                break
            liked = [token for token in allowed if token in near]
            emitted.append(dice.choice(liked if liked and dice.random() < 0.7 else allowed))


@pytest.mark.parametrize("state", PROMPTS)
@pytest.mark.parametrize("end", ENDS)
def test_the_end_comes_in_time(engine, tokenizer, end, state):
    """Whatever of the allowed tokens is chosen; characters of several bytes may be completed first."""
    dice = random.Random(1)
    near = confusing(tokenizer, end)
    eos = engine.target.eos_token_ids
    begin = tokenizer(" <think>", add_special_tokens=False).input_ids if state is sd.ReasoningState.AHEAD else []
    num_ends = 0
    for most in [0, 1, 3, 6] * 8:
        masks = masks_of(engine, PROMPTS[state], reasoning=sd.Reasoning(end=end, max_tokens=most), max_new_tokens=99)
        emitted = list(begin)
        while end not in tokenizer.decode(emitted[len(begin) :]):
            num_tokens = len(emitted) - len(begin)
            allowed = [token for token in allowed_of(rows_of(masks, emitted)[0]) if token < engine.target.vocab_size]
            assert not eos.intersection(allowed)
            assert num_tokens <= most + 3 + len(end.encode())
            liked = [token for token in allowed if token in near]
            emitted.append(dice.choice(liked if liked and dice.random() < 0.3 else allowed))
        num_ends += 1
        free = allowed_of(rows_of(masks, emitted)[0])
        assert set(range(engine.target.vocab_size)) <= set(free), "the answer may be any text"
    assert num_ends == 32


def test_text_that_begins_otherwise_is_an_answer(engine, tokenizer):
    masks = masks_of(engine, PROMPTS[sd.ReasoningState.AHEAD], reasoning=sd.Reasoning(max_tokens=0))
    emitted: list[int] = []
    for token in tokenizer("<thin <think> a b", add_special_tokens=False).input_ids:
        (row,) = rows_of(masks, emitted)
        assert (row == ALL_ALLOWED).all()
        emitted.append(token)


def test_what_must_follow_is_drafted(engine, tokenizer):
    """Also the rest of an end that has been begun."""
    end = tokenizer("</think>", add_special_tokens=False).input_ids
    masks = masks_of(engine, PROMPTS[sd.ReasoningState.BEGUN], reasoning=sd.Reasoning(max_tokens=1))
    assert masks.completed([], [], 9) == []
    assert masks.completed([end[0]], [], 9) == end[1:]
    assert masks.completed(end, [], 9) == []


def test_a_stop_id_that_ends_the_reasoning_may_end_the_request(engine, tokenizer):
    (stop,) = tokenizer("x", add_special_tokens=False).input_ids
    fields = {"reasoning": sd.Reasoning(end="x", max_tokens=2), "stop_token_ids": [stop]}
    masks = masks_of(engine, PROMPTS[sd.ReasoningState.BEGUN], **fields)
    a = tokenizer("ab", add_special_tokens=False).input_ids[:1]
    assert stop in allowed_of(rows_of(masks, [])[0])
    assert allowed_of(rows_of(masks, a * 2)[0]) == [stop]
