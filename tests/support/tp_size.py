"""Targets for ``tp_size``, and prompts that are decoded plainly one by one and together with drafts."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import specdec_fast as sd
from support.sharded import SIZES as SHARDED_SIZES

SIZES = SHARDED_SIZES | {"eos_token_id": None}
PROMPTS = [[5, 9, 40, 7], [3] * 21, [60, 2, 8], [3] * 21 + [4, 4], list(range(30))]
RULES = [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.7, "top_p": 0.9, "seed": 4}]


def saved(folder, kind, **sizes):
    """Write a random target, untied, tied or of experts; return its folder. ``sizes`` replace those of ``SIZES``."""
    torch.manual_seed(0)
    if kind == "experts":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(SIZES | sizes), **experts))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**(SIZES | sizes), tie_word_embeddings=kind == "tied"))
    model.save_pretrained(folder)
    return str(folder)


def engine_of(folder, drafter, tp_size=2, **settings):
    """Make an engine of small batches and pages."""
    settings = {"num_draft_tokens": 4, "max_batch_size": 3, "page_size": 4, "prefix_cache": True} | settings
    return sd.Engine(folder, drafter, tp_size=tp_size, **settings)


def params_of(index, **settings):
    """Return the parameters of one of ``PROMPTS``."""
    return sd.SamplingParams(max_new_tokens=13 + index, logprobs=True, **RULES[index % 3], **settings)


def plainly(engine):
    """Decode every prompt by itself, without drafts."""
    outputs = [engine.generate([p], params_of(i, num_draft_tokens=0))[0] for i, p in enumerate(PROMPTS)]
    return [(output.raise_for_error().token_ids, output.logprobs) for output in outputs]


def together(engine, **settings):
    """Decode all prompts in one call."""
    params = [params_of(i, **settings) for i in range(len(PROMPTS))]
    outputs = engine.generate(PROMPTS, params, progress=False)
    return [(output.raise_for_error().token_ids, output.logprobs) for output in outputs]


def expect_bits_of_plain_decoding(engine):
    """Decode plainly, then together with drafts of any K; pools grow, and prefixes are shared."""
    expected = plainly(engine)
    engine.drafter.texts = [token_ids for token_ids, _ in expected]
    assert together(engine) == expected
    for most in (0, 1, 3):
        assert together(engine, num_draft_tokens=most) == expected
    return expected
