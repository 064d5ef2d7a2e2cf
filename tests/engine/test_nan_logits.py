"""NaN logits of one request end that request with a typed error; the others of its batch have plain decoding's bits."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch

import specdec_fast as sd
from support.grids import grid
from support.models import VOCAB_SIZE, tiny_model, truncated_copy

POISON = VOCAB_SIZE - 1  # an id whose embedding is NaN
PROMPTS = [[3, 4], [5, 6, 7], [8], [9, 10, 11, 12]]
RULES = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 0.8, "seed": 2, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    {"repetition_penalty": 1.3},
]


@pytest.fixture(scope="module")
def pair():
    """A target that never chooses the poisoned id by itself, and its draft."""
    target = tiny_model("llama")
    with torch.no_grad():
        target.model.embed_tokens.weight[POISON] = math.nan
        target.lm_head.weight[POISON] = 0.0
    return target, truncated_copy(target, 2)


CASES = list(itertools.product(["cpp", "torch"], ["model", "ngram", None], ["greedy", "sampled"]))


@pytest.mark.parametrize(
    ("backend", "draft", "poisoned"),
    grid(CASES, keep=lambda case: case[0] == "cpp"),
)
def test_only_the_request_with_nan_fails(pair, backend, draft, poisoned):
    """Its first logits are NaN, and so are the draft model's; its pages go to the requests that wait."""
    params = [sd.SamplingParams(max_new_tokens=18, ignore_eos=True, logprobs=True, **rule) for rule in (*RULES, *RULES)]
    prompts = [*PROMPTS, *([*prompt, 2] for prompt in PROMPTS)]
    plain = sd.Engine(pair[0], None, max_batch_size=1, backend=backend).generate(prompts, params)
    assert all(POISON not in output.raise_for_error().token_ids for output in plain)
    bad = sd.SamplingParams(max_new_tokens=18, logprobs=True, **RULES[2 if poisoned == "sampled" else 0])
    engine = sd.Engine(
        pair[0], pair[1] if draft == "model" else draft, max_batch_size=3, page_size=4, backend=backend,
        kv_cache_tokens=60,
    )  # fmt: skip
    outputs = engine.generate(
        [*prompts[:2], [5, POISON], *prompts[2:], [POISON] * 9], [*params[:2], bad, *params[2:], bad]
    )
    failed = [outputs.pop(2), outputs.pop()]
    assert [(o.token_ids, o.logprobs) for o in outputs] == [(o.token_ids, o.logprobs) for o in plain]
    for output in failed:
        assert isinstance(output.error, sd.InvalidLogitsError)
        assert (output.token_ids, output.logprobs, output.finish_reason) == ([], [], "error")
    assert engine.core.pool.is_vacant


@pytest.mark.parametrize("draft", ["model", None])
def test_a_token_with_an_infinite_logit_has_no_log_probability(pair, draft):
    """It can be chosen, as ``generate()`` of transformers does; its log-probability was a NaN, which no JSON holds."""
    target = copy.deepcopy(pair[0])
    compute = target.lm_head.forward
    victim = None

    def forward(rows):
        logits = compute(rows)
        best = logits.amax(dim=-1, keepdim=True)
        if victim is None:
            return logits
        is_infinite = (logits == best) & (logits.argmax(dim=-1, keepdim=True) == victim)
        return logits.masked_fill(is_infinite, math.inf)

    target.lm_head.forward = forward
    scored = sd.SamplingParams(max_new_tokens=18, ignore_eos=True, logprobs=True)
    (whole,) = sd.Engine(target, None).generate([PROMPTS[0]], scored)
    place = next(i for i in range(4, 18) if whole.token_ids[i] not in whole.token_ids[:i])
    drafter = pair[1] if draft == "model" else None
    engine = sd.Engine(target, drafter)
    victim = whole.token_ids[place]
    cut, free = engine.generate([PROMPTS[0]] * 2, [scored, sd.SamplingParams(max_new_tokens=18, ignore_eos=True)])
    assert (cut.token_ids, cut.logprobs) == (whole.token_ids[:place], whole.logprobs[:place])
    assert isinstance(cut.error, sd.InvalidLogitsError)
    assert f"after {len(PROMPTS[0]) + place} tokens hold an infinity" in str(cut.error)
    assert free.token_ids == whole.token_ids


@pytest.mark.parametrize("draft", ["model", None])
def test_nan_in_the_middle_keeps_the_tokens_before_it(pair, draft):
    """The tokens that were chosen before the row with NaN stand, sampled ones too."""
    target = copy.deepcopy(pair[0])
    params = sd.SamplingParams(max_new_tokens=18, ignore_eos=True, logprobs=True, **RULES[1])
    (whole,) = sd.Engine(target, None).generate([PROMPTS[0]], params)
    victim = next(token for i, token in enumerate(whole.token_ids) if i > 4 and token not in whole.token_ids[:i])
    with torch.no_grad():
        target.model.embed_tokens.weight[victim] = math.nan
    drafter = pair[1] if draft == "model" else None
    (cut,) = sd.Engine(target, drafter).generate([PROMPTS[0]], params)
    end = whole.token_ids.index(victim) + 1
    assert isinstance(cut.error, sd.InvalidLogitsError)
    assert (cut.token_ids, cut.logprobs) == (whole.token_ids[:end], whole.logprobs[:end])


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("eager", [False, True])
def test_a_model_whose_logits_are_nan_is_refused_for_that(role, eager):
    models = {"target": tiny_model("llama"), "draft": tiny_model("llama")}
    with torch.no_grad():
        models[role].model.layers[1].mlp.up_proj.weight[3, 5] = math.nan
    weight = r"weight model\.layers\.1\.mlp\.up_proj\.weight is not finite \(1 are not\)"
    message = rf"logits of LlamaForCausalLM are NaN or infinite.* 8 of 8 .*{weight}"
    with pytest.raises(sd.UnsupportedModelError, match=message):
        sd.Engine(models["target"], models["draft"], enforce_eager=eager)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj", "lm_head"])  # these overflow to NaN and to infinity
def test_logits_that_overflow(name):
    model = tiny_model("llama").half()
    with torch.no_grad():
        model.model.embed_tokens.weight[4] = 6e4
        model.get_submodule(name).weight.fill_(6e4)
    with pytest.raises(sd.UnsupportedModelError, match=r"in torch.float16; its weights are finite.*float16 overflows"):
        sd.Engine(model, None)
