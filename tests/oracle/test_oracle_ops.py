"""The ops' contract: the oracle against plain loops, and what C++ refuses because it lies outside its buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_fast.ops import all_ops
from support.grids import each_value_once
from support.op_cases import CASES, attention_in_fp64, changed, each_case, each_dtype, make


def append_by_hand(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    for row, slot in enumerate(slot_mapping.tolist()):
        page, offset = divmod(slot, key_cache.shape[1])
        for head in range(key.shape[1]):
            for cache, new in ((key_cache, key), (value_cache, value)):
                for i in range(new.shape[2]):
                    cache[page, offset, head, i] = new[row, head, i]


def assert_within_rounding(got: Tensor, truth: Tensor, args: dict[str, Any]) -> None:
    """The inputs are exact in fp64. A sum of n terms in fp32 is off by n units at most; a narrower dtype rounds the
    weights and the output once each.
    """
    assert (got.dtype, got.shape) == (args["query"].dtype, truth.shape)
    largest, terms = float(args["kv"][1].nan_to_num().abs().max()), args["batch"].max_seqlen_k
    bound = largest * (torch.finfo(got.dtype).eps + (terms + got.shape[2]) * torch.finfo(torch.float32).eps)
    assert float((got.double() - truth).abs().max() if got.numel() else 0) <= bound


@each_value_once
@each_dtype
@each_case("paged_attention")
def test_attention(case, dtype):
    args = make("paged_attention", case, dtype)
    assert_within_rounding(all_ops()["paged_attention"].load("torch")(**args), attention_in_fp64(**args), args)


# The parameters a backend could forget: without any one of them the same check must fail.
WINDOWED = [(case, "sliding_window") for case in ("window", "window_decode", "window_softcap")]
CHUNKED = [(case, "attention_chunk") for case in ("chunk", "chunk_decode", "chunk_prefill", "tree_chunk")]
SINKS = [(case, "sinks") for case in ("sinks", "sinks_fp32", "sinks_window_softcap", "sinks_tree", "wide_values")]
FORGOTTEN = [*WINDOWED, *CHUNKED, ("softcap", "softcap"), ("window_softcap", "softcap"), *SINKS]


@each_value_once
@each_dtype
@pytest.mark.parametrize(("case", "forgotten"), FORGOTTEN)
def test_attention_check_sees_a_forgotten_parameter(case, forgotten, dtype):
    args = make("paged_attention", case, dtype)
    wrong = all_ops()["paged_attention"].load("torch")(**changed(args, f"params.{forgotten}", lambda _: None))
    with pytest.raises(AssertionError):
        assert_within_rounding(wrong, attention_in_fp64(**args), args)


def compact_by_hand(
    kv_cache: Tensor, block_table: Tensor, cu_moves: Tensor, sources: Tensor, destinations: Tensor
) -> None:
    before, pages, bounds, page_size = kv_cache.clone(), block_table.tolist(), cu_moves.tolist(), kv_cache.shape[3]
    for b in range(len(bounds) - 1):
        for m in range(bounds[b], bounds[b + 1]):
            (from_page, from_place), (to_page, to_place) = (
                divmod(int(x[m]), page_size) for x in (sources, destinations)
            )
            for layer in range(kv_cache.shape[0]):
                moved = before[layer, :, pages[b][from_page], from_place]  # keys and values
                kv_cache[layer, :, pages[b][to_page], to_place] = moved


def realign_by_hand(layers: list[tuple[Tensor, Tensor]], starts: Tensor, lengths: Tensor, shifts: Tensor) -> None:
    for tensor in (tensor for layer in layers for tensor in layer):
        before = tensor.clone()
        for row in range(len(starts)):
            for column in range(int(starts[row]), int(starts[row]) + int(lengths[row])):
                tensor[row, :, column + int(shifts[row])] = before[row, :, column]


def flattened(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [tensor for part in value for tensor in flattened(part)]


# In place on both sides; the cases that rightly change nothing are named, so that a test of nothing is noticed.
IN_PLACE = {"append_kv_": append_by_hand, "compact_kv_": compact_by_hand, "realign_kv_": realign_by_hand}
UNCHANGED = {"no_rows", "no_moves", "unmoved", "empty"}


@each_value_once
@each_dtype
@pytest.mark.parametrize(("op", "case"), [(op, case) for op, case in CASES if op in IN_PLACE])
def test_in_place(op, case, dtype):
    got, want, before = (make(op, case, dtype) for _ in range(3))
    assert all_ops()[op].load("torch")(**got) is None
    IN_PLACE[op](**want)
    caches = {"append_kv_": ("key_cache", "value_cache"), "compact_kv_": ("kv_cache",), "realign_kv_": ("layers",)}
    each = [[t for name in caches[op] for t in flattened(args[name])] for args in (got, want, before)]
    assert all(torch.equal(a, b) for a, b in zip(*each[:2], strict=True))
    assert all(torch.equal(a, b) == (case in UNCHANGED) for a, b in zip(*each[1:], strict=True))


def load_cpp(op: str) -> Callable[..., Any]:
    reason = all_ops()[op].why_unavailable("cpp")
    return pytest.skip(reason) if reason else all_ops()[op].load("cpp")


def surrounded(op: str, case: str) -> tuple[Tensor, dict[str, Any]]:
    """The case's arguments, their caches standing inside a larger buffer whose rim must keep its value."""
    args = make(op, case)
    caches = args["kv"] if op == "paged_attention" else (args["key_cache"], args["value_cache"])
    buffer = torch.full((2, len(caches[0]) + 2, *caches[0].shape[1:]), 7.0)
    key, value = buffer[:, 1:-1]
    key.copy_(caches[0].nan_to_num(3.0))
    value.copy_(caches[1].nan_to_num(3.0))
    inside = {"kv": (key, value)} if op == "paged_attention" else {"key_cache": key, "value_cache": value}
    return buffer, {**args, **inside}


# One below, one above, and far outside; in the last row, when all rows before it are in order.
@pytest.mark.parametrize("outside", [-1, 96, 2**31 - 1], ids=["negative", "one_too_many", "huge"])
def test_cpp_append_refuses_a_slot_outside_and_writes_nothing(outside):
    buffer, args = surrounded("append_kv_", "verify")
    assert args["key_cache"].flatten(0, 1).shape[0] == 96
    before = buffer.clone()
    args["slot_mapping"][-1] = outside
    with pytest.raises(IndexError, match=rf"slot_mapping\[47\] is {outside}; the cache has 96 slots"):
        load_cpp("append_kv_")(**args)
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("outside", [-1, 16, 2**31 - 1], ids=["negative", "one_too_many", "huge"])
def test_cpp_attention_refuses_a_page_outside(outside):
    buffer, args = surrounded("paged_attention", "verify")
    assert len(args["kv"][0]) == 16
    before, attention = buffer.clone(), load_cpp("paged_attention")
    within = attention(**args)
    args["batch"].block_table[0, 1:] = outside  # beyond the first sequence's 6 entries: no row looks there
    assert torch.equal(attention(**args), within)
    args["batch"].block_table[2, 8] = outside  # position 128, the last of the third sequence
    with pytest.raises(IndexError, match=rf"block_table\[2, 8\] is {outside}; the cache has 16 pages"):
        attention(**args)
    assert torch.equal(buffer, before)


# More entries than the block table has places for, and fewer than there are rows.
@pytest.mark.parametrize("context", [145, 2])
def test_cpp_attention_refuses_a_context_that_cannot_be(context):
    args = changed(make("paged_attention", "verify"), "batch.max_seqlen_k", lambda longest: max(longest, context))
    args["batch"].seqused_k[2] = context
    with pytest.raises(IndexError, match=f"sequence 2 has 3 rows and {context} KV entries"):
        load_cpp("paged_attention")(**args)


@pytest.mark.parametrize("outside", [-1, 24, 2**31 - 1], ids=["negative", "one_too_many", "huge"])
def test_cpp_compact_refuses_a_page_outside_and_writes_nothing(outside):
    args = make("compact_kv_", "both_directions")
    assert args["kv_cache"].shape[2] == 24
    args["block_table"][1, 10] = outside  # position 40, the last destination of the second sequence
    before = args["kv_cache"].clone()
    with pytest.raises(IndexError, match=rf"block_table\[1, 10\] is {outside}; the cache has 24 pages"):
        load_cpp("compact_kv_")(**args)
    assert torch.equal(args["kv_cache"], before)


# A position below all, and one beyond the block table's 11 pages of 4.
@pytest.mark.parametrize(("place", "position"), [(0, -1), (7, 44)], ids=["negative", "beyond"])
def test_cpp_compact_refuses_a_position_outside_and_writes_nothing(place, position):
    args = changed(
        make("compact_kv_", "both_directions"),
        "destinations",
        lambda x: x.index_fill(0, torch.tensor([place]), position),
    )
    before = args["kv_cache"].clone()
    with pytest.raises(IndexError, match=r"sequence 0 moves entries from .* its block table has room for 44"):
        load_cpp("compact_kv_")(**args)
    assert torch.equal(args["kv_cache"], before)
