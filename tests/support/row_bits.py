"""The bits of every row's logits, alone and in a batch."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

import specdec_fast as sd
from specdec_fast.assets import demo_pair

NEW_TOKENS = 16


class RecordedEngine:
    """Keeps the logits of every verified row, by prompt and by the tokens up to that row."""

    def __init__(self, target, draft, **settings):
        self.engine = sd.Engine(target, draft, **settings)
        self.logits = {}
        self._verify, self.engine.target.verify_step = self.engine.target.verify_step, self.verify

    def verify(self, pool, batch, draft_tokens, num_draft_tokens, parents):
        found = self._verify(pool, batch, draft_tokens, num_draft_tokens, parents)
        rows = iter(found.logits)
        for sequence, drafted in zip(batch, draft_tokens.split(num_draft_tokens), strict=True):
            for i in range(len(drafted) + 1):
                self.logits[sequence.index, (*sequence.token_ids, *drafted[:i].tolist())] = next(rows).clone()
        return found

    def decode(self, prompts):
        params = sd.SamplingParams(max_new_tokens=NEW_TOKENS)
        outputs = self.engine.generate(prompts, params, progress=False)
        return [output.raise_for_error().token_ids for output in outputs]


def assert_same_bits(target, draft, prompts, alone, **settings):
    """Speculation in a batch emits what plain decoding alone does, from logits of the same bits."""
    run = RecordedEngine(target, draft, deterministic=True, **settings)
    assert run.decode(prompts) == alone.tokens
    assert set(alone.logits) <= set(run.logits)
    for key, logits in alone.logits.items():
        assert torch.equal(run.logits[key], logits), f"prompt {key[0]}, after {len(key[1])} tokens"


class Alone:
    """Plain decoding, one prompt at a time."""

    def __init__(self, target, prompts, **settings):
        run = RecordedEngine(target, None, max_batch_size=1, method="eqspec", deterministic=True, **settings)
        self.tokens, self.logits = run.decode(prompts), run.logits


def pair(dtype):
    return [AutoModelForCausalLM.from_pretrained(demo_pair() / n, dtype=dtype).eval() for n in ("target", "draft")]


SPECULATIONS = [("draft", 4, 4), ("draft", 8, 7), ("ngram", 2, 3)]  # drafter, K, batch size


def assert_same_bits_of_pair(dtype, prompts, speculations):
    target, draft = pair(dtype)
    alone = Alone(target, prompts, backend="torch")
    for drafter, k, batch_size in speculations:
        settings = {"num_draft_tokens": k, "max_batch_size": batch_size, "backend": "torch"}
        assert_same_bits(target, draft if drafter == "draft" else drafter, prompts, alone, **settings)
