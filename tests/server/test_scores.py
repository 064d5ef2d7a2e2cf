"""Log-probabilities over HTTP: of the k most likely tokens, of prompts, and of echoes without new tokens."""

from __future__ import annotations

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import specdec_fast as sd
from specdec_fast.server.answers import ChatAnswer, CompletionAnswer
from specdec_fast.server.protocol import ChatBody, CompletionBody
from support.asgi import served
from support.chats import HELLO
from support.decoder_kinds import BYTES, KINDS

TEXT = "Once upon a time, there was"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def reference(engine):
    def generate(prompt, **params):
        params = sd.SamplingParams(**{"max_new_tokens": 8, **params})
        return engine.engine.generate([prompt], params, progress=False)[0]

    return generate


def texts_of(tokenizer, ids):
    """Each token's text behind the one before; the demo pair's tokenizer joins texts."""
    return [tokenizer.decode([token]) for token in ids]


def test_the_most_likely_tokens_of_a_completion(app, reference, chat_tokens):
    fields = {"prompt": TEXT, "max_tokens": 8, "temperature": 0.9, "seed": 5, "logprobs": 3, "return_token_ids": True}
    (exchange,) = served(app, (COMPLETIONS, fields))
    want = reference(TEXT, temperature=0.9, seed=5, logprobs=3)
    (choice,) = exchange.json["choices"]
    found = choice["logprobs"]
    assert Completion.model_validate(exchange.json).choices[0].logprobs.tokens == found["tokens"]
    assert choice["token_ids"] == want.token_ids
    assert found["token_logprobs"] == want.logprobs
    for text, value, top, ours in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], want.top_logprobs, strict=True
    ):
        assert top == dict(zip(texts_of(chat_tokens, ours), ours.values(), strict=True)) | {text: value}
        assert len(top) in (3, 4), "with the token itself"


@pytest.mark.parametrize("stream", [False, True])
def test_the_most_likely_tokens_of_a_chat(app, reference, chat_tokens, stream):
    body = {"messages": HELLO, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    (exchange,) = served(app, (CHATS, body | {"stream": stream, "prompt_logprobs": 1}))
    ids = chat_tokens.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    want = reference(ids, logprobs=2, prompt_logprobs=1)
    if stream:
        events = exchange.events[:-1]
        [ChatCompletionChunk.model_validate(event) for event in events]
        content = [entry for event in events for entry in event["choices"][0]["logprobs"]["content"]]
        assert all("prompt_logprobs" not in event for event in events[1:])
        shown = events[0]["prompt_logprobs"]
    else:
        content = exchange.json["choices"][0]["logprobs"]["content"]
        assert len(ChatCompletion.model_validate(exchange.json).choices[0].logprobs.content) == 8
        shown = exchange.json["prompt_logprobs"]
    assert [entry["logprob"] for entry in content] == want.logprobs
    for entry, top in zip(content, want.top_logprobs, strict=True):
        assert [each["token"] for each in entry["top_logprobs"]] == texts_of(chat_tokens, top)
        assert [each["logprob"] for each in entry["top_logprobs"]] == list(top.values())
        assert entry["top_logprobs"][0]["bytes"] == list(entry["token"].encode())
        assert "top_logprobs" not in entry["top_logprobs"][0]
    expect_prompt_logprobs(shown, want, chat_tokens)


def expect_prompt_logprobs(shown, want, tokenizer):
    """vLLM's shape: null, and then by id the token itself and the most likely ones, with ranks and texts."""
    assert shown[0] is None
    assert len(shown) == len(want.prompt_ids)
    places = zip(want.prompt_ids, want.prompt_logprobs, want.prompt_ranks, want.prompt_top_logprobs, shown, strict=True)
    for token, value, rank, top, entries in list(places)[1:]:
        assert set(map(int, entries)) == {token, *top}
        assert entries[str(token)] == {"logprob": value, "rank": rank, "decoded_token": tokenizer.decode([token])}
        for place, (other, logprob) in enumerate(top.items(), start=1):
            entry = {"logprob": logprob, "rank": place, "decoded_token": tokenizer.decode([other])}
            assert entries[str(other)] == entry


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_the_prompt_of_a_completion(app, reference, chat_tokens, stream):
    body = {"prompt": [TEXT, "The"], "max_tokens": 8, "temperature": 0, "prompt_logprobs": 2, "stream": stream}
    (exchange,) = served(app, (COMPLETIONS, body))
    events = exchange.events[:-1] if stream else [exchange.json]
    shown = {c["index"]: c["prompt_logprobs"] for event in events for c in event["choices"] if "prompt_logprobs" in c}
    for index, prompt in enumerate((TEXT, "The")):
        expect_prompt_logprobs(shown[index], reference(prompt, prompt_logprobs=2), chat_tokens)
    assert all(c["logprobs"] is None for event in events for c in event["choices"])


def joined(choices):
    """Join the choices of events as clients do."""
    found = {"text": "", "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in choices:
        found["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            found[name] += values
    return found


@pytest.mark.parametrize("max_tokens", [0, 1, 8])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_scores_of_the_prompt(app, engine, reference, chat_tokens, stream, max_tokens):
    ids = chat_tokens(TEXT).input_ids
    body = {"prompt": ids, "max_tokens": max_tokens, "echo": True, "logprobs": 2, "temperature": 0, "stream": stream}
    (exchange,) = served(app, (COMPLETIONS, body))
    choices = [event["choices"][0] for event in (exchange.events[:-1] if stream else [exchange.json])]
    found = joined(choices)
    emitted = reference(TEXT, max_new_tokens=max_tokens).token_ids if max_tokens else []
    (score,) = engine.engine.score([ids + emitted], top_logprobs=2)
    assert found["token_logprobs"] == [None, *score.logprobs]
    assert found["top_logprobs"][0] is None
    for top, ours in zip(found["top_logprobs"][1:], score.top_logprobs, strict=True):
        assert max(top.values()) == max(ours.values())
        assert set(ours.values()) <= set(top.values())
    assert found["text"] == chat_tokens.decode(ids + emitted, skip_special_tokens=True)
    for token, text, offset in zip(ids + emitted, found["tokens"], found["text_offset"], strict=True):
        assert token in chat_tokens.all_special_ids or found["text"].startswith(text, offset)
    assert choices[-1]["finish_reason"] == "length"
    if not stream:
        usage = {"prompt_tokens": len(ids), "completion_tokens": max_tokens, "total_tokens": len(ids) + max_tokens}
        assert usage.items() <= exchange.json["usage"].items()


def test_what_an_evaluation_harness_reads(app, engine):
    """Continuations of contexts, several in one request: their log-probabilities, and whether they are greedy.

    The harness sends whole texts as ids, with one new token, which it drops.
    """
    contexts = [[41, 84, 90], [5, 6], [70, 71, 72, 73]]
    greedy = engine.engine.generate(contexts, sd.SamplingParams(max_new_tokens=5, logprobs=True), progress=False)
    continuations = [greedy[0].token_ids, [9, 9, 9], [greedy[2].token_ids[0], 9]]
    texts = [context + continuation for context, continuation in zip(contexts, continuations, strict=True)]
    body = {"model": "demo", "prompt": texts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    (exchange,) = served(app, (COMPLETIONS, body | {"echo": True}))
    assert [choice["index"] for choice in exchange.json["choices"]] == [0, 1, 2]
    sums = []
    is_greedy = []
    for choice, context in zip(exchange.json["choices"], contexts, strict=True):
        values = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        sums.append(sum(values))
        is_greedy.append(all(value == max(top.values()) for value, top in zip(values, tops, strict=True)))
    scores = engine.engine.score(texts)
    assert sums == [sum(s.logprobs[len(c) - 1 :]) for s, c in zip(scores, contexts, strict=True)]
    assert is_greedy == [True, False, False]
    assert sums[0] == sum(greedy[0].logprobs)


def test_an_echo_alone(app, chat_tokens):
    """Without new tokens and without log-probabilities it is the text of the prompt."""
    requests = [(COMPLETIONS, {"prompt": p, "max_tokens": 0, "echo": True, "n": 2}) for p in (TEXT, [41], [41, 84])]
    for exchange, text in zip(served(app, *requests), (TEXT, *map(chat_tokens.decode, ([41], [41, 84]))), strict=True):
        assert [(c["text"], c["logprobs"], c["finish_reason"]) for c in exchange.json["choices"]] == [
            (text, None, "length")
        ] * 2
        assert exchange.json["usage"]["completion_tokens"] == 0


def test_wrong_values_are_the_clients_fault(app):
    bodies = [
        {"prompt": "a", "n": 0},
        {"prompt": "a", "logprobs": -1},
        {"prompt": "a", "prompt_logprobs": 21},
        {"prompt": "a", "priority": "high"},
        {"prompt": "a", "priority": 2**63},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "best_of": 2},
    ]
    for body, exchange in zip(bodies, served(app, *((COMPLETIONS, body) for body in bodies)), strict=True):
        assert (exchange.status, exchange.json["error"]["param"]) == (400, list(body)[1])


@pytest.mark.parametrize("name", ["Llama-2", "ByteLevel", "WordPiece", "suffix"])
def test_the_texts_of_an_echo_join_to_it(name):
    """Some tokenizers decode a token alone without the space before it: the first one, and the first emitted one."""
    tokenizer = KINDS[name]()
    usable = [i for i in range(len(tokenizer)) if tokenizer.decode([i], skip_special_tokens=True)]
    usable = [i for i in usable if "\ufffd" not in tokenizer.decode([i])]
    usable = [i for i in usable if tokenizer.convert_ids_to_tokens(i) not in BYTES]
    tokens = (usable * 9)[:9]
    prompt, ids = tokens[:5], tokens[5:]
    scores = {"logprobs": [-1.0] * 4, "prompt_logprobs": [None] + [-2.0] * 4}
    text = tokenizer.decode(ids)
    whole = sd.GenerationOutput(0, prompt, ids, text, "length", sd.DecodingStats(), **scores)
    body = CompletionBody.model_validate({"prompt": prompt, "logprobs": 0, "echo": True})
    (choice,) = CompletionAnswer(body, "1", "model", tokenizer).whole([whole])["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"][5:]) == text
    assert "".join(found["tokens"]) == choice["text"] == tokenizer.decode(prompt) + text
    assert all(choice["text"].startswith(*pair) for pair in zip(found["tokens"], found["text_offset"], strict=True))


def test_a_first_chunk_without_text_has_the_scores_of_the_prompt(tokenizer):
    body = CompletionBody.model_validate({"prompt": [5, 6], "prompt_logprobs": 0, "stream": True})
    answer = CompletionAnswer(body, "1", "model", tokenizer)
    scores = {"prompt_logprobs": [None, -1.0], "prompt_ranks": [None, 4]}
    first = json.loads(answer.event_json(0, sd.StreamChunk(0, [7], "", **scores), [5, 6]))
    assert first["choices"][0]["prompt_logprobs"][1]["6"]["rank"] == 4
    second = json.loads(answer.event_json(0, sd.StreamChunk(0, [8], "a", "length"), [5, 6]))
    assert "prompt_logprobs" not in second["choices"][0]


def test_minus_infinity_and_equal_texts(tokenizer):
    """JSON has no infinity. Of tokens with one text, the most likely one counts."""
    half, other = tokenizer("é ï").input_ids[1:3]
    assert tokenizer.decode([half]) == tokenizer.decode([other]) == "\ufffd"
    infinity = float("inf")
    tops = [{half: -0.5, other: -2.0, 70: -infinity}]
    whole = sd.GenerationOutput(0, [5, 6], [other], "x", "length", sd.DecodingStats(), None, [-2.0], None, 0, tops)
    scored = sd.GenerationOutput(
        **{
            **vars(whole),
            "prompt_logprobs": [None, -infinity],
            "prompt_ranks": [None, 90],
            "prompt_top_logprobs": [None, {}],
        }
    )
    body = CompletionBody.model_validate({"prompt": [5, 6], "logprobs": 3, "echo": True, "prompt_logprobs": 0})
    (choice,) = CompletionAnswer(body, "1", "model", tokenizer).whole([scored])["choices"]
    json.dumps(choice, allow_nan=False)
    assert choice["logprobs"]["top_logprobs"][-1] == {"\ufffd": -0.5, tokenizer.decode([70]): -9999.0}
    assert choice["logprobs"]["token_logprobs"] == [None, -9999.0, -2.0]
    entry = {"logprob": -9999.0, "rank": 90, "decoded_token": tokenizer.decode([6])}
    assert choice["prompt_logprobs"] == [None, {"6": entry}]
    body = ChatBody.model_validate({"messages": HELLO, "logprobs": True, "top_logprobs": 2})
    (choice,) = ChatAnswer(body, "1", "model", tokenizer).whole([whole])["choices"]
    assert [each["logprob"] for each in choice["logprobs"]["content"][0]["top_logprobs"]] == [-0.5, -2.0]
