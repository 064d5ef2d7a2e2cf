"""Fixtures: a small pair, requests of many kinds, and what plain decoding makes of each by itself."""

from __future__ import annotations

import random

import pytest

import specdec_fast as sd
from support.models import VOCAB_SIZE, tiny_model, truncated_copy
from support.services import NUM_REQUESTS


@pytest.fixture(scope="module")
def pair():
    target = tiny_model("llama")
    return target, truncated_copy(target, 2)


@pytest.fixture(scope="module")
def requests():
    """Greedy and sampled ones, of many lengths, some with a K of their own."""
    draw = random.Random(3)
    return [
        (
            [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 30))],
            sd.SamplingParams(
                max_new_tokens=draw.randint(1, 40),
                ignore_eos=True,
                temperature=0.8 * (i % 2),
                seed=i,
                logprobs=True,
                num_draft_tokens=draw.choice([None, 0, 2]),
            ),
        )
        for i in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module")
def expected(pair, requests):
    """What plain decoding makes of each request by itself."""
    engine = sd.Engine(pair[0], None, max_batch_size=1)
    outputs = [engine.generate([prompt], [params])[0] for prompt, params in requests]
    return [(output.token_ids, output.logprobs) for output in outputs]
