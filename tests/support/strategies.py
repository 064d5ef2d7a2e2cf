"""Hypothesis strategies for the arguments of the ops; those of attention are in ``strategies_attention``.

Hypothesis draws the shape of a call, a frozen dataclass that a failure prints and shrinks; the numbers come from the
call's seed. All that a kernel must not read is NaN: pages without an owner, entries that no row may see, the gaps of a
strided argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

LAYOUTS = ("contiguous", "transposed", "sliced", "strided")
SEEDS = st.integers(0, 2**31)
HEAD_DIMS = st.sampled_from((16, 20, 64, 80, 96, 128, 256)) | st.integers(16, 256)  # usual ones, and any


@dataclass(frozen=True)
class CallSizes:
    """How large the calls get for one backend."""

    dtypes: tuple[torch.dtype, ...]
    batch: int
    rows: int
    prefill: int  # rows
    context: int
    heads: int
    windows_in_trees: bool = True  # whether a sliding window may be shorter than a tree


CPP = CallSizes((torch.float32, torch.float16, torch.bfloat16), batch=5, rows=9, prefill=40, context=200, heads=24)
# Interpreted, a Triton program costs milliseconds, and bf16 is wrong in its tl.dot.
TRITON = CallSizes(
    (torch.float32, torch.float16), batch=3, rows=4, prefill=20, context=70, heads=6, windows_in_trees=False
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """``x`` at other places in memory, NaN between its elements."""
    if layout == "contiguous":
        return x.contiguous()
    if layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "sliced":  # also without the alignment of a vector
        view = x.new_full([size + 3 for size in x.shape], math.nan)[tuple(slice(1, 1 + size) for size in x.shape)]
    else:
        view = x.new_full((*x.shape, 2), math.nan)[..., 0]
    return view.copy_(x)


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """Any bit patterns, NaNs with a payload among them: moving must preserve them."""
    integers = torch.int32 if dtype.itemsize == 4 else torch.int16
    half = 2 ** (8 * dtype.itemsize - 1)
    return torch.randint(-half, half, shape, dtype=integers, generator=g).view(dtype)


def block_table_of(num_pages: list[int], spare: int, g: torch.Generator) -> tuple[Tensor, int]:
    """Shuffled pages of each sequence; page 0, the scratch page, in unused places.

    Also returns how many pages the cache has. One of them has no owner; the last one in memory mostly has.
    """
    order = torch.randperm(sum(num_pages) + 1, generator=g) + 1
    table = torch.zeros(len(num_pages), max(num_pages, default=0) + spare, dtype=torch.int32)
    for b, count in enumerate(num_pages):
        table[b, :count] = order[sum(num_pages[:b]) :][:count]
    return table, len(order) + 1


@dataclass(frozen=True)
class VerifyCall:
    counts: tuple[int, ...]
    vocab_size: int
    levels: int  # distinct logits: ties everywhere, or hardly any
    special: tuple[float, ...]  # each in three places
    filled: tuple[float, ...]  # each in all of one row
    layout: str
    dtype: torch.dtype
    seed: int

    def make(self, device: torch.device) -> dict[str, Any]:
        g, rows, vocab_size = generator(self.seed), sum(self.counts), self.vocab_size
        logits = ((torch.randint(self.levels, (rows, vocab_size), generator=g) - self.levels // 2) / 8).to(self.dtype)
        for value in self.filled if rows else ():
            logits[torch.randint(rows, (), generator=g)] = value
        for value in self.special if rows else ():
            logits[torch.randint(rows, (3,), generator=g), torch.randint(vocab_size, (3,), generator=g)] = value
        guess = torch.randint(0, vocab_size, (rows,), generator=g)
        token_ids = torch.where(torch.rand(rows, generator=g) < 0.7, logits.argmax(-1).roll(1), guess)
        return {
            "logits": laid_out(logits.to(device), self.layout),
            "token_ids": token_ids.to(device),
            "cu_seqlens": torch.tensor([0, *self.counts]).cumsum(0).int().to(device),
        }


def verify_calls(limits: CallSizes, vocab_sizes: st.SearchStrategy[int], batch: int) -> st.SearchStrategy[VerifyCall]:
    specials = st.sampled_from((math.nan, -math.nan, math.inf, -math.inf, -0.0))
    return st.builds(
        VerifyCall,
        counts=st.lists(st.integers(1, 9), max_size=batch).map(tuple),
        vocab_size=vocab_sizes,
        levels=st.sampled_from((1, 2, 50, 100_000)),
        special=st.lists(specials, max_size=4).map(tuple),
        filled=st.lists(specials, max_size=2).map(tuple),
        layout=st.sampled_from(LAYOUTS),
        dtype=st.sampled_from(limits.dtypes),
        seed=SEEDS,
    )


@dataclass(frozen=True)
class AppendCall:
    rows: int
    scratch_rows: int  # padding: they write to the scratch page, several to one slot perhaps
    spare: int  # pages more than the rows need
    page_size: int
    heads: int
    head_dim: int
    layouts: tuple[str, str]
    dtype: torch.dtype
    seed: int

    def make(self, device: torch.device) -> dict[str, Any]:
        g, rows = generator(self.seed), self.rows + self.scratch_rows
        num_pages = 1 + -(-self.rows // self.page_size) + self.spare
        caches = any_bits((2, num_pages, self.page_size, self.heads, self.head_dim), self.dtype, g).to(device)
        new = any_bits((2, rows, self.heads, self.head_dim), self.dtype, g).to(device)
        slots = torch.randperm((num_pages - 1) * self.page_size, generator=g)[: self.rows] + self.page_size
        slots = torch.cat([slots, torch.randint(self.page_size, (self.scratch_rows,), generator=g)])
        key, value = (laid_out(x, layout) for x, layout in zip(new, self.layouts, strict=True))
        return {
            "key_cache": caches[0],
            "value_cache": caches[1],
            "key": key,
            "value": value,
            "slot_mapping": slots[torch.randperm(rows, generator=g)].int().to(device),
        }


def append_calls(limits: CallSizes) -> st.SearchStrategy[AppendCall]:
    return st.builds(
        AppendCall,
        rows=st.integers(0, limits.prefill),
        scratch_rows=st.integers(0, 4),
        spare=st.integers(0, 3),
        page_size=st.sampled_from((1, 2, 7, 16)),
        heads=st.integers(1, 5),
        head_dim=HEAD_DIMS,
        layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
        dtype=st.sampled_from(limits.dtypes),
        seed=SEEDS,
    )


@dataclass(frozen=True)
class CompactCall:
    moves: tuple[tuple[int, int], ...]  # of each sequence: how many, and positions that are spared
    page_size: int
    num_layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    seed: int

    def make(self, device: torch.device) -> dict[str, Any]:
        g, counts = generator(self.seed), [count for count, _ in self.moves]
        table, num_pages = block_table_of([-(-sum(move) // self.page_size) for move in self.moves], 0, g)
        size = (self.num_layers, 2 - self.seed % 2, num_pages, self.page_size, self.heads, self.head_dim)

        def positions() -> Tensor:  # rising; few are spared, so most are source and destination at once
            parts = [torch.randperm(sum(move), generator=g)[: move[0]].sort().values for move in self.moves]
            return torch.cat([torch.zeros(0), *parts]).int().to(device)

        return {
            "kv_cache": any_bits(size, self.dtype, g).to(device),
            "block_table": table.to(device),
            "cu_moves": torch.tensor([0, *counts]).cumsum(0).int().to(device),
            "sources": positions(),
            "destinations": positions(),
        }


def compact_calls(limits: CallSizes) -> st.SearchStrategy[CompactCall]:
    return st.builds(
        CompactCall,
        moves=st.lists(st.tuples(st.integers(0, limits.prefill), st.integers(0, 9)), max_size=limits.batch).map(tuple),
        page_size=st.sampled_from((1, 2, 7, 16)),
        num_layers=st.integers(1, 4),
        heads=st.integers(1, 3),
        head_dim=HEAD_DIMS,
        dtype=st.sampled_from(limits.dtypes),
        seed=SEEDS,
    )


@dataclass(frozen=True)
class RealignCall:
    moves: tuple[tuple[int, int, int], ...]  # per row: start, length, shift
    columns: int
    cropped: tuple[int, int]  # columns, and numbers of a head, that are in memory but not in the cache
    transposed: bool  # columns before heads in memory
    num_layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    seed: int

    def make(self, device: torch.device) -> dict[str, Any]:
        g, moves = generator(self.seed), torch.tensor(self.moves, dtype=torch.int32).view(-1, 3)
        return {
            "layers": [(self._tensor(g, device), self._tensor(g, device)) for _ in range(self.num_layers)],
            **{name: moves[:, i].clone().to(device) for i, name in enumerate(("starts", "lengths", "shifts"))},
        }

    def _tensor(self, g: torch.Generator, device: torch.device) -> Tensor:
        size = [len(self.moves), self.heads, self.columns + self.cropped[0], self.head_dim + self.cropped[1]]
        if self.transposed:
            size[1], size[2] = size[2], size[1]
        memory = any_bits(tuple(size), self.dtype, g).to(device)
        tensor = memory.transpose(1, 2) if self.transposed else memory
        # cropped at both ends: a column of the rim is before the first, where there are two
        return tensor[:, :, self.cropped[0] // 2 :][:, :, : self.columns, : self.head_dim]


@st.composite
def realign_calls(draw: st.DrawFn, limits: CallSizes) -> RealignCall:
    columns = draw(st.integers(1, limits.context))
    moves = []
    for _ in range(draw(st.integers(0, limits.batch))):
        length = draw(st.just(columns) | st.integers(0, columns))
        start = draw(st.integers(0, columns - length))
        # anywhere, not at all, or by little, as in a step of decoding
        near = st.integers(max(-4, -start), min(4, columns - length - start))
        moves.append((start, length, draw(near | st.integers(-start, columns - length - start))))
    return RealignCall(
        moves=tuple(moves),
        columns=columns,
        cropped=draw(st.tuples(st.integers(0, 3), st.sampled_from((0, 0, 3)))),
        transposed=draw(st.booleans()),
        num_layers=draw(st.integers(1, 6)),
        heads=draw(st.integers(1, 3)),
        head_dim=draw(HEAD_DIMS),
        dtype=draw(st.sampled_from(limits.dtypes)),
        seed=draw(SEEDS),
    )
