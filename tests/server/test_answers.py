"""Answers of OpenAI's API: whole ones, and that the events of a stream add up to them."""

from __future__ import annotations

import json
import random
from itertools import chain

import pytest

import specdec_fast as sd
from specdec_fast.server.answers import ChatAnswer, CompletionAnswer
from specdec_fast.server.protocol import ChatBody, CompletionBody
from support.decoder_kinds import BYTES, KINDS, SPECIAL

LOGPROBS = [-0.5, float("-inf"), -1.0, -2.0]


@pytest.fixture
def ids(tokenizer):
    """Four tokens; the first two are halves of a character."""
    tokens = tokenizer("é and").input_ids[1:]
    assert tokenizer.decode(tokens) == "é and"
    assert len(tokens) >= 3
    return tokens[:4]


def output(tokenizer, ids, index=0, prompt=(5, 6, 7), reason="length", error=None):
    text, logprobs = tokenizer.decode(ids), LOGPROBS[: len(ids)]
    return sd.GenerationOutput(index, list(prompt), ids, text, reason, sd.DecodingStats(), error, logprobs)


def chunks(tokenizer, ids):
    """One token each; the text of an incomplete character comes with its last token."""
    sent, found = 0, []
    for i in range(len(ids)):
        text = tokenizer.decode(ids[: i + 1]).rstrip("\ufffd")
        reason = "length" if i == len(ids) - 1 else None
        found.append(sd.StreamChunk(0, [ids[i]], text[sent:], reason, None, [LOGPROBS[i]]))
        sent = len(text)
    return found


def completion(tokenizer, **fields):
    body = CompletionBody.model_validate({"prompt": [5, 6, 7], **fields})
    return CompletionAnswer(body, "1", "model", tokenizer)


def chat(tokenizer, **fields):
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "Hi"}], **fields})
    return ChatAnswer(body, "1", "model", tokenizer)


def joined(lists):
    return list(chain.from_iterable(lists))


def test_a_whole_completion(tokenizer, ids):
    body = completion(tokenizer, logprobs=0, return_token_ids=True).whole([output(tokenizer, ids)])
    (choice,) = body["choices"]
    assert (body["id"], body["object"], body["model"]) == ("cmpl-1", "text_completion", "model")
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "total_tokens": 3 + len(ids),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (choice["text"], choice["finish_reason"], choice["index"]) == (tokenizer.decode(ids), "length", 0)
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (ids, [5, 6, 7])
    found = choice["logprobs"]
    assert found["tokens"] == [tokenizer.decode([token]) for token in ids]
    assert found["token_logprobs"][:3] == [-0.5, -9999.0, -1.0], "JSON has no infinity"
    assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(len(ids))]


def test_a_whole_chat(tokenizer, ids):
    (choice,) = chat(tokenizer, logprobs=True).whole([output(tokenizer, ids, reason="stop")])["choices"]
    assert choice["message"]["content"] == tokenizer.decode(ids)
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content][:3] == [-0.5, -9999.0, -1.0]
    for token, entry in zip(ids, content, strict=True):
        text = tokenizer.decode([token])
        assert entry["token"] == text
        assert entry["bytes"] == (None if "\ufffd" in text else list(text.encode()))


@pytest.mark.parametrize("name", ["Llama-2", "Gemma", "ByteLevel", "WordPiece", "Unigram, Metaspace", "suffix"])
def test_the_texts_of_tokens_join_to_the_text(name):
    """Some tokenizers decode a token alone without the space before it; then offsets would not fit the text."""
    tokenizer, rng = KINDS[name](), random.Random(0)
    bytes_and_specials = {tokenizer.convert_tokens_to_ids(token) for token in [*BYTES, SPECIAL]}
    size = len(tokenizer)
    for _ in range(20):
        ids = [token for token in rng.choices(range(size), k=8) if token not in bytes_and_specials]
        ids = [token for token in ids if "\ufffd" not in tokenizer.decode([token])]
        text = tokenizer.decode(ids)
        whole = sd.GenerationOutput(0, [1], ids, text, "length", sd.DecodingStats(), None, [-1.0] * len(ids))
        (choice,) = completion(tokenizer, logprobs=0).whole([whole])["choices"]
        found = choice["logprobs"]
        assert "".join(found["tokens"]) == text
        assert all(text.startswith(*pair) for pair in zip(found["tokens"], found["text_offset"], strict=True))
        answer = chat(tokenizer, logprobs=True, stream=True)
        events = [answer.event(0, sd.StreamChunk(0, [token], "", None, None, [-1.0]), [1]) for token in ids]
        content = joined(event["choices"][0]["logprobs"]["content"] for event in events)
        assert [entry["token"] for entry in content] == found["tokens"]


def test_prompts_and_choices_are_counted_once(tokenizer, ids):
    answer = completion(tokenizer, prompt=[[1, 2], [3]], n=2)
    outputs = [output(tokenizer, ids, prompt=prompt) for prompt in ([1, 2], [1, 2], [3], [3])]
    body = answer.whole(outputs)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 4 * len(ids)


def test_echo_puts_the_prompt_before_every_choice(tokenizer, ids):
    outputs = [output(tokenizer, ids, prompt=prompt) for prompt in ([1, 2], ids)]
    for prompt, texts in ((["a", "b"], ["a", "b"]), ([[70, 71], ids], [None, tokenizer.decode(ids)])):
        choices = completion(tokenizer, prompt=prompt, echo=True).whole(outputs)["choices"]
        for choice, text, one in zip(choices, texts, outputs, strict=True):
            echoed = tokenizer.decode(one.prompt_ids, skip_special_tokens=True) if text is None else text
            assert choice["text"] == echoed + tokenizer.decode(ids)


def test_an_error_of_one_choice_is_raised(tokenizer, ids):
    failed = output(tokenizer, ids, reason="error", error=sd.StepError("failed"))
    with pytest.raises(sd.StepError):
        completion(tokenizer, prompt=[[1], [2]]).whole([output(tokenizer, ids), failed])


@pytest.mark.parametrize("kind", [completion, chat])
@pytest.mark.parametrize("with_usage", [True, False])
def test_events_add_up_to_the_whole_answer(tokenizer, ids, kind, with_usage):
    logprobs = 0 if kind is completion else True
    fields = {"logprobs": logprobs, "return_token_ids": True, "stream": True}
    answer = kind(tokenizer, **fields, stream_options={"include_usage": with_usage})
    events = [answer.event(0, chunk, [5, 6, 7]) for chunk in chunks(tokenizer, ids)]
    assert all(("usage" in event) is with_usage for event in events)
    whole = kind(tokenizer, **fields).whole([output(tokenizer, ids)])
    (expected,) = whole["choices"]
    choices = [event["choices"][0] for event in events]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(ids) - 1) + ["length"]
    assert joined(choice["token_ids"] for choice in choices) == expected["token_ids"]
    # As in vLLM: in the choices of completions, which may have several prompts, and beside those of a chat.
    places = choices if kind is completion else events
    assert places[0]["prompt_token_ids"] == [5, 6, 7]
    assert not any("prompt_token_ids" in place for place in places[1:])
    assert (expected if kind is completion else whole)["prompt_token_ids"] == [5, 6, 7]
    if kind is completion:
        assert "".join(choice["text"] for choice in choices) == expected["text"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert joined(choice["logprobs"][name] for choice in choices) == expected["logprobs"][name]
    else:
        assert choices[0]["delta"]["role"] == "assistant"
        assert not any("role" in choice["delta"] for choice in choices[1:])
        content = "".join(choice["delta"].get("content", "") for choice in choices)
        assert content == expected["message"]["content"]
        assert joined(choice["logprobs"]["content"] for choice in choices) == expected["logprobs"]["content"]
    usage = answer.usage_event([(3, 0)])
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])


@pytest.mark.parametrize("kind", [completion, chat])
@pytest.mark.parametrize("shows", ["texts", "ids", "usage", "logprobs"])
def test_the_json_of_events_is_that_of_their_bodies(tokenizer, kind, shows):
    """Also for two choices in turns, texts that JSON escapes, and texts and ids that look like what is replaced."""
    options = {"logprobs": 0 if kind is completion else True} if shows == "logprobs" else {}
    options |= {"return_token_ids": shows == "ids", "stream_options": {"include_usage": shows == "usage"}}
    texts = ["one", "", "\0", '"\\\n\u2028', "\ud800", " é", "[-1]", "end"]
    logprobs = [-1.0, -2.0] if shows == "logprobs" else None
    answers = [kind(tokenizer, n=2, stream=True, **options) for _ in range(2)]
    for i, text in enumerate(texts):
        for index in (0, 1):
            chunk = sd.StreamChunk(index, [i, 7], text, "stop" if text == "end" else None, None, logprobs)
            body = answers[0].event(index, chunk, [5, 6])
            assert answers[1].event_json(index, chunk, [5, 6]) == (None if body is None else json.dumps(body))
    assert answers[0].usage_event([(2, 1), (2, 2)]) == answers[1].usage_event([(2, 1), (2, 0)])


def test_a_chunk_without_text_makes_no_event_but_counts(tokenizer):
    answer = completion(tokenizer, stream=True)
    assert answer.event(0, sd.StreamChunk(0, [1], ""), [5]) is None
    assert answer.event(0, sd.StreamChunk(0, [2], "a", "stop"), [5])["choices"][0]["text"] == "a"
    assert answer.usage_event([(1, 0)])["usage"]["completion_tokens"] == 2


def test_an_engine_without_a_tokenizer_answers_with_token_ids():
    answer = completion(None, logprobs=0, return_token_ids=True, echo=False)
    output = sd.GenerationOutput(0, [5], [6], None, "length", sd.DecodingStats(), None, [-1.0])
    (choice,) = answer.whole([output])["choices"]
    assert (choice["text"], choice["token_ids"], choice["logprobs"]["tokens"]) == ("", [6], ["token_id:6"])
