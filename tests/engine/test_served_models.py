"""What an engine makes of its models: names, positions, vocabularies, rope, dtypes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GenerationConfig, LlamaConfig

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.equivalence.compare import transformers_greedy
from support.demo import MAX_NEW_TOKENS
from support.grids import each_value_once
from support.models import TINY, TINY_GROUPED, VOCAB_SIZE, tiny_model

PARAMS = sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS)


def test_generate_with_names_and_a_generation_config(prompts):
    """The README's example: folders or names, strings, a transformers GenerationConfig."""
    outputs = sd.generate(
        str(demo_pair() / "target"),
        str(demo_pair() / "draft"),
        prompts[:2],
        GenerationConfig(max_new_tokens=6, do_sample=False),
        dtype="float32",
    )
    assert [len(o.token_ids) for o in outputs] == [6, 6]
    assert all(isinstance(o.text, str) and o.text for o in outputs)


def test_draft_with_fewer_positions_than_the_target(prompt_ids, expected, target, draft):
    """Beyond its own positions the draft model proposes nothing; the target decodes plainly."""
    short = copy.deepcopy(draft)
    short.config.max_position_embeddings = 30
    engine = sd.Engine(target, short, max_batch_size=4)
    assert [o.token_ids for o in engine.generate(prompt_ids, PARAMS)] == expected
    longest = max(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]))
    assert engine.generate([prompt_ids[longest]], PARAMS)[0].stats.num_draft_tokens == 0


def test_padded_vocabularies_of_one_family(target, draft, prompt_ids, expected):
    """The draft's logits may be narrower or wider than the target's, if the tokenizers agree."""
    wide = copy.deepcopy(draft)
    wide.resize_token_embeddings(1040, mean_resizing=False)
    assert all(model.config._name_or_path for model in (wide, target))  # where their tokenizers are found
    engine = sd.Engine(target, wide, max_batch_size=4)
    assert [o.token_ids for o in engine.generate(prompt_ids, PARAMS)] == expected


def test_rope_that_depends_on_the_longest_sequence_is_held_to_its_original_length():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    config = LlamaConfig(**TINY, rope_parameters=rope)
    engine = sd.Engine(AutoModelForCausalLM.from_config(config).eval(), None)
    assert engine.target.max_positions == 32
    error = engine.generate([[5] * 40])[0].error
    assert isinstance(error, sd.PromptTooLongError)
    assert "can serve 32 positions of its 160, because beyond them its RoPE changes" in str(error)


def test_rope_of_each_layer_type_is_looked_into():
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    config = Gemma3TextConfig(
        **TINY_GROUPED,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        sliding_window=16,
        rope_parameters={
            "full_attention": {"rope_type": "longrope", "rope_theta": 1e6, "factor": 4.0, **factors},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    engine = sd.Engine(AutoModelForCausalLM.from_config(config).eval(), None)
    assert engine.target.max_positions == 32
    alone, beside = engine.generate([[5, 6, 7]])[0], engine.generate([[5, 6, 7], [9] * 40])
    assert isinstance(beside[1].error, sd.PromptTooLongError)
    assert beside[0].token_ids == alone.token_ids


def test_bfloat16_runs_and_repeats_itself(prompt_ids):
    """bf16 is served; that it equals plain decoding bit for bit is not promised yet."""
    outputs = [
        sd.generate(str(demo_pair() / "target"), "ngram", prompt_ids[:3], PARAMS, dtype="bfloat16") for _ in range(2)
    ]
    assert [o.token_ids for o in outputs[0]] == [o.token_ids for o in outputs[1]]
    assert all(o.error is None and o.token_ids for o in outputs[0])


class Excluding(torch.nn.Module):
    """An output layer that gives some ids a logit of minus infinity."""

    def __init__(self, inner, ids):
        super().__init__()
        excluded = torch.zeros(VOCAB_SIZE, dtype=inner.weight.dtype).index_fill(0, torch.tensor(ids), -math.inf)
        self.inner = inner
        self.register_buffer("excluded", excluded)

    def forward(self, hidden):
        return self.inner(hidden) + self.excluded


@each_value_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("eager", [False, True])
def test_ids_that_a_model_excludes_by_minus_infinity(dtype, eager):
    model, prompt = tiny_model("llama").to(dtype), [3, 5, 7]
    excluded = sorted(set(transformers_greedy(model, prompt, 8)))
    model.lm_head = Excluding(model.lm_head, excluded).eval()
    engine = sd.Engine(model, "ngram", enforce_eager=eager)
    (output,) = engine.generate([prompt], sd.SamplingParams(max_new_tokens=8, logprobs=True))
    plain = sd.Engine(model, None).generate([prompt], sd.SamplingParams(max_new_tokens=8))[0].token_ids
    assert output.raise_for_error().token_ids == plain
    if dtype == torch.float32:
        assert plain == transformers_greedy(model, prompt, 8)
    sampled = sd.SamplingParams(max_new_tokens=60, temperature=5.0, top_k=90, repetition_penalty=1.1, seed=1)
    (other,) = engine.generate([prompt], sampled)
    assert not set(excluded) & {*plain, *other.raise_for_error().token_ids}
    assert all(map(math.isfinite, output.logprobs))


def test_a_program_that_forgets_an_infinity_is_refused(monkeypatch):
    model = tiny_model("llama")
    model.lm_head = Excluding(model.lm_head, [4]).eval()
    replaced = sd.Engine(model, None).target
    forward = replaced.forward
    monkeypatch.setattr(replaced, "forward", lambda *args: forward(*args).nan_to_num(neginf=-9.0))
    token_ids = torch.arange(8)
    with pytest.raises(sd.UnsupportedModelError, match=r"relative distance (inf|nan)"):
        replaced.check_logits(token_ids, replaced.hf.dense_logits(token_ids))
