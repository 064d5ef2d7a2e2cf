"""The logits of ``sampling`` after bitmasks, biases and penalties: a copy in fp64, if requests of a batch have any.

Bytes: logits read once, 8 bytes written per token; with penalties 4 bytes per token of counts, cleared before.
Grids: (rows, tiles) widens and masks; (rows,) adds biases and (rows,) penalties, in place, to a few tokens of each row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

_TILE = 1024  # tokens that a program widens
_BLOCK = 1024  # seen tokens or biases that a program processes at a time
_UNSPECIALISED = (
    *("edited", "allowed", "token_ids", "parents", "cu_seqlens", "row_sequences", "penalties", "presence", "frequency"),
    *("num_prompt", "seen_ids", "cu_seen", "bias_ids", "bias_values", "cu_bias", "counts", "vocab_size", "num_words"),
    "stride_logits_row",
)
_SEEN = tl.constexpr(-0x80000000)  # the bit of a count that says that a token was seen


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _widen_kernel(
    logits,  # [T, vocab_size], the last axis contiguous
    allowed,  # [T, num_words] int32; read if MASKED
    edited,  # [T, vocab_size] fp64, out
    stride_logits_row,
    vocab_size,
    num_words,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Copy a tile in fp64; tokens that the row's bitmask forbids become -inf, but for a NaN."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    values = tl.load(logits + row * stride_logits_row + ids, mask=inside, other=0.0).to(tl.float64)
    if MASKED:
        words = tl.load(allowed + row * num_words + (ids >> 5), mask=inside, other=0)
        is_forbidden = ((words >> (ids & 31)) & 1) == 0
        values = tl.where(is_forbidden & (tl.abs(values) <= float("inf")), float("-inf"), values)
    tl.store(edited + row * vocab_size + ids, values, mask=inside)


@triton.jit
def _count(counts, ids, inside, vocab_size, more):
    """Count some tokens as seen, and as emitted ``more`` times."""
    valid = inside & (ids >= 0) & (ids < vocab_size)
    places = counts + tl.where(valid, ids, 0)
    tl.atomic_or(places, tl.full(ids.shape, _SEEN, tl.int32), mask=valid, sem="relaxed")
    tl.atomic_add(places, tl.zeros(ids.shape, tl.int32) + more, mask=valid, sem="relaxed")


@triton.jit
def _penalise(values, counts, ids, inside, vocab_size, repetition, presence, frequency):
    """Penalise those of some tokens whose count no other place has taken yet."""
    valid = inside & (ids >= 0) & (ids < vocab_size)
    safe = tl.where(valid, ids, 0)
    count = tl.atomic_xchg(counts + safe, tl.zeros(ids.shape, tl.int32), mask=valid, sem="relaxed")
    valid = valid & (count != 0)
    emissions = (count & 0x7FFFFFFF).to(tl.float64)
    value = tl.load(values + safe, mask=valid, other=0.0)
    # Products are rounded before they are subtracted; after an fma, the compiler has nothing to fuse.
    value = tl.where(value < 0, tl.fma(value, repetition, 0.0), value / repetition)
    less = value - tl.fma(emissions, frequency, 0.0) - presence
    tl.store(values + safe, tl.where(emissions > 0, less, value), mask=valid)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _bias_kernel(
    edited,  # [T, vocab_size] fp64, in and out
    row_sequences,  # [T] int32
    bias_ids,  # [M] int64
    bias_values,  # [M] fp64
    cu_bias,  # [B + 1] int32
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Add the biases of a row's sequence, whose ids differ."""
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(row_sequences + row)
    values = edited + row * vocab_size
    stop = tl.load(cu_bias + sequence + 1)
    for first in range(tl.load(cu_bias + sequence), stop, BLOCK):
        places = first + tl.arange(0, BLOCK)
        ids = tl.load(bias_ids + places, mask=places < stop, other=-1)
        valid = (places < stop) & (ids >= 0) & (ids < vocab_size)
        safe = tl.where(valid, ids, 0)
        biases = tl.load(bias_values + places, mask=valid, other=0.0)
        tl.store(values + safe, tl.load(values + safe, mask=valid, other=0.0) + biases, mask=valid)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _penalty_kernel(
    edited,  # [T, vocab_size] fp64, in and out
    token_ids,  # [T] int64
    parents,  # [T] int32, counted from the sequence's first row; read if TREE
    cu_seqlens,  # [B + 1] int32
    row_sequences,  # [T] int32
    penalties,  # [B] fp64
    presence,  # [B] fp64
    frequency,  # [B] fp64
    num_prompt,  # [B] int32
    seen_ids,  # [N] int64
    cu_seen,  # [B + 1] int32
    counts,  # [T, vocab_size] int32, zeros in and out
    vocab_size,
    BLOCK: tl.constexpr,
    TREE: tl.constexpr,
):
    """Count the tokens of a row's path, and penalise each once."""
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(row_sequences + row)
    values = edited + row * vocab_size
    own = counts + row * vocab_size
    repetition = tl.load(penalties + sequence)
    by_presence = tl.load(presence + sequence)
    by_frequency = tl.load(frequency + sequence)
    if (repetition != 1.0) | (by_presence != 0.0) | (by_frequency != 0.0):
        start = tl.load(cu_seqlens + sequence)
        seen_start = tl.load(cu_seen + sequence)
        seen_stop = tl.load(cu_seen + sequence + 1)
        emitted = seen_start + tl.load(num_prompt + sequence)
        lanes = tl.arange(0, BLOCK)
        for first in range(seen_start, seen_stop, BLOCK):
            places = first + lanes
            ids = tl.load(seen_ids + places, mask=places < seen_stop, other=-1)
            _count(own, ids, places < seen_stop, vocab_size, (places >= emitted).to(tl.int32))
        if TREE:
            ancestor = row
            while ancestor > start:
                _count(own, tl.load(token_ids + ancestor + lanes * 0), lanes == 0, vocab_size, 1)
                ancestor = start + tl.load(parents + ancestor).to(tl.int64)
            _count(own, tl.load(token_ids + start + lanes * 0), lanes == 0, vocab_size, 0)
        else:
            for first in range(start, row.to(tl.int32) + 1, BLOCK):
                places = first + lanes
                ids = tl.load(token_ids + places, mask=places <= row, other=-1)
                _count(own, ids, places <= row, vocab_size, (places > start).to(tl.int32))
        tl.debug_barrier()  # every token is counted
        for first in range(seen_start, seen_stop, BLOCK):
            places = first + lanes
            ids = tl.load(seen_ids + places, mask=places < seen_stop, other=-1)
            _penalise(values, own, ids, places < seen_stop, vocab_size, repetition, by_presence, by_frequency)
        if TREE:
            ancestor = row
            while ancestor > start:
                ids = tl.load(token_ids + ancestor + lanes * 0)
                _penalise(values, own, ids, lanes == 0, vocab_size, repetition, by_presence, by_frequency)
                ancestor = start + tl.load(parents + ancestor).to(tl.int64)
            ids = tl.load(token_ids + start + lanes * 0)
            _penalise(values, own, ids, lanes == 0, vocab_size, repetition, by_presence, by_frequency)
        else:
            for first in range(start, row.to(tl.int32) + 1, BLOCK):
                places = first + lanes
                ids = tl.load(token_ids + places, mask=places <= row, other=-1)
                _penalise(values, own, ids, places <= row, vocab_size, repetition, by_presence, by_frequency)


def _widen_launch(is_masked: bool) -> Launch:
    return Launch({"TILE": _TILE, "MASKED": is_masked}, num_warps=4)


def _bias_launch() -> Launch:
    return Launch({"BLOCK": _BLOCK}, num_warps=4)


def _penalty_launch(has_trees: bool) -> Launch:
    return Launch({"BLOCK": _BLOCK, "TREE": has_trees}, num_warps=4)


def edited_logits(
    logits: Tensor,
    token_ids: Tensor,
    cu_seqlens: Tensor,
    sampling: Sampling,
    parents: Tensor | None,
    row_sequences: Tensor,
) -> Tensor:
    """Return the logits from which tokens are chosen, ``[T, vocab_size]`` fp64, if requests have masks or adjustments.

    Repetition penalties are applied, too, where there are adjustments. ``row_sequences [T]`` int32; other arguments as
    those of ``choose_tokens``.
    """
    num_rows, vocab_size = logits.shape
    allowed = sampling.allowed
    edited = torch.empty(num_rows, vocab_size, dtype=torch.float64, device=logits.device)
    _widen_kernel[(num_rows, triton.cdiv(vocab_size, _TILE))](
        logits, logits if allowed is None else allowed, edited, logits.stride(0), vocab_size,
        triton.cdiv(vocab_size, 32), **_widen_launch(allowed is not None).options,
    )  # fmt: skip
    added = sampling.adjustments
    if added is not None:
        _bias_kernel[(num_rows,)](
            edited, row_sequences, added.bias_ids, added.bias_values, added.cu_bias, vocab_size,
            **_bias_launch().options,
        )  # fmt: skip
        counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=logits.device)
        _penalty_kernel[(num_rows,)](
            edited, token_ids, cu_seqlens if parents is None else parents, cu_seqlens, row_sequences,
            sampling.repetition_penalties, added.presence_penalties, added.frequency_penalties, added.num_prompt,
            sampling.seen_ids, sampling.cu_seen, counts, vocab_size, **_penalty_launch(parents is not None).options,
        )  # fmt: skip
    return edited


def is_edited(sampling: Sampling) -> bool:
    """Return whether ``edited_logits`` has anything to do."""
    return sampling.allowed is not None or sampling.adjustments is not None


def spent_rows(sampling: Sampling, row_best: Tensor) -> Tensor | None:
    """Return which rows have a bitmask that leaves no token, ``[T]`` bool; None without bitmasks.

    ``row_best [T]``: the largest logit of each row.
    """
    if sampling.allowed is None:
        return None
    return (row_best == float("-inf")) & (sampling.allowed != -1).any(dim=1)


def variants() -> Iterator[Variant]:
    """Yield the compilations: logits of every type, masked or not; biases; penalties of chains and of trees."""
    sizes = {"stride_logits_row": "i32", "vocab_size": "i32", "num_words": "i32"}
    for kind in TYPE_NAMES.values():
        for is_masked in (False, True):
            allowed = "*i32" if is_masked else f"*{kind}"  # unread without a bitmask: then it is the logits
            signature = {"logits": f"*{kind}", "allowed": allowed, "edited": "*fp64", **sizes}
            name = f"widen_{kind}" + ("_masked" if is_masked else "")
            yield _widen_launch(is_masked).variant(name, _widen_kernel, signature, ("logits",))
    biases = {"edited": "*fp64", "row_sequences": "*i32", "bias_ids": "*i64", "bias_values": "*fp64", "cu_bias": "*i32"}
    yield _bias_launch().variant("bias", _bias_kernel, {**biases, "vocab_size": "i32"}, ())
    tensors = dict.fromkeys(("edited", "penalties", "presence", "frequency"), "*fp64")
    tensors |= dict.fromkeys(("token_ids", "seen_ids"), "*i64")
    tensors |= dict.fromkeys(("parents", "cu_seqlens", "row_sequences", "num_prompt", "cu_seen", "counts"), "*i32")
    for has_trees in (False, True):
        name = "penalties_trees" if has_trees else "penalties"
        signature = {**tensors, "vocab_size": "i32"}
        yield _penalty_launch(has_trees).variant(name, _penalty_kernel, signature, ())
