"""Answers behind reasoning: they follow their schema, the reasoning its limit, and speculation changes neither."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest

import specdec_fast as sd
from specdec_fast.assets import demo_pair

pytest.importorskip("xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["bird", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["animal", "age"],
    "additionalProperties": False,
}
LIMIT = 12
PROMPTS = {
    sd.ReasoningState.AHEAD: "One day, a little bird",
    sd.ReasoningState.BEGUN: "One day, a little bird <think>\n",
    sd.ReasoningState.ENDED: "One day, a little bird <think>\n\n</think>\n\n",
}
THINK = sd.Reasoning(max_tokens=LIMIT)
JSON = sd.SamplingParams(max_new_tokens=120, structured_outputs={"json": SCHEMA}, reasoning=THINK)
# Hot enough that some texts begin with reasoning and others with the answer.
SAMPLED = [replace(JSON, temperature=3.0, seed=seed) for seed in range(12)]
DRAFTERS = {
    "draft model": lambda draft: (draft, {"num_draft_tokens": 5}),
    "ngram": lambda draft: ("ngram", {"num_draft_tokens": 3}),
    "trees": lambda draft: (demo_pair() / "eagle3", {"num_draft_tokens": 4}),
}


@pytest.fixture(scope="module")
def plain(target, tokenizer):
    return sd.Engine(target, None, tokenizer=tokenizer, max_batch_size=8)


def generate(engine, state, params):
    outputs = engine.generate([PROMPTS[state]] * len(params), params, progress=False)
    return [output.raise_for_error() for output in outputs]


@pytest.mark.parametrize("state", sd.ReasoningState)
def test_answers_follow_the_schema_behind_the_reasoning(plain, tokenizer, state):
    outputs = generate(plain, state, [JSON, *SAMPLED])
    num_reasoned = 0
    for output in outputs:
        assert output.finish_reason == "stop"
        reasoning, answer = THINK.split(output.text, state)
        jsonschema.validate(json.loads(answer), SCHEMA)
        reasoned = output.text.partition(THINK.end)[0] if THINK.end in output.text else ""
        num_reasoned += bool(reasoned)
        assert len(reasoning) <= len(reasoned)
    assert num_reasoned == {"ahead": num_reasoned, "begun": len(outputs), "ended": 0}[state.value]
    if state is sd.ReasoningState.AHEAD:
        assert 0 < num_reasoned < len(outputs), "both kinds were drawn"


@pytest.mark.parametrize("with_schema", [True, False], ids=["schema", "any answer"])
def test_reasoning_has_at_most_its_tokens(plain, tokenizer, with_schema):
    """The limit also holds where the answer may be anything."""
    lengths = {}
    for most in (0, 3, LIMIT):
        limited = [
            replace(
                params,
                max_new_tokens=40,
                reasoning=sd.Reasoning(max_tokens=most),
                structured_outputs=params.structured_outputs if with_schema else None,
            )
            for params in SAMPLED[:4]
        ]
        outputs = generate(plain, sd.ReasoningState.BEGUN, limited)
        lengths[most] = [num_reasoning_tokens(output, tokenizer) for output in outputs]
    assert {most: max(found) for most, found in lengths.items()} == {0: 0, 3: 3, LIMIT: LIMIT}


def num_reasoning_tokens(output, tokenizer):
    """Count the tokens before the end, which may be written in any tokens; a character may lack its last bytes."""
    reasoning, mark, _ = output.text.partition(THINK.end)
    assert mark
    texts = (tokenizer.decode(output.token_ids[:count]) for count in range(len(output.token_ids)))
    return max(count for count, text in enumerate(texts) if reasoning.startswith(text.rstrip("\ufffd")))


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("state", sd.ReasoningState)
def test_a_text_is_the_same_with_and_without_speculation(plain, target, draft, tokenizer, state, name):
    drafter, options = DRAFTERS[name](draft)
    engine = sd.Engine(target, drafter, tokenizer=tokenizer, max_batch_size=3, **options)
    free = replace(JSON, structured_outputs=None, max_new_tokens=30)
    params = [JSON, *SAMPLED[:3], free, replace(free, temperature=1.0, seed=5)]
    found = generate(engine, state, params)
    assert [output.token_ids for output in found] == [output.token_ids for output in generate(plain, state, params)]


def test_a_continued_message_may_be_in_the_midst_of_its_reasoning(plain):
    messages = [{"role": "user", "content": "A bird?"}, {"role": "assistant", "content": "<think>\nLet me see, the"}]
    template = "{% for m in messages %}{{ m.content }}{% if not loop.last %}\n{% endif %}{% endfor %}"
    options = {"chat_template": template, "continue_final_message": True}
    (output,) = plain.generate([messages], JSON, progress=False, **options)
    _, answer = THINK.split(output.raise_for_error().text, sd.ReasoningState.BEGUN)
    jsonschema.validate(json.loads(answer), SCHEMA)
    assert not output.text.startswith(("{", THINK.begin))


def test_marks_that_are_special_tokens_need_them_in_the_text(plain, target, tokenizer):
    special = tokenizer.decode([0])
    assert 0 in tokenizer.all_special_ids
    params = replace(JSON, reasoning=sd.Reasoning(begin=special, end="</think>", max_tokens=3))
    wrong, right = plain.generate(
        [PROMPTS[sd.ReasoningState.AHEAD]] * 2, [params, replace(params, skip_special_tokens=False)], progress=False
    )
    assert isinstance(wrong.error, sd.GrammarError)
    assert f"{special!r} is a special token" in str(wrong.error)
    assert right.finish_reason == "stop"
