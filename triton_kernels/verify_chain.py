"""``verify_chain``: batched acceptance, which reads every logit once and writes nothing of their size.

Bytes: ``T * vocab_size * itemsize`` read; 16 bytes per row and chunk of the vocabulary between the two kernels.
Grids: (rows, chunks) finds the largest logit of each chunk; (sequences,) combines the chunks of each row and walks the
sequence's rows; for trees, (sequences,) walks down each tree. Chunks have a fixed size, on which the result does not
depend, because a maximum has no rounding. If sequences sample, ``sampling`` chooses the token of each row instead of
the first kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.triton_kernels.sampling import choose_tokens
from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

_CHUNK = 8192  # logits per program of the first kernel
_WALK_ROWS = 64  # rows of a tree that a program of the third kernel looks at together
_TILE = 2048  # chunks that a program of the second kernel holds, of one row or of several
# Addresses and sizes that change with the batch, or with whether sequences sample.
_UNSPECIALISED = (
    *("chunk_keys", "chunk_ids", "token_ids", "cu_seqlens", "target_tokens", "num_accepted", "next_tokens"),
    *("num_chunks", "parents", "accepted_rows"),
)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_LARGEST = tl.constexpr(0x7FFFFFFF)  # the key of a NaN; as a token id or a row: none
_SMALLEST = tl.constexpr(-0x80000000)  # below the key of any logit


@triton.jit
def _key(logits):
    """Map floats to int32 in the same order: -0 and +0 are equal, NaN is largest. Integers avoid flushed denormals."""
    bits = logits.to(tl.float32).to(tl.int32, bitcast=True)  # exact: every 16-bit float is an fp32
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(magnitude > _INFINITY_BITS, _LARGEST, key)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _chunk_kernel(
    logits,  # [T, vocab_size], the last axis contiguous
    chunk_keys,  # [T, num_chunks] int32: the largest key, _LARGEST if the chunk holds a NaN
    chunk_ids,  # [T, num_chunks] int32: the lowest token id that has it
    stride_logits_row,
    vocab_size,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)  # [CHUNK]
    inside = ids < vocab_size
    keys = _key(tl.load(logits + row * stride_logits_row + ids, mask=inside, other=float("-inf")))
    largest = tl.max(keys, axis=0)
    # A masked place may equal -inf, too, but its id is above those inside, so it is never the lowest.
    lowest = tl.min(tl.where(keys == largest, ids, _LARGEST), axis=0)
    place = row * tl.num_programs(1) + chunk
    tl.store(chunk_keys + place, largest)
    tl.store(chunk_ids + place, lowest)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _accept_kernel(
    chunk_keys,  # [T, num_chunks] int32
    chunk_ids,  # [T, num_chunks] int32
    token_ids,  # [T] int64
    cu_seqlens,  # [B + 1] int32
    target_tokens,  # [T] int64, out
    num_accepted,  # [B] int32, out
    next_tokens,  # [B] int64, out
    num_chunks,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_seqlens + sequence)
    stop = tl.load(cu_seqlens + sequence + 1)
    chunks = tl.arange(0, BLOCK_CHUNKS)[None, :]  # [1, BLOCK_CHUNKS]
    last = stop  # the row after the accepted ones; `stop` until it is found
    following = start.to(tl.int64)  # its token
    for first in range(start, stop, BLOCK_ROWS):
        rows = first + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
        place = rows.to(tl.int64)[:, None] * num_chunks + chunks
        inside = (rows < stop)[:, None] & (chunks < num_chunks)
        keys = tl.load(chunk_keys + place, mask=inside, other=_SMALLEST)
        ids = tl.load(chunk_ids + place, mask=inside, other=_LARGEST)
        largest = tl.max(keys, axis=1)  # [BLOCK_ROWS]
        lowest = tl.min(tl.where(keys == largest[:, None], ids, _LARGEST), axis=1)
        tokens = tl.where(largest == _LARGEST, -1, lowest).to(tl.int64)
        tl.store(target_tokens + rows, tokens, mask=rows < stop)
        fed_next = tl.load(token_ids + rows + 1, mask=rows + 1 < stop, other=0)
        # No draft token follows the sequence's last row, so one row always ends the chain.
        ends = (rows < stop) & ((rows + 1 == stop) | (fed_next != tokens))
        end = tl.min(tl.where(ends, rows, _LARGEST), axis=0)
        token = tl.sum(tl.where(rows == end, tokens, 0), axis=0)
        found_now = (last == stop) & (end < stop)
        following = tl.where(found_now, token, following)
        last = tl.where(found_now, end, last)
    tl.store(num_accepted + sequence, last - start)
    tl.store(next_tokens + sequence, following)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _walk_kernel(
    token_ids,  # [T] int64
    parents,  # [T] int32, counted from the sequence's first row
    cu_seqlens,  # [B + 1] int32
    target_tokens,  # [T] int64
    num_accepted,  # [B] int32, out
    next_tokens,  # [B] int64, out
    accepted_rows,  # [T] int32, all -1; out
    BLOCK_ROWS: tl.constexpr,
):
    """Walk down a sequence's tree: from a row to its first child whose token is the target's token after that row."""
    sequence = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_seqlens + sequence)
    stop = tl.load(cu_seqlens + sequence + 1)
    row = start * 0
    count = start * 0  # counted from `start`
    wanted = tl.load(target_tokens + start)
    for first in range(0, stop - start, BLOCK_ROWS):  # parents precede their children, so blocks need no second visit
        rows = first + tl.arange(0, BLOCK_ROWS)
        inside = (rows > 0) & (rows < stop - start)
        above = tl.load(parents + start + rows, mask=inside, other=-1)
        tokens = tl.load(token_ids + start + rows, mask=inside, other=0)
        child = tl.min(tl.where(inside & (above == row) & (tokens == wanted), rows, _LARGEST), axis=0)
        while child != _LARGEST:
            tl.store(accepted_rows + start + count, child)
            row = child
            count = count + 1
            wanted = tl.load(target_tokens + start + row)
            child = tl.min(tl.where(inside & (above == row) & (tokens == wanted), rows, _LARGEST), axis=0)
    tl.store(num_accepted + sequence, count)
    tl.store(next_tokens + sequence, wanted)


def _chunk_launch() -> Launch:
    return Launch({"CHUNK": _CHUNK}, num_warps=8)  # 32 logits per thread: four loads of 16 bytes in bf16


def _accept_launch(num_chunks: int) -> Launch:
    block_chunks = triton.next_power_of_2(num_chunks)
    constexprs = {"BLOCK_ROWS": min(16, max(1, _TILE // block_chunks)), "BLOCK_CHUNKS": block_chunks}
    return Launch(constexprs, num_warps=4)


def _walk_launch() -> Launch:
    return Launch({"BLOCK_ROWS": _WALK_ROWS}, num_warps=1)


def verify_chain(
    logits: Tensor,
    token_ids: Tensor,
    cu_seqlens: Tensor,
    sampling: Sampling | None = None,
    parents: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Launch both kernels, or those of ``sampling`` and the second kernel; for trees a third one walks down the trees.

    The contract is the oracle's.
    """
    (num_rows, vocab_size) = logits.shape
    batch_size = cu_seqlens.numel() - 1
    device = logits.device
    target_tokens = torch.empty_like(token_ids)
    num_accepted = torch.empty(batch_size, dtype=torch.int32, device=device)
    next_tokens = torch.empty(batch_size, dtype=torch.int64, device=device)
    accepted_rows = None if parents is None else torch.full_like(parents, -1)
    outputs = (target_tokens, num_accepted, next_tokens, *([] if accepted_rows is None else [accepted_rows]))
    if num_rows == 0 or batch_size == 0:
        return outputs
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    if sampling is None:
        num_chunks = triton.cdiv(vocab_size, _CHUNK)
        chunk_keys, chunk_ids = torch.empty(2, num_rows, num_chunks, dtype=torch.int32, device=device)
        _chunk_kernel[(num_rows, num_chunks)](
            logits, chunk_keys, chunk_ids, logits.stride(0), vocab_size, **_chunk_launch().options
        )
    else:
        num_chunks = 1  # ``sampling`` has chosen each row's token
        chunk_keys, chunk_ids = choose_tokens(logits, token_ids, cu_seqlens, sampling, parents)
    _accept_kernel[(batch_size,)](
        chunk_keys,
        chunk_ids,
        token_ids,
        cu_seqlens,
        target_tokens,
        num_accepted,
        next_tokens,
        num_chunks,
        **_accept_launch(num_chunks).options,
    )
    if parents is not None:  # then only the tokens of the rows are used of what the second kernel wrote
        _walk_kernel[(batch_size,)](
            token_ids, parents, cu_seqlens, target_tokens, num_accepted, next_tokens, accepted_rows,
            **_walk_launch().options,
        )  # fmt: skip
    return outputs


def variants() -> Iterator[Variant]:
    """Yield the compilations: logits of every type, aligned rows or not, small to large vocabularies."""
    chunks = {"chunk_keys": "*i32", "chunk_ids": "*i32"}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        signature = {"logits": f"*{TYPE_NAMES[dtype]}", **chunks, "stride_logits_row": "i32", "vocab_size": "i32"}
        sizes = ("stride_logits_row", "vocab_size")
        for name, aligned in (("aligned", ("logits", *sizes)), ("odd_vocabulary", ("logits",))):
            yield _chunk_launch().variant(f"chunk_{TYPE_NAMES[dtype]}_{name}", _chunk_kernel, signature, aligned)
    tensors = {**chunks, "token_ids": "*i64", "cu_seqlens": "*i32", "target_tokens": "*i64"}
    tensors |= {"num_accepted": "*i32", "next_tokens": "*i64"}
    for num_chunks in (1, 4, 19, 32):  # sampled; 32,000, 151,936 and 262,144 tokens
        signature = {**tensors, "num_chunks": "i32"}
        yield _accept_launch(num_chunks).variant(f"accept_{num_chunks}_chunks", _accept_kernel, signature, ())
    rows = {"token_ids": "*i64", "parents": "*i32", "cu_seqlens": "*i32", "target_tokens": "*i64"}
    results = {"num_accepted": "*i32", "next_tokens": "*i64", "accepted_rows": "*i32"}
    yield _walk_launch().variant("walk", _walk_kernel, rows | results, ())
