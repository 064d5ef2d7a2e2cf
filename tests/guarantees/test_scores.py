"""Prefill = decode = verify: a token has one log-probability, whoever computes it.

Plain decoding, one request at a time, emits texts with their log-probabilities and the most likely tokens. The same
bits must come from scoring the whole texts, from scoring prompts on the way to decoding them, and from decoding with
drafts: over drafters of chains and trees, batches, chunks, small pools, programs and PyTorch, dense and recurrent
models.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

import specdec_fast as sd
from specdec_fast.engine.core import EngineCore
from support.grids import combinations, grid
from support.models import MAX_POSITIONS, tiny_model, truncated_copy
from support.recurrent_models import noisy_copy, prompts_of, recurrent_model

TOP = 3
PROMPTS = prompts_of((1, 2, 30, 16, 17, 70))
PARAMS = [
    sd.SamplingParams(
        max_new_tokens=24,
        ignore_eos=True,
        temperature=0.9 * (i % 2),
        seed=i,
        repetition_penalty=1.1 if i == 3 else 1.0,
        logprobs=TOP,
        prompt_logprobs=TOP,
    )
    for i in range(len(PROMPTS))
]
MODELS = {
    "llama-fp32": ("llama", torch.float32),
    "llama-bf16": ("llama", torch.bfloat16),
    "gemma2-fp16": ("gemma2", torch.float16),
    "gpt2-fp32": ("gpt2", torch.float32),
    "qwen3.5-fp32": ("qwen3.5", torch.float32),
    "mamba-bf16": ("mamba", torch.bfloat16),
}
RECURRENT = ("qwen3.5", "mamba")


@pytest.fixture(scope="module", params=grid(MODELS, keep=["llama-fp32", "llama-bf16", "qwen3.5-fp32"]))
def decoded(request):
    """A target and a draft model, and what plain decoding returns for each prompt alone."""
    name, dtype = request.param
    is_recurrent = name in RECURRENT
    target = (recurrent_model(name) if is_recurrent else tiny_model(name)).to(dtype)
    draft = noisy_copy(target) if is_recurrent else truncated_copy(target, 2).to(dtype)
    engine = sd.Engine(target, None, max_batch_size=1)
    outputs = [engine.generate([prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    texts = [output.prompt_ids + output.raise_for_error().token_ids for output in outputs]
    assert len({value for output in outputs for value in output.logprobs}) > 60, "values should vary"
    return target, draft, is_recurrent, outputs, texts


def expect_scores_of(outputs, scores):
    """The scores of whole texts are those of their prompts, and then those of their emitted tokens."""
    for output, score in zip(outputs, scores, strict=True):
        assert score.error is None
        assert score.token_ids == output.prompt_ids + output.token_ids
        assert [None, *score.logprobs] == [*output.prompt_logprobs, *output.logprobs]
        assert [None, *score.top_logprobs] == [*output.prompt_top_logprobs, *output.top_logprobs]
        for token, rank, top in zip(score.token_ids[1:], score.ranks, score.top_logprobs, strict=True):
            assert list(top)[rank - 1] == token if rank <= TOP else token not in top


def expect_same(outputs, expected):
    for output, want in zip(outputs, expected, strict=True):
        output.raise_for_error()
        for name in ("token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs", "prompt_ranks"):
            assert getattr(output, name) == getattr(want, name), name


BATCHES = {
    "alone": {"max_batch_size": 1},
    "chunks": {"max_batch_size": 3, "max_prefill_tokens": 5},
    "small pool": {"max_batch_size": 4, "page_size": 4, "kv_cache_tokens": 96, "max_prefill_tokens": 13},
    "lockstep": {"max_batch_size": 2, "method": "eqspec"},
    "prefix cache": {"max_batch_size": 3, "prefix_cache": True, "page_size": 4, "max_prefill_tokens": 7},
}


@combinations(draft=["none", "model", "ngram", "self"], batch=BATCHES, ahead=[False, True])
def test_scores_have_the_bits_of_decoding(decoded, monkeypatch, draft, batch, ahead):
    """Texts are scored while others decode, and prompts are scored on the way to decoding them."""
    target, model, is_recurrent, outputs, texts = decoded
    if is_recurrent and draft == "self":
        pytest.skip("refused for recurrent layers")
    monkeypatch.setattr(EngineCore, "launches_ahead", ahead)
    engine = sd.Engine(target, model if draft == "model" else draft, num_draft_tokens=4, **batch)
    scoring = sd.SamplingParams(max_new_tokens=0, prompt_logprobs=TOP)
    mixed = engine.generate([*PROMPTS, *texts], [*PARAMS, *[scoring] * len(texts)])
    expect_same(mixed[: len(PROMPTS)], outputs)
    assert [output.finish_reason for output in mixed[len(PROMPTS) :]] == ["length"] * len(texts)
    if "kv_cache_tokens" in batch:
        assert engine.last_run.num_preemptions > 0, "the small pool must preempt"
    scores = engine.score(texts, top_logprobs=TOP)
    expect_scores_of(outputs, scores)
    for score, output in zip(scores, mixed[len(PROMPTS) :], strict=True):
        assert [None, *score.logprobs] == output.prompt_logprobs
    assert engine.core.pool.is_vacant


@pytest.mark.parametrize("dtype", grid([torch.float32, torch.bfloat16], keep=[torch.bfloat16]), ids=str)
def test_in_pytorch(dtype):
    """Forwards that PyTorch runs have other bits than a program's, so they have a reference of their own."""
    target = tiny_model("llama").to(dtype)
    engine = sd.Engine(target, truncated_copy(target, 2), enforce_eager=True, max_prefill_tokens=9, max_batch_size=3)
    prompts = PROMPTS[1:5]
    params = [replace(each, max_new_tokens=6) for each in PARAMS[1:5]]
    outputs = engine.generate(prompts, params)
    expect_same(outputs, sd.Engine(target, None, enforce_eager=True, max_batch_size=1).generate(prompts, params))
    expect_scores_of(outputs, engine.score([o.prompt_ids + o.token_ids for o in outputs], top_logprobs=TOP))


def test_another_text_has_other_scores(decoded):
    """A control: the comparison above sees one token that differs, from its place on and not before."""
    target, _, _, _, texts = decoded
    engine = sd.Engine(target, None)
    text = list(texts[2])
    text[40] = (text[40] + 1) % 64
    (score,) = engine.score([text])
    (right,) = engine.score([texts[2]])
    assert score.logprobs[:39] == right.logprobs[:39]
    assert all(a != b for a, b in zip(score.logprobs[39:], right.logprobs[39:], strict=True))


def test_a_service_scores_and_streams_the_same(decoded):
    target, model, _, outputs, texts = decoded

    async def served():
        async with sd.AsyncEngine(target, model, max_batch_size=4, max_prefill_tokens=11) as engine:
            scores = asyncio.gather(*(engine.score(text, top_logprobs=TOP) for text in texts))
            chunks = []
            async for chunk in engine.stream(PROMPTS[4], PARAMS[4]):
                chunks.append(chunk)
            return await scores, chunks

    scores, chunks = asyncio.run(served())
    expect_scores_of(outputs, scores)
    want = outputs[4]
    assert [value for chunk in chunks for value in chunk.logprobs] == want.logprobs
    assert [top for chunk in chunks for top in chunk.top_logprobs] == want.top_logprobs
    assert (chunks[0].prompt_logprobs, chunks[0].prompt_ranks) == (want.prompt_logprobs, want.prompt_ranks)
    assert chunks[0].prompt_top_logprobs == want.prompt_top_logprobs
    assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])


def test_as_exact_as_transformers(target, prompt_ids):
    """The distance to float64 is at most twice that of transformers in the same dtype."""
    texts = [ids for ids in prompt_ids if len(ids) > 1]
    exact_target = type(target)(target.config).double()
    exact_target.load_state_dict(target.state_dict())
    exact_target.eval()
    scores = sd.Engine(target, None, max_prefill_tokens=64).score(texts)
    distances = []
    errors = []
    for text, score in zip(texts, scores, strict=True):
        exact, theirs = (_dense(model, text) for model in (exact_target, target))
        distances.append(float((torch.tensor(score.logprobs, dtype=torch.float64) - exact).abs().max()))
        errors.append(float((theirs - exact).abs().max()))
    assert max(distances) <= 2 * max(errors)


@torch.inference_mode()
def _dense(model, text):
    logits = model(torch.tensor([text])).logits[0, :-1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0].double()


def test_a_text_that_fills_all_positions(decoded):
    target, _, is_recurrent, _, _ = decoded
    if is_recurrent:
        pytest.skip("they have no such limit")
    engine = sd.Engine(target, None)
    whole = (PROMPTS[5] * 3)[:MAX_POSITIONS]
    scored, too_long = engine.score([whole, [*whole, 1]])
    assert len(scored.raise_for_error().logprobs) == MAX_POSITIONS - 1
    assert isinstance(too_long.error, sd.PromptTooLongError)
    assert too_long.logprobs == []
