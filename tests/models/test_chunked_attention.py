"""Layers that attend within chunks, as Llama-4 has them: which these are, and outputs across many chunks."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Llama4Config, Llama4ForConditionalGeneration, Llama4TextConfig

import specdec_fast as sd
from specdec_fast.equivalence.compare import transformers_greedy
from specdec_fast.models.model_checks import attention_chunks
from specdec_fast.runner import hf_model
from support.grids import combinations, each_value_once, grid
from support.models import TINY_GROUPED, VOCAB_SIZE, tiny_model, truncated_copy

NEW_TOKENS = 12
# Alone, less than a chunk of eight positions, and several chunks.
PROMPTS = [[(7 * i + 3 * n) % VOCAB_SIZE for i in range(n)] for n in (1, 7, 13, 28)]


def llama4(dtype: torch.dtype = torch.float32, tuning: bool = True, **options: object) -> torch.nn.Module:
    """Four layers: the second and last are mixtures of experts; the last sees all positions, and has no RoPE."""
    torch.manual_seed(0)
    sizes = {**TINY_GROUPED, "num_hidden_layers": 4, "intermediate_size_mlp": 64, "head_dim": 8, "num_local_experts": 4}
    rules = {"moe_layers": [1, 3], "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 8}
    tuned = {"attn_temperature_tuning": tuning, "floor_scale": 4, "attn_scale": 0.5}
    config = Llama4TextConfig(**{**sizes, **rules, **tuned, **options})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@each_value_once
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("tuning", [False, True])
@pytest.mark.parametrize("moe_layers", [[], [1, 3], [0, 1, 2, 3]], ids=["dense", "alternating", "mixtures"])
def test_tokens_are_those_of_generate(moe_layers, tuning, eager):
    model = llama4(tuning=tuning, moe_layers=moe_layers)
    engine = sd.Engine(model, "ngram", max_batch_size=4, enforce_eager=eager)
    assert not engine.target.row_padding.one_by_one
    assert engine.target.has_program is (not eager and not moe_layers)
    outputs = engine.generate(PROMPTS, sd.SamplingParams(max_new_tokens=NEW_TOKENS))
    assert [o.token_ids for o in outputs] == [transformers_greedy(model, ids, NEW_TOKENS) for ids in PROMPTS]


# The probe of a model has eight tokens, so loading notices a shorter chunk.
@pytest.mark.parametrize("size", grid([9, 12, None], keep=[9]))
def test_other_chunks_change_tokens(size, monkeypatch):
    model = llama4()
    expected = [transformers_greedy(model, ids, NEW_TOKENS) for ids in PROMPTS]
    chunks = {} if size is None else dict.fromkeys(range(3), size)
    monkeypatch.setattr(hf_model, "attention_chunks", lambda *args: chunks)
    outputs = sd.generate(model, None, PROMPTS, sd.SamplingParams(max_new_tokens=NEW_TOKENS))
    assert [o.token_ids for o in outputs] != expected


def decode(engine: sd.Engine) -> list[tuple[list[int], list[float]]]:
    params = sd.SamplingParams(max_new_tokens=NEW_TOKENS, logprobs=True)
    return [(o.raise_for_error().token_ids, o.logprobs) for o in engine.generate(PROMPTS, params, progress=False)]


@pytest.fixture(scope="module")
def plain():
    """Return a model, and its plain decoding at batch 1; both are kept."""
    known: dict[tuple[bool, torch.dtype], tuple[torch.nn.Module, list[tuple[list[int], list[float]]]]] = {}

    def decoded(is_mixture, dtype):
        if (is_mixture, dtype) not in known:
            model = llama4(dtype) if is_mixture else tiny_model("llama4").to(dtype)
            known[is_mixture, dtype] = model, decode(sd.Engine(model, None, max_batch_size=1))
        return known[is_mixture, dtype]

    return decoded


@combinations(
    is_mixture={"dense": False, "mixture": True},
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    drafter=["model", "ngram"],
    num_draft_tokens=[1, 4],
    batch_size=[1, 4],
    prefill={"whole": {}, "chunked": {"max_prefill_tokens": 5}},
)
def test_bits_are_those_of_plain_decoding(plain, is_mixture, dtype, drafter, num_draft_tokens, batch_size, prefill):
    model, expected = plain(is_mixture, dtype)
    draft = truncated_copy(model, 2).to(dtype) if drafter == "model" else drafter
    engine = sd.Engine(model, draft, num_draft_tokens=num_draft_tokens, max_batch_size=batch_size, **prefill)
    assert decode(engine) == expected


def test_the_config_says_which_layers_have_chunks():
    def chunks(**fields: object) -> dict[int, int]:
        return attention_chunks(SimpleNamespace(**fields), 2)

    assert chunks(layer_types=["full_attention", "chunked_attention"], attention_chunk_size=5) == {1: 5}
    assert chunks(layer_types=["full_attention"] * 2, attention_chunk_size=5) == {}
    assert chunks(attention_chunk_size=5) == {0: 5, 1: 5}
    assert chunks(attention_chunk_size=5, sliding_window=4) == {}
    assert chunks() == {}


def test_chunks_without_a_size_are_refused():
    for size in (None, 0):
        config = SimpleNamespace(layer_types=["full_attention", "chunked_attention"], attention_chunk_size=size)
        with pytest.raises(sd.UnsupportedModelError, match=f"layer 1 attends within chunks .* is {size}; expected"):
            attention_chunks(config, 2)


def test_a_layer_with_a_window_and_chunks_is_refused():
    model = copy.deepcopy(tiny_model("mistral-window"))  # with a config of its own
    model.config.layer_types = ["chunked_attention"] * 3
    model.config.attention_chunk_size = 8
    with pytest.raises(sd.UnsupportedModelError, match=r"passes sliding_window=7 .* chunks of 8 positions"):
        sd.Engine(model, None)


def test_a_model_of_images_and_text_is_refused():
    text = tiny_model("llama4").config.to_dict()
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    vision |= dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32)
    model = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision)).eval()
    with pytest.raises(sd.UnsupportedModelError, match="layers of type chunked_attention; only conv, full_attention"):
        sd.Engine(model, None)
