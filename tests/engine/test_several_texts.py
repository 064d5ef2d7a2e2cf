"""``n``: several texts of a prompt, as that many requests with seeds of their own would be."""

from __future__ import annotations

import asyncio

import pytest

import specdec_fast as sd
from support.scripted import ByteTokenizer

PROMPTS = [[5, 6, 7], [8], [9] * 12]


def params_of(**fields):
    return sd.SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=0.9, logprobs=True, **fields)


def test_outputs_are_those_of_requests_with_their_seeds(pair):
    engine = sd.Engine(*pair, max_batch_size=4)
    counts = [3, 1, 2]
    params = [params_of(n=n, seed=10 * i) for i, n in enumerate(counts)]
    outputs = engine.generate(PROMPTS, params)
    assert [(o.index, o.choice) for o in outputs] == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    assert [o.seed for o in outputs] == [0, 1, 2, 10, 20, 21]
    for output in outputs:
        (alone,) = engine.generate([PROMPTS[output.index]], params_of(seed=output.seed))
        assert (output.token_ids, output.logprobs) == (alone.token_ids, alone.logprobs)
        assert output.prompt_ids == PROMPTS[output.index]
    assert len({tuple(o.token_ids) for o in outputs[:3]}) == 3
    completed = sorted(engine.as_completed(PROMPTS, params), key=lambda o: (o.index, o.choice))
    assert [o.token_ids for o in completed] == [o.token_ids for o in outputs]
    streamed = {}
    for chunk in engine.stream(PROMPTS, params):
        streamed.setdefault((chunk.index, chunk.choice), []).extend(chunk.token_ids)
    assert streamed == {(o.index, o.choice): o.token_ids for o in outputs}


def test_without_a_seed_each_text_draws_its_own(pair):
    outputs = sd.Engine(*pair).generate([PROMPTS[0]], params_of(n=4))
    assert len({o.seed for o in outputs}) == 4
    greedy = sd.Engine(*pair).generate([PROMPTS[0]], sd.SamplingParams(max_new_tokens=4, n=2))
    assert greedy[0].token_ids == greedy[1].token_ids


def test_a_prompt_is_encoded_once(pair):
    calls = []

    class Tokenizer(ByteTokenizer):
        def __call__(self, text, **options):
            calls.append(text)
            return type("Encoding", (), {"input_ids": [ord(c) % 97 for c in text]})

    engine = sd.Engine(*pair, tokenizer=Tokenizer([b"x"] * 97))
    outputs = engine.generate(["abc", ""], params_of(n=3, seed=0))
    assert calls == ["abc"]
    assert [o.prompt_ids for o in outputs[:3]] == [[0, 1, 2]] * 3
    assert [(o.index, o.choice, type(o.error)) for o in outputs[3:]] == [
        (1, i, sd.InvalidPromptError) for i in range(3)
    ]


def test_one_answer_of_a_service_is_one_text(pair):
    async def serve():
        async with sd.AsyncEngine(*pair) as engine:
            with pytest.raises(sd.InvalidParamsError, match="n=2: generate returns one text; use generate_choices"):
                await engine.generate(PROMPTS[0], params_of(n=2))
            return [await engine.generate(PROMPTS[0], choice) for choice in params_of(n=2, seed=4).choices()]

    with pytest.raises(sd.InvalidParamsError, match="n=0: expected"):
        params_of(n=0)
    outputs = sd.Engine(*pair).generate([PROMPTS[0]], params_of(n=2, seed=4))
    # choices() has texts of their own, which a service decodes one by one
    served = asyncio.run(serve())
    assert [o.token_ids for o in served] == [o.token_ids for o in outputs]
