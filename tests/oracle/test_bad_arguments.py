"""Every argument of every op, wrong in each way, is refused before a kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.op_cases import OP_CASES
from specdec_fast.ops import all_ops, resolve
from support.op_cases import CPU, changed, make


def strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], dim=-1)[..., 0]


def offsets(*values: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.tensor(values, dtype=torch.int32)


def both(change: Callable[[Tensor], Tensor]) -> Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    return lambda kv: (change(kv[0]), change(kv[1]))


def layer(index: int, change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Change the values of one layer."""
    return lambda layers: [(k, change(v) if i == index else v) for i, (k, v) in enumerate(layers)]


def first(change: Callable[[Tensor], Tensor]) -> Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    return lambda pools: (change(pools[0]), pools[1])


def second(change: Callable[[Tensor], Tensor]) -> Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    return lambda pools: (pools[0], change(pools[1]))


def element(index: int, value: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.index_fill(0, torch.tensor([index]), value)


# Every argument of every op, wrong in each way that would lead a kernel outside its buffers or to another's entries.
BAD: dict[tuple[str, str], dict[str, tuple[str, Callable[[Any], Any], str]]] = {
    ("verify_chain", "ragged"): {  # 22 rows of 5 sequences
        "logits_rank": ("logits", lambda x: x[0], r"logits has shape \[1024\]; expected \[any, any\]"),
        "logits_dtype": ("logits", Tensor.double, "logits is torch.float64; expected float32 or float16"),
        "no_vocabulary": ("logits", lambda x: x[:, :0], "empty vocabulary"),
        "ids_dtype": ("token_ids", Tensor.int, "token_ids is torch.int32; expected int64"),
        "ids_short": ("token_ids", lambda x: x[1:], r"token_ids has shape \[21\]; expected \[22\]"),
        "ids_strided": ("token_ids", strided, "contiguous"),
        "cu_dtype": ("cu_seqlens", Tensor.long, "cu_seqlens is torch.int64; expected int32"),
        "cu_strided": ("cu_seqlens", strided, "contiguous"),
        "cu_falls": ("cu_seqlens", offsets(0, 7, 1, 22), "rise from 0 to the 22 rows"),
        "cu_stands_still": ("cu_seqlens", offsets(0, 7, 7, 22), "rise from 0 to the 22 rows"),
        "cu_starts_late": ("cu_seqlens", offsets(1, 7, 22), "rise from 0 to the 22 rows"),
        "cu_ends_early": ("cu_seqlens", offsets(0, 7, 21), "rise from 0 to the 22 rows"),
        "cu_ends_beyond": ("cu_seqlens", offsets(0, 7, 23), "rise from 0 to the 22 rows"),
        "cu_empty": ("cu_seqlens", offsets(), "rise from 0 to the 22 rows"),
    },
    ("linear", "linear_odd"): {  # 5 rows of 67 features, 33 outputs
        "rows_rank": ("rows", lambda x: x[0], r"rows has shape \[67\]; expected \[any, any\]"),
        "rows_dtype": ("rows", Tensor.double, "rows is torch.float64; expected float32 or float16"),
        "weight_features": ("weight", lambda x: x[:, 1:], r"weight has shape \[33, 66\]; expected \[any, 67\]"),
        "weight_dtype": ("weight", Tensor.half, "weight is torch.float16; expected float32"),
        "weight_strided": ("weight", lambda x: x.T.contiguous().T, "weight must be contiguous"),
        "bias_short": ("bias", lambda x: x[1:], r"bias has shape \[32\]; expected \[33\]"),
        "bias_dtype": ("bias", Tensor.half, "bias is torch.float16; expected float32"),
        "bias_strided": ("bias", strided, "contiguous"),
    },
    ("grouped_linear", "experts_rows"): {  # 13 rows of 64 features, 3 of 5 experts, 70 outputs
        "rows_rank": ("rows", lambda x: x[:, 0], r"rows has shape \[13, 64\]; expected \[any, any, any\]"),
        "rows_dtype": ("rows", Tensor.double, "rows is torch.float64; expected float32 or float16"),
        "rows_lines": (
            "rows",
            lambda x: x.expand(-1, 2, -1),
            "rows has 2 vectors per row; expected 1, or one for each of 3",
        ),
        "ids_dtype": ("expert_ids", Tensor.int, "expert_ids is torch.int32; expected int64"),
        "ids_short": ("expert_ids", lambda x: x[1:], r"expert_ids has shape \[12, 3\]; expected \[13, any\]"),
        "ids_strided": ("expert_ids", strided, "expert_ids must be contiguous"),
        "weight_features": (
            "weight",
            lambda x: x[..., 1:],
            r"weight has shape \[5, 70, 63\]; expected \[any, any, 64\]",
        ),
        "weight_dtype": ("weight", Tensor.half, "weight is torch.float16; expected float32"),
        "weight_strided": ("weight", strided, "weight, or its mT, must be contiguous"),
        "bias_short": ("bias", lambda x: x[:, 1:], r"bias has shape \[5, 69\]; expected \[5, 70\]"),
        "bias_dtype": ("bias", Tensor.half, "bias is torch.float16; expected float32"),
        "bias_strided": ("bias", strided, "bias must be contiguous"),
    },
    ("verify_chain", "sampled"): {  # 27 rows of 9 sequences
        "temperatures_dtype": (
            "sampling.temperatures",
            Tensor.float,
            "temperatures is torch.float32; expected float64",
        ),
        "top_k_dtype": ("sampling.top_k", Tensor.long, "top_k is torch.int64; expected int32"),
        "top_p_short": ("sampling.top_p", lambda x: x[1:], r"top_p has shape \[8\]; expected \[9\]"),
        "min_p_strided": ("sampling.min_p", strided, "contiguous"),
        "penalties_rank": ("sampling.repetition_penalties", lambda x: x[None], "repetition_penalties has shape"),
        "seeds_dtype": ("sampling.seeds", Tensor.int, "seeds is torch.int32; expected int64"),
        "positions_long": ("sampling.positions", lambda x: x.repeat(2), r"positions has shape \[18\]; expected \[9\]"),
        "seen_dtype": ("sampling.seen_ids", Tensor.int, "seen_ids is torch.int32; expected int64"),
        "cu_seen_short": ("sampling.cu_seen", lambda x: x[1:], r"cu_seen has shape \[9\]; expected \[10\]"),
        "cu_seen_ends_beyond": ("sampling.cu_seen", lambda x: x + (x == x[-1]), "cu_seen .* rise from 0"),
    },
    ("verify_chain", "edited_trees"): {  # 49 rows of 9 sequences over 97 tokens
        "allowed_dtype": ("sampling.allowed", Tensor.long, "allowed is torch.int64; expected int32"),
        "allowed_narrow": ("sampling.allowed", lambda x: x[:, 1:], r"allowed has shape \[49, 3\]; expected \[49, 4\]"),
        "allowed_short": ("sampling.allowed", lambda x: x[1:], r"allowed has shape \[48, 4\]; expected \[49, 4\]"),
        "allowed_strided": ("sampling.allowed", strided, "contiguous"),
        "presence_dtype": ("sampling.adjustments.presence_penalties", Tensor.float, "presence_penalties is"),
        "frequency_short": (
            "sampling.adjustments.frequency_penalties",
            lambda x: x[1:],
            "frequency_penalties has shape",
        ),
        "num_prompt_dtype": ("sampling.adjustments.num_prompt", Tensor.long, "num_prompt is torch.int64"),
        "num_prompt_beyond": ("sampling.adjustments.num_prompt", lambda x: x + 100, "num_prompt is .*at most"),
        "num_prompt_negative": ("sampling.adjustments.num_prompt", lambda x: x - 100, "num_prompt is .*at most"),
        "bias_ids_dtype": ("sampling.adjustments.bias_ids", Tensor.int, "bias_ids is torch.int32; expected int64"),
        "bias_values_short": ("sampling.adjustments.bias_values", lambda x: x[1:], "bias_values has shape"),
        "bias_values_strided": ("sampling.adjustments.bias_values", strided, "contiguous"),
        "cu_bias_short": ("sampling.adjustments.cu_bias", lambda x: x[1:], r"cu_bias has shape \[9\]; expected \[10\]"),
        "cu_bias_ends_beyond": ("sampling.adjustments.cu_bias", lambda x: x + (x == x[-1]), "cu_bias .* rise from 0"),
    },
    ("verify_chain", "trees"): {  # 47 rows of 7 sequences; the first one has 12
        "parents_dtype": ("parents", Tensor.long, "parents is torch.int64; expected int32"),
        "parents_short": ("parents", lambda x: x[1:], r"parents has shape \[46\]; expected \[47\]"),
        "parents_strided": ("parents", strided, "parents must be contiguous"),
        "first_row_has_a_parent": ("parents", element(0, 0), r"parents of a sequence are \[0, .*expected -1"),
        "parent_is_later": ("parents", element(3, 4), "earlier rows"),
        "parent_is_itself": ("parents", element(3, 3), "earlier rows"),
        "second_row_without_parent": ("parents", element(14, -1), "earlier rows"),
    },
    ("noise_words", "level"): {  # 10 tokens of 12 rows
        "ids_rank": ("token_ids", lambda x: x[0, 0], "token_ids has shape"),
        "ids_dtype": ("token_ids", Tensor.int, "token_ids is torch.int32; expected int64"),
        "ids_strided": ("token_ids", strided, "contiguous"),
        "seeds_short": ("seeds", lambda x: x[1:], r"seeds has shape \[11\]; expected \[12\]"),
        "seeds_dtype": ("seeds", Tensor.int, "seeds is torch.int32; expected int64"),
        "seeds_strided": ("seeds", strided, "contiguous"),
        "positions_rank": ("positions", lambda x: x[:, None], r"positions has shape \[12, 1\]; expected \[12\]"),
        "positions_dtype": ("positions", Tensor.int, "positions is torch.int32; expected int64"),
        "positions_strided": ("positions", strided, "contiguous"),
    },
    ("append_kv_", "verify"): {  # 48 rows of 2 heads of 32 numbers
        "key_cache_rank": ("key_cache", lambda x: x.flatten(0, 1), "key_cache has shape"),
        "value_cache_shape": ("value_cache", lambda x: x[:-1], "value_cache has shape"),
        "value_cache_dtype": ("value_cache", Tensor.half, "value_cache is torch.float16; expected float32"),
        "key_cache_strided": ("key_cache", strided, "contiguous"),
        "key_dtype": ("key", Tensor.bfloat16, "key is torch.bfloat16; expected float32"),
        "key_heads": ("key", lambda x: x[:, :1], r"key has shape \[48, 1, 32\]; expected \[48, 2, 32\]"),
        "value_heads": ("value", lambda x: x[..., 1:], r"value has shape \[48, 2, 31\]; expected \[48, 2, 32\]"),
        "value_rows": ("value", lambda x: x[1:], r"value has shape \[47, 2, 32\]; expected \[48, 2, 32\]"),
        "slots_dtype": ("slot_mapping", Tensor.long, "slot_mapping is torch.int64; expected int32"),
        "slots_short": ("slot_mapping", lambda x: x[1:], r"slot_mapping has shape \[47\]; expected \[48\]"),
        "slots_strided": ("slot_mapping", strided, "contiguous"),
    },
    ("compact_kv_", "both_directions"): {  # moves 0 to 7 of one sequence, 8 to 12 of the other
        "cache_rank": ("kv_cache", lambda x: x[0], "kv_cache has shape"),
        "cache_dtype": ("kv_cache", Tensor.double, "kv_cache is torch.float64; expected float32"),
        "cache_strided": ("kv_cache", strided, "contiguous"),
        "table_dtype": ("block_table", Tensor.long, "block_table is torch.int64; expected int32"),
        "table_strided": ("block_table", strided, "contiguous"),
        "table_rows": ("block_table", lambda x: x[:1], r"cu_moves has shape \[3\]; expected \[2\]"),
        "cu_dtype": ("cu_moves", Tensor.long, "cu_moves is torch.int64; expected int32"),
        "cu_strided": ("cu_moves", strided, "contiguous"),
        "cu_falls": ("cu_moves", offsets(0, 14, 13), "rise from 0 to the 13 rows"),
        "cu_starts_late": ("cu_moves", offsets(1, 8, 13), "rise from 0 to the 13 rows"),
        "cu_ends_early": ("cu_moves", offsets(0, 8, 12), "rise from 0 to the 13 rows"),
        "cu_ends_beyond": ("cu_moves", offsets(0, 8, 14), "rise from 0 to the 13 rows"),
        "sources_dtype": ("sources", Tensor.long, "sources is torch.int64; expected int32"),
        "sources_strided": ("sources", strided, "contiguous"),
        "sources_fall": ("sources", element(3, 1), "sources must rise strictly within a sequence"),
        "sources_stand_still": ("sources", element(12, 31 - 1), "sources must rise strictly within a sequence"),
        "destinations_short": (
            "destinations",
            lambda x: x[1:],
            r"destinations has shape \[12\]; expected \[13\]",
        ),
        "destinations_dtype": ("destinations", Tensor.long, "destinations is torch.int64; expected int32"),
        "destinations_strided": ("destinations", strided, "contiguous"),
        "destinations_fall": ("destinations", element(7, 3), "destinations must rise strictly within a sequence"),
    },
    ("realign_kv_", "step"): {  # 2 layers, 5 rows, 101 columns
        "no_layers": ("layers", lambda _: [], "layers is empty"),
        "rank": ("layers", lambda x: [(k[0], v[0]) for k, v in x], "keys of layer 0 has shape"),
        "dtype": ("layers", lambda x: [(k.double(), v.double()) for k, v in x], "keys of layer 0 is torch.float64"),
        "shapes_differ": ("layers", layer(1, lambda x: x[:, :1]), "values of layer 1 has shape"),
        "dtypes_differ": ("layers", layer(1, Tensor.half), "values of layer 1 is torch.float16; expected float32"),
        "strides_differ": ("layers", layer(0, Tensor.clone), "values of layer 0 has other strides"),
        "last_axis": ("layers", lambda x: [tuple(map(strided, kv)) for kv in x], "last axis .* must be contiguous"),
        "starts_dtype": ("starts", Tensor.long, "starts is torch.int64; expected int32"),
        "lengths_short": ("lengths", lambda x: x[1:], r"lengths has shape \[4\]; expected \[5\]"),
        "shifts_strided": ("shifts", strided, "shifts must be contiguous"),
        "start_negative": ("starts", element(2, -1), "60 columns from -1 cannot be shifted by 0 within 101"),
        "length_negative": ("lengths", element(0, -1), "-1 columns from 5 cannot be shifted by -2 within 101"),
        "beyond_the_left": ("shifts", element(0, -6), "90 columns from 5 cannot be shifted by -6 within 101"),
        "beyond_the_right": ("shifts", element(3, 7), "83 columns from 12 cannot be shifted by 7 within 101"),
        "from_beyond": ("lengths", element(0, 97), "97 columns from 5 cannot be shifted by -2 within 101"),
    },
    ("paged_attention", "tree"): {  # 18 rows of 3 sequences, 9 of one at most
        "mask_dtype": ("batch.tree_mask", Tensor.long, "tree_mask is torch.int64; expected int32"),
        "mask_rank": ("batch.tree_mask", lambda x: x[:, 0], r"tree_mask has shape \[18\]; expected \[18, any\]"),
        "mask_rows": ("batch.tree_mask", lambda x: x[1:], r"tree_mask has shape \[17, 1\]; expected \[18, any\]"),
        "mask_strided": ("batch.tree_mask", strided, "contiguous"),
        "mask_empty": ("batch.tree_mask", lambda x: x[:, :0], "tree_mask has no bits for 9 rows"),
    },
    ("paged_attention", "wide_tree"): {  # 70 rows of one sequence: three words
        "mask_words": ("batch.tree_mask", lambda x: x[:, :2].contiguous(), "tree_mask has no bits for 70 rows"),
    },
    ("paged_attention", "verify"): {  # 16 rows of 4 sequences
        "query_rank": ("query", lambda x: x.flatten(1), "query has shape"),
        "query_dtype": ("query", Tensor.double, "query is torch.float64; expected float32 or float16"),
        "query_heads": ("query", lambda x: x[:, :3], "3 query heads are not a multiple of 2 KV heads"),
        "kv_dtype": ("kv", both(Tensor.half), "key cache is torch.float16; expected float32"),
        "kv_head_dim": ("kv", both(lambda x: x[..., :16]), "key cache has shape"),
        "kv_unequal": ("kv", lambda kv: (kv[0], kv[1][1:]), "value cache has shape"),
        "kv_heads_unequal": ("kv", lambda kv: (kv[0], kv[1][:, :, 1:].contiguous()), "value cache has shape"),
        "kv_strided": ("kv", both(strided), "contiguous"),
        "table_dtype": ("batch.block_table", Tensor.long, "block_table is torch.int64; expected int32"),
        "table_rows": (
            "batch.block_table",
            lambda x: x[:3],
            r"block_table has shape \[3, 9\]; expected \[4, any\]",
        ),
        "table_strided": ("batch.block_table", strided, "contiguous"),
        "used_dtype": ("batch.seqused_k", Tensor.long, "seqused_k is torch.int64; expected int32"),
        "cu_length": ("batch.cu_seqlens_q", lambda x: x[1:], r"cu_seqlens_q has shape \[4\]; expected \[5\]"),
        "cu_falls": ("batch.cu_seqlens_q", offsets(0, 6, 5, 15, 16), "cu_seqlens_q"),
        "cu_starts_late": ("batch.cu_seqlens_q", offsets(1, 6, 12, 15, 16), "cu_seqlens_q"),
        "cu_ends_early": ("batch.cu_seqlens_q", offsets(0, 6, 12, 14, 15), "cu_seqlens_q"),
        "cu_ends_beyond": ("batch.cu_seqlens_q", offsets(0, 6, 12, 15, 17), "cu_seqlens_q"),
        "rows_understated": ("batch.max_seqlen_q", lambda _: 5, "max_seqlen_q is 5; the largest is 6"),
        "context_understated": ("batch.max_seqlen_k", lambda _: 128, "max_seqlen_k is 128; the largest is 129"),
        "window_zero": ("params.sliding_window", lambda _: 0, "sliding_window=0; expected None or > 0"),
        "chunk_zero": ("params.attention_chunk", lambda _: 0, "attention_chunk=0; expected None or > 0"),
        "window_and_chunk": (
            "params",
            lambda params: replace(params, sliding_window=5, attention_chunk=8),
            "sliding_window=5 and attention_chunk=8; expected one",
        ),
        "sinks_short": ("params.sinks", lambda _: torch.zeros(3), r"sinks has shape \[3\]; expected \[4\]"),
        "sinks_dtype": ("params.sinks", lambda _: torch.zeros(4).half(), "sinks is torch.float16; expected float32"),
        "sinks_strided": ("params.sinks", lambda _: torch.zeros(8)[::2], "sinks must be contiguous"),
        "softcap_zero": ("params.softcap", lambda _: 0.0, r"softcap=0\.0; expected None or > 0"),
    },
    ("conv_rows_", "mixed"): {  # 25 rows of 9 sequences, 24 channels, a kernel of 4, 8 places for inputs
        "rows_rank": ("rows", lambda x: x[None], r"rows has shape \[1, 25, 24\]; expected \[any, any\]"),
        "rows_dtype": ("rows", Tensor.double, "rows is torch.float64; expected float32 or float16"),
        "state_channels": ("state", lambda x: x[..., 1:], r"state has shape .* expected \[any, any, 24\]"),
        "state_dtype": ("state", Tensor.half, "state is torch.float16; expected float32"),
        "state_strided": ("state", strided, "contiguous"),
        "state_places": (
            "state",
            lambda x: x[:, :6].contiguous(),
            "state has 6 places .* at least 7: 3 .* 4 rows that",
        ),
        "weight_channels": ("weight", lambda x: x[1:], r"weight has shape \[23, 4\]; expected \[24, any\]"),
        "weight_dtype": ("weight", Tensor.half, "weight is torch.float16; expected float32"),
        "weight_strided": ("weight", strided, "contiguous"),
        "weight_empty": ("weight", lambda x: x[:, :0].contiguous(), "weight has no places for inputs"),
        "bias_short": ("bias", lambda x: x[1:], r"bias has shape \[23\]; expected \[24\]"),
        "bias_strided": ("bias", strided, "contiguous"),
        "activation": ("activation", lambda _: "gelu", "activation is 'gelu'; expected 'silu' or None"),
        "slots_dtype": ("batch.slots", Tensor.long, "slots is torch.int64; expected int32"),
        "slots_strided": ("batch.slots", strided, "contiguous"),
        "slots_beyond": ("batch.slots", element(3, 11), r"slots is .* from 0 to 10, and each but slot 0 once"),
        "slots_negative": ("batch.slots", element(3, -1), r"slots is .* from 0 to 10"),
        "slots_twice": ("batch.slots", lambda x: x[:1].expand(9).contiguous(), "each but slot 0 once"),
        "cu_length": ("batch.cu_seqlens", lambda x: x[1:], r"cu_seqlens has shape \[9\]; expected \[10\]"),
        "cu_ends_beyond": ("batch.cu_seqlens", lambda x: x + (x == x[-1]), "rise from 0 to the 25 rows"),
        "lengths_dtype": ("batch.state_lengths", Tensor.long, "state_lengths is torch.int64; expected int32"),
        "lengths_negative": ("batch.state_lengths", element(1, -1), "state_lengths is .* no number below 0"),
        "replayed_short": ("batch.num_replayed", lambda x: x[1:], r"num_replayed has shape \[8\]; expected \[9\]"),
        "replayed_negative": ("batch.num_replayed", element(1, -1), "num_replayed is .* no number below 0"),
        "stored_beyond": ("batch.num_stored", element(2, 2), r"num_stored is .* and own rows .*\[5, 3, 1, 5, 6, "),
        "stored_negative": ("batch.num_stored", element(2, -1), "num_stored is .* at most the replayed and own rows"),
    },
    ("linear_attention_rows_", "gated_delta"): {  # 25 rows, 1 key head of 16, 2 value heads of 24, 8 kept rows
        "query_rank": ("query", lambda x: x[0], "query has shape"),
        "query_dtype": ("query", Tensor.double, "query is torch.float64; expected float32 or float16"),
        "key_heads": ("key", lambda x: x[:, :0], r"key has shape \[25, 0, 16\]; expected \[25, 1, 16\]"),
        "value_rows": ("value", lambda x: x[1:], r"value has shape \[24, 2, 24\]; expected \[25, any, any\]"),
        "value_dtype": ("value", Tensor.half, "value is torch.float16; expected float32"),
        "decay_dtype": ("log_decay", Tensor.half, "log_decay is torch.float16; expected float32"),
        "decay_channels": ("log_decay", lambda x: x[..., None], r"log_decay has shape .* expected \[25, 2, 16\]"),
        "beta_heads": ("beta", lambda x: x[:, :1], r"beta has shape \[25, 1\]; expected \[25, 2\]"),
        "states_dtype": ("pools", first(Tensor.half), "states is torch.float16; expected float32"),
        "states_mixed_up": ("pools", first(lambda x: x.mT), r"states has shape .* expected \[any, 2, 16, 24\]"),
        "states_strided": ("pools", first(strided), "contiguous"),
        "kept_width": ("pools", second(lambda x: x[..., 1:]), r"kept rows has shape .* expected \[11, any, 68\]"),
        "kept_strided": ("pools", second(strided), "contiguous"),
        "kept_places": (
            "pools",
            second(lambda x: x[:, :5].contiguous()),
            "sequence 4 replays 3 rows and has 3 of its own, and not all are stored; 5 .* at least 6",
        ),
        "skip_short": ("params.skip", lambda _: torch.zeros(1), r"skip has shape \[1\]; expected \[2\]"),
        "skip_strided": ("params.skip", lambda _: torch.zeros(4)[::2], "skip must be contiguous"),
        "slots_beyond": ("batch.slots", element(3, 11), r"slots is .* from 0 to 10, and each but slot 0 once"),
    },
    ("linear_attention_rows_", "mamba"): {  # 2 key heads, 4 value heads
        "heads": ("value", lambda x: x[:, 1:], "3 value heads are not a multiple of 2 key heads"),
    },
    ("selective_scan_rows_", "groups"): {  # 25 rows, 40 channels, state_dim 8, 2 groups, 8 kept rows
        "x_rank": ("x", lambda x: x[0], "x has shape"),
        "x_dtype": ("x", Tensor.double, "x is torch.float64; expected float32 or float16"),
        "dt_dtype": ("dt", Tensor.half, "dt is torch.float16; expected float32"),
        "dt_channels": ("dt", lambda x: x[:, 1:], r"dt has shape \[25, 39\]; expected \[25, 40\]"),
        "A_channels": ("A", lambda x: x[1:], r"A has shape \[39, 8\]; expected \[40, any\]"),
        "A_dtype": ("A", Tensor.half, "A is torch.float16; expected float32"),
        "B_states": ("B", lambda x: x[..., 1:], r"B has shape \[25, 2, 7\]; expected \[25, any, 8\]"),
        "B_groups": ("B", lambda x: x[:, [0, 1, 1]], r"C has shape \[25, 2, 8\]; expected \[25, 3, 8\]"),
        "C_dtype": ("C", Tensor.half, "C is torch.float16; expected float32"),
        "skip_short": ("skip", lambda x: x[1:], r"skip has shape \[39\]; expected \[40\]"),
        "skip_strided": ("skip", strided, "skip must be contiguous"),
        "states_mixed_up": ("pools", first(lambda x: x.mT), r"states has shape .* expected \[any, 8, 40\]"),
        "states_strided": ("pools", first(strided), "contiguous"),
        "kept_width": ("pools", second(lambda x: x[..., 1:]), r"kept rows has shape .* expected \[11, any, 96\]"),
        "kept_places": ("pools", second(lambda x: x[:, :5].contiguous()), "sequence 4 replays 3 rows .* at least 6"),
        "slots_beyond": ("batch.slots", element(3, 11), r"slots is .* from 0 to 10, and each but slot 0 once"),
    },
}


made = cache(make)  # the checks change nothing


@pytest.mark.parametrize(("op", "case", "name"), [(*op, name) for op, bad in BAD.items() for name in bad])
def test_bad_argument_is_refused(op, case, name):
    argument, spoil, message = BAD[op, case][name]
    args = made(op, case)
    all_ops()[op].check(**args)
    with pytest.raises(ValueError, match=message):  # the check alone: a kernel that ran would corrupt memory
        all_ops()[op].check(**changed(args, argument, spoil))


IMPLEMENTATIONS = [(op, backend) for op in all_ops().values() for backend in op.implementations]


@pytest.mark.parametrize(("op", "backend"), IMPLEMENTATIONS, ids=[f"{op.name}-{b}" for op, b in IMPLEMENTATIONS])
def test_every_implementation_is_checked_first(op, backend):
    if op.why_unavailable(backend) is not None:
        pytest.skip(op.why_unavailable(backend))

    def refuse(**args: Any) -> None:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        replace(op, check=refuse).load(backend)(**make(op.name, OP_CASES[op.name].cases[0].name))


def test_resolved_ops_are_checked_but_for_the_unchecked():
    ops, args = resolve(CPU, "torch"), make("verify_chain", "ragged")
    args["token_ids"] = args["token_ids"].int()
    with pytest.raises(ValueError, match="token_ids"):
        ops.verify_chain(**args)
    ops.unchecked.verify_chain(**args)
