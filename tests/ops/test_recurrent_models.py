"""Ops of recurrent layers against the functions of ``transformers`` that models call, in fp32."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_fast.batch.recurrent_batch import LinearAttentionParams, RecurrentBatch
from specdec_fast.ops import all_ops

NUM_ROWS = 13
CHUNKED = 9  # rows of the first call


def function(model: str, name: str) -> Callable[..., Any]:
    """A function of a model's module; skips where this transformers has none of that name."""
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}", reason=f"there is no {model}")
    return getattr(module, name, None) or pytest.skip(f"{model} has no {name}")


def one_sequence(length: int, rows: int) -> RecurrentBatch:
    one = torch.ones(1, dtype=torch.int32)
    return RecurrentBatch(
        cu_seqlens=torch.tensor([0, rows], dtype=torch.int32), slots=one, state_lengths=length * one,
        num_replayed=0 * one, num_stored=rows * one,
    )  # fmt: skip


def normal(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class Recurrence:
    """Linear attention as a model computes it."""

    model: str
    names: tuple[str, str]  # the functions of one row at a time and of chunks
    key_heads: int
    per_channel: bool = False


GATED_DELTA = ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule")
KIMI_DELTA = ("recurrent_kimi_delta_attention", "chunk_kimi_delta_attention")
DELTA_RULES = [
    Recurrence("qwen3_next", GATED_DELTA, key_heads=2),
    Recurrence("qwen3_5", GATED_DELTA, key_heads=1),
    Recurrence("olmo_hybrid", GATED_DELTA, key_heads=4),
    Recurrence("kimi_linear", KIMI_DELTA, key_heads=4, per_channel=True),
]


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("recurrence", DELTA_RULES, ids=lambda recurrence: recurrence.model)
def test_delta_rules(recurrence, chunks):
    theirs = function(recurrence.model, recurrence.names[chunks])
    heads, key_dim, value_dim = 4, 16, 8
    query, key = normal(1, NUM_ROWS, recurrence.key_heads, key_dim), normal(1, NUM_ROWS, recurrence.key_heads, key_dim)
    value, beta = normal(1, NUM_ROWS, heads, value_dim), normal(1, NUM_ROWS, heads).sigmoid()
    g = -normal(1, NUM_ROWS, heads, *([key_dim] if recurrence.per_channel else [])).exp()
    states = torch.full((2, heads, key_dim, value_dim), float("nan"))
    kept = torch.empty(2, 0, sum(x[0, 0].numel() for x in (key, value, g, beta)))
    params = LinearAttentionParams(scale=key_dim**-0.5, l2norm_eps=1e-6)
    state = None
    for first, stop in ((0, CHUNKED), (CHUNKED, NUM_ROWS)):
        rows = [x[:, first:stop] for x in (query, key, value, g, beta)]
        # transformers 5.17 repeats the heads of a group before it calls the function.
        repeated = (x.repeat_interleave(heads // recurrence.key_heads, dim=2) for x in rows[:2])
        expected, state = theirs(*repeated, rows[2], g=rows[3], beta=rows[4], initial_state=state,
                                 output_final_state=True, use_qk_l2norm_in_kernel=True)  # fmt: skip
        attend = all_ops()["linear_attention_rows_"].load("torch")
        got = attend(*(x[0] for x in rows), (states, kept), one_sequence(first, stop - first), params)
        assert_close(got, expected[0])
        assert_close(states[1:], state)


def mamba2_inputs() -> dict[str, Tensor]:
    heads, head_dim, groups, state_dim = 4, 8, 2, 16
    sizes = {"x": (heads, head_dim), "dt": (heads,), "B": (groups, state_dim), "C": (groups, state_dim)}
    inputs = {name: normal(1, NUM_ROWS, *size) for name, size in sizes.items()}
    return inputs | {"A": -normal(heads).exp(), "D": normal(heads), "dt_bias": normal(heads)}


def mamba2_by_the_op(inputs: dict[str, Tensor], first: int, stop: int, pools: tuple[Tensor, Tensor]) -> Tensor:
    rows = {name: inputs[name][0, first:stop] for name in ("x", "dt", "B", "C")}
    dt = torch.nn.functional.softplus(rows["dt"] + inputs["dt_bias"])
    params = LinearAttentionParams(delta_rule=False, skip=inputs["D"])
    attend = all_ops()["linear_attention_rows_"].load("torch")
    batch = one_sequence(first, stop - first)
    return attend(rows["C"], rows["B"], rows["x"], inputs["A"] * dt, dt, pools, batch, params)


@pytest.mark.parametrize("model", ["bamba", "mamba2", "nemotron_h", "granitemoehybrid", "falcon_h1", "zamba2"])
def test_mamba2_in_chunks_and_then_row_by_row(model):
    scan, update = function(model, "mamba2_chunk_scan"), function(model, "mamba2_selective_state_update")
    inputs = mamba2_inputs()
    heads, head_dim, groups, state_dim = 4, 8, 2, 16
    width = groups * state_dim + heads * head_dim + 2 * heads
    pools = torch.full((2, heads, state_dim, head_dim), float("nan")), torch.empty(2, 0, width)
    chunk = {name: x[:, :CHUNKED] if x.dim() > 1 else x for name, x in inputs.items()}
    expected, state = scan(
        chunk["x"], chunk["dt"], chunk["A"], chunk["B"], chunk["C"], chunk_size=4, D=chunk["D"],
        dt_bias=chunk["dt_bias"], dt_softplus=True, return_final_states=True,
    )  # fmt: skip
    assert_close(mamba2_by_the_op(inputs, 0, CHUNKED, pools), expected[0])
    assert_close(pools[0][1:].mT, state)
    wide = {name: inputs[name][:, None].expand(-1, head_dim) for name in ("D", "dt_bias")}
    A = inputs["A"][:, None, None].expand(-1, head_dim, state_dim)
    for row in range(CHUNKED, NUM_ROWS):
        x, dt, B, C = (inputs[name][:, row] for name in ("x", "dt", "B", "C"))
        expected = update(state, x, dt[..., None].expand(-1, -1, head_dim), A, B, C, wide["D"], dt_bias=wide["dt_bias"],
                          dt_softplus=True)  # fmt: skip
        assert_close(mamba2_by_the_op(inputs, row, row + 1, pools), expected)
        assert_close(pools[0][1:].mT, state)


@pytest.mark.parametrize("model", ["jamba", "mamba", "falcon_mamba", "zamba"])
def test_mamba1_in_a_scan_and_then_row_by_row(model):
    scan, update = function(model, "mamba_selective_scan"), function(model, "mamba_selective_state_update")
    channels, state_dim = 12, 16
    x, time_step = normal(1, channels, NUM_ROWS), normal(1, channels, NUM_ROWS + 1)[..., 1:]
    B, C = normal(1, state_dim, NUM_ROWS), normal(1, state_dim, NUM_ROWS + 1)[..., 1:]
    A, D, bias = -normal(channels, state_dim).exp(), normal(channels), normal(channels + 1)[1:]
    pools = torch.full((2, state_dim, channels), float("nan")), torch.empty(2, 0, 2 * channels + state_dim)

    def by_the_op(first: int, stop: int) -> Tensor:
        rows = [each[0, :, first:stop].T for each in (x, time_step, B, C)]
        dt = torch.nn.functional.softplus(rows[1] + bias)
        run = all_ops()["selective_scan_rows_"].load("torch")
        batch = one_sequence(first, stop - first)
        return run(rows[0], dt, A, rows[2][:, None], rows[3][:, None], D, pools, batch)

    first = [each[..., :CHUNKED] for each in (x, time_step, B, C)]
    expected, state = scan(*first[:2], A, *first[2:], D=D, delta_bias=bias, delta_softplus=True, return_last_state=True)
    assert_close(by_the_op(0, CHUNKED), expected[0].T)
    assert_close(pools[0][1:].mT, state)
    for row in range(CHUNKED, NUM_ROWS):
        own = [each[..., row] for each in (x, time_step, B, C)]
        expected = update(state, *own[:2], A, *own[2:], D, dt_bias=bias, dt_softplus=True)
        assert_close(by_the_op(row, row + 1), expected)
        assert_close(pools[0][1:].mT, state)


@pytest.mark.parametrize(
    ("model", "kernel", "has_bias", "activation"),
    [("qwen3_next", 4, False, "silu"), ("bamba", 4, True, "silu"), ("lfm2", 3, False, None), ("lfm3", 7, True, None)],
)
def test_convolutions(model, kernel, has_bias, activation):
    whole, update = function(model, "causal_conv1d_fn"), function(model, "causal_conv1d_update")
    channels = 12
    inputs, weight = normal(1, channels, NUM_ROWS), normal(channels, kernel)
    bias = normal(channels) if has_bias else None
    state = torch.full((2, 9, channels), float("nan"))
    convolve = all_ops()["conv_rows_"].load("torch")

    def by_the_op(first: int, stop: int) -> Tensor:
        batch = one_sequence(first, stop - first)
        return convolve(inputs[0, :, first:stop].T, state, weight, bias, activation, batch)

    for first, stop in ((0, 2), (2, CHUNKED)):
        expected = whole(inputs[..., :stop], weight, bias, activation=activation)
        assert_close(by_the_op(first, stop), expected[0, :, first:stop].T)
    theirs = inputs[..., CHUNKED - kernel : CHUNKED].clone()
    for row in range(CHUNKED, NUM_ROWS):
        expected = update(inputs[..., row : row + 1], theirs, weight, bias, activation)
        assert_close(by_the_op(row, row + 1), expected[0].T)


def test_lightning_attention():
    """MiniMax computes it inside its layer, in blocks and then row by row."""
    module = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = importlib.import_module("transformers").MiniMaxConfig(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_hidden_layers=2, block_size=4,
        vocab_size=8, intermediate_size=8, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    layer = module.MiniMaxLightningAttention(config, 0).eval()
    seen = {}
    layer.norm.register_forward_pre_hook(lambda norm, given: seen.update(heads=given[0]))
    cache, pools = module.MiniMaxCache(), (torch.full((2, 2, 8, 8), float("nan")), torch.empty(2, 0, 34))
    hidden = normal(1, NUM_ROWS, 32)
    params = LinearAttentionParams(delta_rule=False)
    with torch.no_grad():
        for first, stop in ((0, CHUNKED), (CHUNKED, NUM_ROWS)):
            layer(hidden[:, first:stop], None, None, past_key_values=cache)
            heads = layer.act_fn(layer.qkv_proj(hidden[0, first:stop])).view(stop - first, 2, 24)
            decay = -layer.slope_rate.view(1, 2).expand(stop - first, -1)
            attend = all_ops()["linear_attention_rows_"].load("torch")
            batch = one_sequence(first, stop - first)
            got = attend(*heads.split(8, dim=-1), decay, None, pools, batch, params)
            assert_close(got.flatten(1), seen["heads"][0])
