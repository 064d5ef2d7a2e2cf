"""One batch of short and long prompts, greedy, sampled and penalised, and its outputs with any drafter."""

from __future__ import annotations

import specdec_fast as sd
from support.models import VOCAB_SIZE

LENGTHS = (1, 2, 33, 9, 17, 5)
PROMPTS = [[(7 * i + j * j) % VOCAB_SIZE for j in range(length)] for i, length in enumerate(LENGTHS)]
_GREEDY = sd.SamplingParams(max_new_tokens=24, logprobs=True)
_SAMPLED = sd.SamplingParams(max_new_tokens=24, logprobs=True, temperature=0.8, top_k=20, seed=3)
_PENALISED = sd.SamplingParams(max_new_tokens=24, logprobs=True, repetition_penalty=1.2)
PARAMS = [(_GREEDY, _SAMPLED, _PENALISED)[i % 3] for i in range(len(PROMPTS))]


def outputs_of(target, draft, **config):
    """Return tokens and log-probabilities of every prompt, and the engine; settings beside a batch of 4 are optional.

    The prompts need a target with ``VOCAB_SIZE`` ids.
    """
    engine = sd.Engine(target, draft, **{"max_batch_size": 4, **config})
    outputs = engine.generate(PROMPTS, PARAMS)
    return [(output.raise_for_error().token_ids, output.logprobs) for output in outputs], engine
