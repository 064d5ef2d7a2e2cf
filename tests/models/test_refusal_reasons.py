"""A refusal says what the model does that pages cannot serve."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, DynamicCache

import specdec_fast as sd
from bench.common.tiny_models import tiny_model as tiny_default_model
from specdec_fast.kv_cache.hf_cache import PagedCache
from specdec_fast.model_arguments import cache_argument
from specdec_fast.models.refusal_reasons import why_not_reproduced
from support.models import TINY, tiny_model


def encoder():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(BertConfig(**TINY)).eval()


def mixing_rows():
    """A causal Llama that adds earlier rows outside its attention, so on ragged rows also those of other sequences."""
    model = tiny_model("llama")
    norm = model.model.norm
    original = norm.forward
    norm.forward = lambda hidden: original(hidden).cumsum(dim=1)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (encoder, "does not reproduce its own logits .*: a token attends to later tokens: it is an encoder"),
        (lambda: tiny_default_model("bart"), "does not reproduce its own logits .*: it ignores position_ids"),
        (
            lambda: tiny_default_model("roberta"),
            "other logits from position_ids 0, 1, 2, ... than without position_ids",
        ),
        (mixing_rows, "it attends by other means than transformers' AttentionInterface, adds terms"),
        (lambda: tiny_default_model("diffllama"), "layer 0 of DiffLlamaForCausalLM attends 2 times in a forward"),
        (lambda: tiny_default_model("rwkv"), "has no layer that writes to its KV cache or attends"),
        (
            lambda: tiny_default_model("falcon"),
            "its class does not declare that .*; in transformer.h.0.self_attention: ",
        ),
    ],
    ids=["encoder", "no positions", "other positions", "mixed rows", "attends twice", "no attention", "own attention"],
)
def test_the_reason_of_a_refusal(make, reason):
    with pytest.raises(sd.UnsupportedModelError, match=reason):
        sd.Engine(make(), None)


@pytest.mark.parametrize("precision", ["medium", "high"])
def test_multiplications_in_fewer_bits_are_named(precision):
    """Only some processors multiply so; here the model does what these do."""
    token_ids = torch.arange(8)

    def dense_logits(token_ids, positions):
        logits = torch.eye(8)[: len(token_ids)] + (0 if positions is None else positions[:, None])
        is_exact = torch.get_float32_matmul_precision() == "highest"
        return logits if is_exact else logits + len(token_ids) / 1000

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        reason = why_not_reproduced(dense_logits, token_ids, 1e-4)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert reason.startswith(f"torch.set_float32_matmul_precision('{precision}') makes PyTorch multiply")
    assert why_not_reproduced(dense_logits, token_ids, 1e-4).startswith("it computes other logits from position_ids")


def test_a_model_whose_logits_are_rounding_is_refused_for_that():
    """In fp32 another reason is found, which nothing shows in 16 bits."""
    model = mixing_rows()
    original = model.model.norm.forward
    model.model.norm.forward = lambda hidden: (30 * original(hidden)).sin()
    with pytest.raises(sd.UnsupportedModelError, match="it attends by other means than"):
        sd.Engine(model, None)
    with pytest.raises(sd.UnsupportedModelError, match=r"rounding changes them .* in bfloat16 .* wider dtype"):
        sd.Engine(model.to(torch.bfloat16), None)
    assert not any(module._forward_hooks for module in model.modules())


@torch.no_grad()
def test_rounding_is_no_reason_where_logits_are_far_off():
    token_ids = torch.arange(8)
    embeddings = torch.nn.Embedding(8, 8).to(torch.bfloat16)

    def dense_logits(token_ids, positions):
        return embeddings(token_ids) + (0 if positions is None else positions[:, None])

    assert why_not_reproduced(dense_logits, token_ids, 0.1, False, embeddings).startswith("it computes other logits")
    assert why_not_reproduced(dense_logits, token_ids, 1e-4, False, embeddings).startswith("rounding changes them")


def test_a_decoder_of_the_same_architecture_is_served():
    torch.manual_seed(0)
    decoder = AutoModelForCausalLM.from_config(BertConfig(**TINY, is_decoder=True)).eval()
    assert sd.generate(decoder, None, [[5, 6, 7]])[0].error is None


def test_a_model_that_fails_while_the_reason_is_sought_is_refused_for_the_last_one():
    model = mixing_rows()
    original, cache = model.forward, cache_argument(model)

    def forward(*args, **kwargs):
        if isinstance(kwargs.get(cache), DynamicCache) and kwargs.get("position_ids") is not None:
            raise ValueError("positions are not taken")
        return original(*args, **kwargs)

    model.forward = forward
    with pytest.raises(sd.UnsupportedModelError, match="it attends by other means"):
        sd.Engine(model, None)


def test_a_layer_that_attends_in_some_forwards_only_is_refused():
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    original = attention.forward

    def forward(hidden_states, **kwargs):
        if any(isinstance(value, PagedCache) for value in kwargs.values()):
            return torch.zeros_like(hidden_states), None
        return original(hidden_states, **kwargs)

    attention.forward = forward
    with pytest.raises(sd.UnsupportedModelError, match="attended 2 times in a forward, and 3 times in another"):
        sd.Engine(model, None, enforce_eager=True)
