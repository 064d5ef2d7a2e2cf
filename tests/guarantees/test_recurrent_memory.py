"""Memory that runs out for models with recurrent layers: in forwards, for state slots, and within a budget."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import specdec_fast as sd
from specdec_fast.errors import KVCacheAllocationError
from specdec_fast.kv_cache.state_pool import StatePool
from support.memory_errors import ERRORS
from support.recurrent_models import VOCAB_SIZE, noisy_copy, prompts_of, recurrent_model

PROMPTS = prompts_of((5, 6, 7, 8))
PARAMS = sd.SamplingParams(max_new_tokens=10, ignore_eos=True)


def attending():
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB_SIZE, initializer_range=0.3, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def texts(outputs):
    return [output.raise_for_error().token_ids for output in outputs]


def test_a_long_prompt_that_begins_again_ends(monkeypatch):
    """Prefill takes more steps than lift the limit of rows, and counts as none of them."""
    target = recurrent_model("mamba")
    (prompt,) = prompts_of((200,))
    expected = texts(sd.Engine(target, None).generate([prompt], PARAMS))
    engine = sd.Engine(target, noisy_copy(target), max_batch_size=1, num_draft_tokens=5)
    verify_step = engine.target.verify_step
    calls = []

    def failing(pool, sequences, draft_tokens, counts, parents=None):
        calls.append(sum(counts) + len(sequences))
        assert len(calls) < 50, "the step is repeated for ever"
        if calls[-1] >= 5:
            raise ERRORS["cpu"]
        return verify_step(pool, sequences, draft_tokens, counts, parents)

    monkeypatch.setattr(engine.target, "verify_step", failing)
    assert texts(engine.generate([prompt], PARAMS)) == expected
    assert engine.last_run.num_out_of_memory > 0


@pytest.fixture
def limit(monkeypatch):
    """Let state slots beyond a number, by pool, find no memory."""
    allocated = StatePool._allocated
    most = {}

    def limited(self, num_slots, *rest):
        if num_slots > most.get(self, most.get("all", num_slots)):
            raise KVCacheAllocationError(f"no memory for {num_slots} slots")
        return allocated(self, num_slots, *rest)

    monkeypatch.setattr(StatePool, "_allocated", limited)
    return most


@pytest.mark.parametrize("kv_cache_tokens", [None, 256])
@pytest.mark.parametrize("is_target_recurrent", [True, False])
def test_fewer_sequences_share_the_slots_that_there_are(limit, is_target_recurrent, kv_cache_tokens):
    recurrent = recurrent_model("qwen3.5")
    target = recurrent if is_target_recurrent else attending()
    expected = texts(sd.Engine(target, None).generate(PROMPTS, PARAMS))
    engine = sd.Engine(target, recurrent, max_batch_size=4, num_draft_tokens=3, kv_cache_tokens=kv_cache_tokens)
    limit["all"] = 3
    assert texts(engine.generate(PROMPTS, PARAMS)) == expected
    assert engine.drafter.pool.states.num_slots == 3


def test_a_drafter_that_cannot_grow_harms_no_request(limit):
    target = recurrent_model("qwen3.5")
    expected = texts(sd.Engine(target, None).generate(PROMPTS[:2], PARAMS))
    engine = sd.Engine(target, noisy_copy(target), max_batch_size=4, num_draft_tokens=3)
    texts(engine.generate([PROMPTS[0] * 20], sd.SamplingParams(max_new_tokens=30)))  # so that there are pages for both
    streams = [engine.stream([PROMPTS[0]], PARAMS)]
    found = [next(streams[0]).token_ids]
    limit[engine.drafter.pool.states] = engine.drafter.pool.states.num_slots
    streams.append(engine.stream([PROMPTS[1]], PARAMS))
    found.append(next(streams[1]).token_ids)
    for i, stream in enumerate(streams):
        for chunk in stream:
            assert chunk.error is None
            found[i] += chunk.token_ids
    assert found == expected


def test_slots_grow_by_doubling():
    """Requests come one by one, and growing copies every slot."""
    target = recurrent_model("mamba")
    engine = sd.Engine(target, "ngram", max_batch_size=8)
    streams = []
    for prompt in prompts_of((3,) * 6):
        streams.append(engine.stream([prompt], PARAMS))
        next(streams[-1])
    assert engine.core.pool.states.num_growths <= 5
    for stream in streams:
        stream.close()


def test_a_budget_for_plain_decoding_alone():
    """State slots with room for 16 draft tokens are several times as large."""
    target = recurrent_model("mamba")
    least = {"max_batch_size": 1, "kv_cache_tokens": 64, "max_prefill_tokens": 1}
    plain = sd.Engine(target, None, memory_bytes=10**9, **least)
    budget = sum(plain.memory_plan.terms.values())
    engine = sd.Engine(target, "ngram", memory_bytes=budget, num_draft_tokens=16, **least)
    assert engine.drafter.name == "none"
    assert engine.describe()["state_bytes_per_sequence"] == plain.describe()["state_bytes_per_sequence"]
    assert texts(engine.generate(PROMPTS[:1], PARAMS)) == texts(plain.generate(PROMPTS[:1], PARAMS))


@pytest.mark.grid
def test_the_model_can_be_compiled_by_its_owner():
    served = recurrent_model("qwen3.5")
    sd.Engine(served, None)
    other = recurrent_model("qwen3.5", seed=5)
    token_ids = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        expected = other(token_ids, use_cache=False).logits
        compiled = torch.compile(other, fullgraph=True, backend="eager")(token_ids, use_cache=False).logits
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-4)
