"""Layers of several shapes, layers that share keys and values, values of another size than keys."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    MiMoV2FlashConfig,
    MiniCPM3Config,
)

import specdec_fast as sd
from specdec_fast.batch.ragged_batch import AttentionParams, Rows
from specdec_fast.equivalence.compare import transformers_greedy
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.kv_cache.layer_layout import KVLayout, KVShape
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.kv_probe import KVProbe
from specdec_fast.ops import resolve
from specdec_fast.ops.registry import all_ops
from specdec_fast.runner.ragged_model import RaggedModel
from support.grids import grid
from support.invariants import CheckedEngine
from support.models import MAX_POSITIONS, VOCAB_SIZE

CPU = torch.device("cpu")
NUM_TOKENS = 12
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GEMMA = {
    **_COMMON,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 5,
    "num_hidden_layers": 6,
    "layer_types": 2 * ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
# Multi-head latent attention, every layer dense; keys of 12 + 8 numbers, values of 16.
_LATENT = {
    **_COMMON,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_SMALL, _LARGE = KVShape(2, 8, 8), KVShape(2, 16, 16)
CONFIGS = {
    "gemma4": Gemma4TextConfig(
        **_GEMMA, global_head_dim=16, attention_k_eq_v=True, num_global_key_value_heads=1
    ),
    "gemma4-shared": Gemma4TextConfig(**_GEMMA, global_head_dim=16, num_kv_shared_layers=3),
    "gemma3n-shared": Gemma3nTextConfig(
        **{**_GEMMA, "intermediate_size": [48] * 6}, num_kv_shared_layers=3, laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 6,
    ),
    "deepseek-v2": DeepseekV2Config(**_LATENT, first_k_dense_replace=3),
    "deepseek-v3": DeepseekV3Config(**_LATENT, first_k_dense_replace=3),
    "minicpm3": MiniCPM3Config(**_LATENT),
    # Attention sinks; sliding layers have more KV heads than full ones, values another size than keys.
    "mimo-v2-flash": MiMoV2FlashConfig(
        **_COMMON, num_key_value_heads=2, num_hidden_layers=3, head_dim=12, v_head_dim=8, sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], mlp_layer_types=["dense"] * 3,
    ),
}  # fmt: skip
_DENSE = (3 * (KVShape(4, 20, 16),), (0, 1, 2))
LAYOUTS = {  # shapes and sources
    "gemma4": (2 * (_SMALL, _SMALL, KVShape(1, 16, 16)), (0, 1, 2, 3, 4, 5)),
    "gemma4-shared": (2 * (_SMALL, _SMALL, _LARGE), (0, 1, 2, 1, 1, 2)),
    "gemma3n-shared": (6 * (_SMALL,), (0, 1, 2, 1, 1, 2)),
    "deepseek-v2": _DENSE,
    "deepseek-v3": _DENSE,
    "minicpm3": _DENSE,
    "mimo-v2-flash": ((KVShape(4, 12, 8), KVShape(2, 12, 8), KVShape(4, 12, 8)), (0, 1, 2)),
}


one_of_each_layout = pytest.mark.parametrize(
    "pair", grid(list(CONFIGS), keep=["gemma4-shared", "mimo-v2-flash"]), indirect=True
)


shared_layers = pytest.mark.parametrize("pair", grid(list(CONFIGS), keep=["gemma4-shared"]), indirect=True)


def random_prompts(lengths=(1, 9, 18)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request):
    """Return a random model, and a copy with some weights changed: as a draft it is right for some tokens."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=torch.float32).eval()
    for name, parameter in target.named_parameters():
        if name.endswith(".sinks"):
            parameter.data.normal_(std=3.0)  # those of a new model may all be 0
    draft = copy.deepcopy(target)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return request.param, target, draft


@pytest.fixture(scope="module")
def expected(pair):
    return [transformers_greedy(pair[1], prompt, NUM_TOKENS) for prompt in random_prompts()]


@pytest.mark.parametrize(
    "pair", grid(list(CONFIGS), keep=["gemma4", "gemma4-shared", "deepseek-v3", "mimo-v2-flash"]), indirect=True
)
def test_layout(pair):
    name, target, _ = pair
    shapes, sources = LAYOUTS[name]
    model = RaggedModel(target, resolve(CPU))
    assert (model.layout.shapes, model.layout.sources) == (shapes, sources)
    own = [shape for layer, (shape, source) in enumerate(zip(shapes, sources, strict=True)) if layer == source]
    assert model.layout.bytes_per_token == 4 * sum(heads * (key + value) for heads, key, value in own)
    has_programs = all_ops()["linear"].why_unavailable("cpp") is None
    assert (model.program is not None) == has_programs, model.why_no_program


@one_of_each_layout
@pytest.mark.parametrize("backend", grid(["auto", "torch"], keep=["auto"]))
def test_tokens_are_those_of_transformers(pair, expected, backend):
    _, target, draft = pair
    engine = sd.Engine(target, draft, backend=backend, num_draft_tokens=4, max_batch_size=2)
    outputs = engine.generate(random_prompts(), sd.SamplingParams(max_new_tokens=NUM_TOKENS))
    assert [output.token_ids for output in outputs] == expected
    decoding = engine.last_run.decoding
    assert 0 < decoding.num_accepted_tokens < decoding.num_draft_tokens, "acceptance should be ragged"


@one_of_each_layout
@pytest.mark.parametrize("dtype", grid(["float32", "bfloat16"], keep=["bfloat16"]))
def test_bits_are_those_of_plain_decoding(pair, dtype):
    _, target, draft = (
        copy.deepcopy(model).to(getattr(torch, dtype)) if isinstance(model, torch.nn.Module) else model
        for model in pair
    )
    params = sd.SamplingParams(max_new_tokens=NUM_TOKENS, logprobs=True)
    alone = sd.Engine(target, None, max_batch_size=1).generate(random_prompts(), params)
    for num_draft_tokens, batch_size, source in ((1, 3, draft), (5, 2, "ngram")):
        engine = sd.Engine(target, source, num_draft_tokens=num_draft_tokens, max_batch_size=batch_size)
        for mine, theirs in zip(engine.generate(random_prompts(), params), alone, strict=True):
            assert (mine.token_ids, mine.logprobs) == (theirs.token_ids, theirs.logprobs)


@shared_layers
@pytest.mark.parametrize("enforce_eager", grid([False, True], keep=[False]))
def test_invariants(pair, enforce_eager):
    """KV entries that no committed token owns are NaN, in the memory of every shape."""
    _, target, draft = pair
    engine = CheckedEngine(
        sd.Engine(target, draft, page_size=4, max_batch_size=2, num_draft_tokens=3, enforce_eager=enforce_eager)
    )
    outputs = engine.generate(random_prompts((9, 2, 14)), sd.SamplingParams(max_new_tokens=NUM_TOKENS))
    assert all(output.error is None for output in outputs)
    assert engine.num_checked


@pytest.fixture
def layout():
    """Two layers of one shape, one that shares the first's entries, one whose values are smaller than its keys."""
    shapes = (KVShape(2, 4, 4), KVShape(2, 4, 4), KVShape(2, 4, 4), KVShape(3, 6, 5))
    return KVLayout(shapes, (0, 1, 0, 3), torch.float16, CPU)


def test_a_pool_has_memory_for_every_shape(layout):
    pool = PagePool(layout, 20, 8)
    assert [tuple(t.shape) for t in pool.tensors] == [(2, 2, 4, 8, 2, 4), (1, 1, 4, 8, 3, 6), (1, 1, 4, 8, 3, 5)]
    assert layout.bytes_per_token == 2 * (2 * 2 * (4 + 4) + 3 * (6 + 5))
    assert sum(t.nbytes for t in pool.tensors) == 4 * 8 * layout.bytes_per_token
    for layer, pair in enumerate(pool.layers):
        heads, *head_dims = layout.shapes[layer]
        assert [tuple(t.shape) for t in pair] == [(4, 8, heads, head_dim) for head_dim in head_dims]
        assert all(t.is_contiguous() and t.dtype == torch.float16 for t in pair)
        assert pool.pages.addresses[layer].tolist() == [t.data_ptr() for t in pair]
    for number, tensor in enumerate(t for layer in (0, 1, 3) for t in pool.layers[layer]):
        assert not tensor.any(), "what was written belongs to this layer only"
        tensor.fill_(number + 1)
    assert pool.layers[2][0].data_ptr() == pool.layers[0][0].data_ptr()


def test_pages_outlive_their_pool(layout):
    """A program reads addresses, so the memory must live as long as they do."""
    pool = PagePool(layout, 20, 8)
    pool.add("a")
    spans = pool.spans([Rows("a", 0, 3)])
    addresses = sorted(t.untyped_storage().data_ptr() for t in pool.tensors)
    del pool
    assert sorted(t.untyped_storage().data_ptr() for t in spans.pages.memory) == addresses


def attended(*layers):
    """A probe whose layers attended over keys and values of these shapes, dtypes and heads of the queries."""
    probe = KVProbe(resolve(CPU))
    for layer, (num_heads, key, value, dtype) in enumerate(layers):
        states = [torch.zeros(size, dtype=dtype) for size in ((1, num_heads, *key[2:]), key, value)]
        probe.update(*states[1:], layer)
        out = probe.attend(*states, layer, AttentionParams(1.0))
        assert out.shape == (1, key[2], num_heads, value[3])
    return probe


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([(4, (1, 3, 8, 16), (1, 3, 8, 16), torch.float32)], r"layer 0 .* queries \[1, 4, 8, 16\] over keys \[1, 3, 8"),
        ([(4, (1, 2, 8, 16), (1, 1, 8, 16), torch.float32)], r"values \[1, 1, 8, 16\]"),
        ([(4, (1, 2, 8, 16), (1, 2, 9, 16), torch.float32)], r"values \[1, 2, 9, 16\]"),
        (
            [(4, (1, 2, 8, 16), (1, 2, 8, 16), torch.float32), (4, (1, 2, 8, 16), (1, 2, 8, 16), torch.float16)],
            "Model attends in torch.float16 and torch.float32; a KV cache has one dtype; load .* torch.float32",
        ),
        ([], "Model has no layer that writes to its KV cache or attends"),
    ],
)  # fmt: skip
def test_layers_that_pages_cannot_store_are_refused(layers, message):
    with pytest.raises(UnsupportedModelError, match=message):
        attended(*layers).layout("Model", torch.float32, CPU)


def test_a_layer_that_attends_twice_is_refused():
    probe = attended((4, (1, 2, 8, 16), (1, 2, 8, 16), torch.float32))
    states = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16)
    probe.attend(*states, 0, AttentionParams(1.0))
    with pytest.raises(UnsupportedModelError, match="layer 0 of Model attends 2 times in a forward"):
        probe.layout("Model", torch.float32, CPU)


def test_a_layer_that_only_caches_is_refused():
    probe = attended((4, (1, 2, 8, 16), (1, 2, 8, 16), torch.float32))
    probe.update(torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8, 2), 1)
    with pytest.raises(UnsupportedModelError, match="1 of 2 layers of Model attend through"):
        probe.layout("Model", torch.float32, CPU)
