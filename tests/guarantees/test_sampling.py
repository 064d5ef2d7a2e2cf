"""Sampled requests through the engine: the same seed gives the same tokens however they are computed."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import specdec_fast as sd
from specdec_fast.batch.sampling_batch import Sampling, after
from specdec_fast.model_arguments import cache_argument
from support.demo import MAX_NEW_TOKENS
from support.grids import grid
from support.models import tiny_model, truncated_copy
from support.sampling_by_hand import token_by_hand

RULES = {
    "plain": {"temperature": 1.0},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "all": {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2},
    "greedy_with_penalty": {"repetition_penalty": 1.3},
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
NUM_PROMPTS, NEW_TOKENS = 8, 16


def params_of(rule, **others):
    return [
        sd.SamplingParams(**{"max_new_tokens": NEW_TOKENS, "seed": 100 + i} | rule | others) for i in range(NUM_PROMPTS)
    ]


@torch.inference_mode()
def sampled_by_hand(model, prompt, params, stop_ids):
    """Token by token from the logits of ``transformers``' dense cache, chosen in plain Python."""
    rule = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    rule["penalty"] = params.repetition_penalty
    cache, token_ids, fed = {cache_argument(model): DynamicCache()}, list(prompt), list(prompt)
    while len(token_ids) < len(prompt) + params.max_new_tokens and token_ids[-1] not in stop_ids:
        logits = model(torch.tensor([fed]), use_cache=True, **cache).logits[0, -1].tolist()
        fed = [token_by_hand(logits, set(token_ids), rule, params.seed, len(token_ids))]
        token_ids += fed
    return token_ids[len(prompt) :]


@pytest.mark.parametrize("rule", grid(RULES, keep=["all"]))
def test_tokens_are_those_of_the_definition(target, draft, prompt_ids, rule):
    prompts, params = prompt_ids[4 : 4 + NUM_PROMPTS], params_of(rule)
    engine = sd.Engine(target, draft, max_batch_size=3)
    outputs = engine.generate(prompts, params)
    want = [sampled_by_hand(target, *pair, engine.target.eos_token_ids) for pair in zip(prompts, params, strict=True)]
    assert [o.token_ids for o in outputs] == want
    assert [o.seed for o in outputs] == [p.seed if p.temperature else None for p in params]
    assert 0 < engine.last_run.decoding.num_accepted_tokens < engine.last_run.decoding.num_draft_tokens


# Every drafter, K from none to more than is accepted, batches that do and do not hold all; greedy neighbours too.
@pytest.mark.parametrize("rule", grid(RULES, keep=["top_p"]))
def test_drafter_k_batch_and_scheduler_change_nothing(target, draft, prompt_ids, rule):
    prompts, params = prompt_ids[4 : 4 + NUM_PROMPTS], params_of(rule, logprobs=True)
    alone = sd.Engine(target, None, max_batch_size=1, deterministic=True).generate(prompts, params)
    for drafter, k, batch_size, method in (
        (draft, 5, 3, "exspec"), (draft, 1, 8, "eqspec"), (draft, 8, 1, "exspec"), (target, 3, 5, "eqspec"),
        ("ngram", 4, 4, "exspec"), ("self", 5, 3, "exspec"), (None, 0, 8, "eqspec"),
    ):  # fmt: skip
        engine = sd.Engine(
            target, drafter, max_batch_size=batch_size, num_draft_tokens=k, method=method, deterministic=True
        )
        outputs = engine.generate(prompts, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
        assert [o.logprobs for o in outputs] == [o.logprobs for o in alone]
    streamed = [[] for _ in prompts]
    for chunk in engine.stream(prompts, params):
        streamed[chunk.index] += chunk.token_ids
    assert streamed == [o.token_ids for o in alone]


@each_rule
def test_draft_draws_as_the_target_does(prompt_ids, target, rule):
    """With the target as its own draft every draft token is accepted: same filters, same noise, same seen tokens."""
    engine = sd.Engine(target, target, max_batch_size=4, num_draft_tokens=4, deterministic=True)
    engine.generate(prompt_ids[:NUM_PROMPTS], params_of(rule, ignore_eos=True))
    decoding = engine.last_run.decoding
    assert decoding.num_draft_tokens > 0
    assert decoding.num_accepted_tokens == decoding.num_draft_tokens


def test_greedy_requests_of_the_batch_stay_greedy(target, draft, prompt_ids, expected):
    sampled = sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=1.5, seed=3, repetition_penalty=1.5)
    greedy = sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    params = [greedy if i % 2 else sampled for i in range(len(prompt_ids))]
    outputs = sd.Engine(target, draft).generate(prompt_ids, params)
    assert [o.token_ids for o in outputs[1::2]] == expected[1::2]
    assert all(o.token_ids != e for o, e in zip(outputs[::2], expected[::2], strict=True))


@pytest.fixture(scope="module")
def engine():
    target = tiny_model("llama")
    return sd.Engine(target, truncated_copy(target, 2))


class TestSeeds:
    params = sd.SamplingParams(max_new_tokens=10, temperature=2.0)
    prompts = ([5, 6], [5, 6], [7], [5, 6])

    def test_none_draws_one_for_each_request_and_reports_it(self, engine):
        outputs, again = (engine.generate(self.prompts, self.params) for _ in range(2))
        assert len({o.seed for o in [*outputs, *again]}) == 8
        assert outputs[0].token_ids != outputs[1].token_ids
        reported = [sd.SamplingParams(max_new_tokens=10, temperature=2.0, seed=o.seed) for o in outputs]
        assert [o.token_ids for o in engine.generate(self.prompts, reported)] == [o.token_ids for o in outputs]

    def test_manual_seed_repeats_a_run(self, engine):
        runs = []
        for _ in range(2):
            torch.manual_seed(11)
            runs.append(engine.generate(self.prompts, self.params))
        assert [(o.seed, o.token_ids) for o in runs[0]] == [(o.seed, o.token_ids) for o in runs[1]]

    def test_greedy_requests_draw_none(self, engine):
        torch.manual_seed(11)
        before = torch.get_rng_state()
        assert engine.generate(self.prompts)[0].seed is None
        assert torch.equal(torch.get_rng_state(), before)

    def test_one_seed_for_equal_prompts_gives_equal_texts(self, engine):
        outputs = engine.generate(self.prompts, sd.SamplingParams(max_new_tokens=10, temperature=2.0, seed=-5))
        assert outputs[0].token_ids == outputs[1].token_ids == outputs[3].token_ids


def test_sampling_config_of_transformers_keeps_fifty_tokens(target, prompt_ids):
    """As ``generate()`` does where the config says nothing of top_k."""
    given = sd.SamplingParams.from_generation_config(GenerationConfig(do_sample=True, temperature=0.7, top_p=0.8))
    assert (given.temperature, given.top_k, given.top_p) == (0.7, 50, 0.8)
    everything = sd.SamplingParams.from_generation_config(GenerationConfig(do_sample=True, top_k=0))
    assert (everything.temperature, everything.top_k) == (1.0, 0)


def test_seen_tokens_grow_by_what_was_fed():
    column = torch.zeros(3, dtype=torch.float64)
    sampling = Sampling(
        temperatures=column, top_k=column.int(), top_p=column, min_p=column, repetition_penalties=column,
        seeds=column.long(), positions=torch.tensor([4, 7, 9]),
        seen_ids=torch.tensor([1, 2, 5]), cu_seen=torch.tensor([0, 2, 2, 3], dtype=torch.int32),
    )  # fmt: skip
    for fed, seen, offsets in (
        ([8, 9, 7], [1, 2, 8, 9, 5, 7], [0, 3, 4, 6]),
        ([3, 4, 6], [1, 2, 8, 3, 9, 4, 5, 7, 6], [0, 4, 6, 9]),
    ):
        sampling = after(sampling, torch.tensor(fed))
        assert (sampling.seen_ids.tolist(), sampling.cu_seen.tolist()) == (seen, offsets)
        assert (sampling.seen_ids.dtype, sampling.cu_seen.dtype) == (torch.int64, torch.int32)
    assert sampling.positions.tolist() == [6, 9, 11]
