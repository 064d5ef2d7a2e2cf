"""Ops that change their arguments in place write what the contract names and not one byte else.

Every cache stands inside a larger buffer; after the op all of the buffer that no row, move or shift names must have the
bits it had: the rim on both sides, the gaps between rows, all other pages and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.op_cases import OP_CASES, with_tensors
from specdec_fast.batch.recurrent_batch import RecurrentBatch
from specdec_fast.ops import all_ops
from support.grids import each_value_once
from support.op_cases import make
from support.op_checks import device_for, same_bits

RIM = 67  # numbers on either side; odd, so that nothing is aligned (in test_ops.py everything is)
SIZES = {"4 bytes": torch.float32, "2 bytes": torch.bfloat16}  # a copy depends on nothing else of a dtype


def guarded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a copy of ``tensor``, strides included, and the buffer of one rim, the copy and another rim around it."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    buffer = torch.randn(extent + 2 * RIM, generator=torch.Generator().manual_seed(1)).to(tensor.dtype)
    buffer[0] = 0  # so that a test can change its sign alone
    inside = buffer.to(tensor.device)
    copy = inside.as_strided(tensor.shape, tensor.stride(), RIM)
    copy.copy_(tensor)
    return copy, inside


def slots(positions: Tensor, block_table: Tensor, page_size: int) -> Tensor:
    return block_table[positions // page_size].long() * page_size + positions % page_size


def named_by_append(args: dict[str, Any], masks: list[Tensor]) -> None:
    for mask in masks:
        mask.flatten(0, 1)[args["slot_mapping"].long()] = True


def named_by_compact(args: dict[str, Any], masks: list[Tensor]) -> None:
    entries = masks[0].flatten(2, 3)
    bounds = args["cu_moves"].tolist()
    for b, pages in enumerate(args["block_table"]):
        source, destination = (args[name][bounds[b] : bounds[b + 1]].long() for name in ("sources", "destinations"))
        entries[:, :, slots(destination[source != destination], pages, masks[0].shape[3])] = True


def named_by_realign(args: dict[str, Any], masks: list[Tensor]) -> None:
    for row, (start, length, shift) in enumerate(zip(args["starts"], args["lengths"], args["shifts"], strict=True)):
        for mask in masks:
            if shift:
                mask[row, :, start + shift : start + shift + length] = True


def places_of_rows(batch: RecurrentBatch, num_places: int) -> Iterator[tuple[int, int, bool]]:
    """Yield of each row its slot, the place of its position in a ring, and whether it is a draft row."""
    for b, slot in enumerate(batch.slots.tolist()):
        replayed, count = int(batch.num_replayed[b]), int(batch.cu_seqlens.diff()[b])
        for i in range(replayed, replayed + count):
            yield slot, (int(batch.state_lengths[b]) + i) % num_places, i >= int(batch.num_stored[b])


def named_by_conv(args: dict[str, Any], masks: list[Tensor]) -> None:
    for slot, place, _ in places_of_rows(args["batch"], masks[0].shape[1]):
        masks[0][slot, place] = True


def named_by_state(args: dict[str, Any], masks: list[Tensor]) -> None:
    states, kept = masks
    states[args["batch"].slots.long()] = True
    for slot, place, is_draft in places_of_rows(args["batch"], kept.shape[1]):
        kept[slot, place] |= is_draft


# Which arguments an op changes, and what of them its contract lets it write.
NAMED: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any], list[Tensor]], None]]] = {
    "append_kv_": (("key_cache", "value_cache"), named_by_append),
    "compact_kv_": (("kv_cache",), named_by_compact),
    "realign_kv_": (("layers",), named_by_realign),
    "conv_rows_": (("state",), named_by_conv),
    "linear_attention_rows_": (("pools",), named_by_state),
    "selective_scan_rows_": (("pools",), named_by_state),
}
SWEEP = [
    pytest.param(
        op, backend, case, id=f"{op.name}-{backend}-{case.name}", marks=() if backend == "cpp" else pytest.mark.grid
    )
    for op in all_ops().values()
    if op.name in NAMED
    for backend in op.implementations
    for case in OP_CASES[op.name].cases
]


def with_guards(op: str, args: dict[str, Any]) -> tuple[dict[str, Any], list[Tensor], list[Tensor]]:
    """Return the arguments with guarded caches, those caches, and their buffers."""
    found: list[tuple[Tensor, Tensor]] = []

    def guard(value: Any) -> Any:
        if isinstance(value, Tensor):
            found.append(guarded(value))
            return found[-1][0]
        return type(value)(guard(part) for part in value)

    args = {**args, **{name: guard(args[name]) for name in NAMED[op][0]}}
    return args, [copy for copy, _ in found], [buffer for _, buffer in found]


def may_be_written(op: str, args: dict[str, Any], copies: list[Tensor], buffers: list[Tensor]) -> Iterator[Tensor]:
    """Yield for each buffer the mask of the places that the arguments name."""
    masks = [torch.zeros(buffer.shape, dtype=torch.bool, device=buffer.device) for buffer in buffers]
    views = [mask.as_strided(copy.shape, copy.stride(), RIM) for mask, copy in zip(masks, copies, strict=True)]
    NAMED[op][1](args, views)
    yield from masks


def assert_writes_only_what_is_named(op: str, function: Callable[..., None], args: dict[str, Any]) -> None:
    args, copies, buffers = with_guards(op, args)
    others = {name: value for name, value in args.items() if name not in NAMED[op][0]}
    before, others_before = [b.clone() for b in buffers], with_tensors(others, lambda _, tensor: tensor.clone())
    function(**args)
    assert same_bits(others, others_before), "an argument that is only read was written"
    masks = may_be_written(op, args, copies, buffers)
    for buffer, old, mask in zip(buffers, before, masks, strict=True):
        assert same_bits(buffer[~mask], old[~mask]), "a place that nothing names was written"


@each_value_once("op", "backend", "case")
@pytest.mark.parametrize("dtype", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize(("op", "backend", "case"), SWEEP)
def test_writes_only_what_is_named(op, backend, case, dtype):
    args = case.make(torch.Generator().manual_seed(0), dtype, device_for(op, backend))
    assert_writes_only_what_is_named(op.name, op.load(backend), args)


def test_every_op_in_place_is_guarded():
    assert {name for name in all_ops() if name.endswith("_")} == set(NAMED)


CASE = {"append_kv_": "verify", "compact_kv_": "both_directions", "realign_kv_": "step"}
CASE |= {"conv_rows_": "mixed", "linear_attention_rows_": "gated_delta", "selective_scan_rows_": "mixed"}
INPUT = {"append_kv_": "key", "compact_kv_": "sources", "realign_kv_": "shifts"}
INPUT |= {"conv_rows_": "rows", "linear_attention_rows_": "beta", "selective_scan_rows_": "dt"}


def first_cache(args: dict[str, Any]) -> Tensor:
    """Return four axes of the first buffer: pages or slots first, rows of a dense cache."""
    if "layers" in args:
        return args["layers"][0][0]
    if "batch" in args:
        states = args["state"] if "state" in args else args["pools"][0]
        return states if states.dim() == 4 else states[:, None]
    return args["key_cache"] if "key_cache" in args else args["kv_cache"][0, 0]


def number(args: dict[str, Any], place: int) -> Tensor:
    """Return one number of the first buffer, rims included; the last one is at -1."""
    cache = first_cache(args)
    return cache.as_strided((1,), (1,), place % (cache.untyped_storage().nbytes() // cache.element_size()))


def before_the_cache(args: dict[str, Any]) -> None:
    number(args, RIM - 1).fill_(0)


def after_the_cache(args: dict[str, Any]) -> None:
    number(args, -RIM).fill_(0)


def another_page(args: dict[str, Any]) -> None:
    """The scratch page or slot; of a dense cache, the row that does not move."""
    first_cache(args)[2 if "layers" in args else 0, 0, 0, 0] = 0


def sign_of_a_zero(args: dict[str, Any]) -> None:
    """An equal number with another bit."""
    number(args, 0).neg_()


# Negative controls: an op that is right but for one number elsewhere must fail.
@pytest.mark.parametrize("stray", [before_the_cache, after_the_cache, another_page, sign_of_a_zero])
@pytest.mark.parametrize("op", NAMED)
def test_guard_rejects_a_stray_write(op, stray):
    args = make(op, CASE[op])

    def strays(**args: Any) -> None:
        all_ops()[op].load("torch")(**args)
        stray(args)

    assert_writes_only_what_is_named(op, all_ops()[op].load("torch"), args)
    with pytest.raises(AssertionError, match="nothing names"):
        assert_writes_only_what_is_named(op, strays, args)


@pytest.mark.parametrize("op", NAMED)
def test_guard_rejects_a_written_input(op):
    args = make(op, CASE[op])

    def forgets(**args: Any) -> None:
        args[INPUT[op]].zero_()

    with pytest.raises(AssertionError, match="only read"):
        assert_writes_only_what_is_named(op, forgets, args)
