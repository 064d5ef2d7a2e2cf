"""Attention of a tree's rows: each has the bits that it has in the chain of its path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specdec_fast import _C
from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch
from specdec_fast.ops import all_ops
from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.trees.rows import TREE_MASK_BITS
from support.fuzzing import fuzz
from support.grids import grid
from support.op_cases import DTYPES
from support.op_checks import same_bits
from support.strategies import SEEDS, generator
from support.trees import paths_of

OP = all_ops()["paged_attention"]
KERNELS = "specdec_fast.triton_kernels"
IN_CPP, IN_PYTORCH = OP.load("cpp"), OP.load("torch")
Attention = Callable[..., Tensor]
PREFIXES = (0, 1, 31, 32, 47, 62, 63, 64, 100, 127)  # on both sides of the tiles of 64 positions


@dataclass(frozen=True)
class Tree:
    prefix: int
    parents: tuple[int, ...]  # of the rows; -1 for a root

    @property
    def paths(self) -> list[tuple[int, ...]]:
        return paths_of(range(len(self.parents)), self.parents)


@dataclass(frozen=True)
class TreeAttention:
    trees: tuple[Tree, ...]
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    params: AttentionParams
    dtype: torch.dtype
    seed: int

    def tensors(self) -> tuple[Tensor, list[Tensor]]:
        """Queries of all rows, keys and values of each sequence: ``[2, places, kv_heads, head_dim]``."""
        g = generator(self.seed)
        rows = sum(len(tree.parents) for tree in self.trees)
        query = torch.randn(rows, self.heads, self.head_dim, generator=g).to(self.dtype)
        sizes = [(2, tree.prefix + len(tree.parents), self.kv_heads, self.head_dim) for tree in self.trees]
        return query, [torch.randn(size, generator=g).to(self.dtype) for size in sizes]


def paged(entries: list[Tensor], page_size: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Lay entries out on pages in mixed order, with NaN in all places that no sequence owns."""
    counts = [-(-each.shape[1] // page_size) for each in entries]
    order = torch.randperm(sum(counts), generator=generator(1)) + 1
    kv = entries[0].new_full((2, sum(counts) + 1, page_size, *entries[0].shape[2:]), float("nan"))
    table = torch.zeros(len(entries), max(counts), dtype=torch.int32)
    for b, (each, pages) in enumerate(zip(entries, order.split(counts), strict=True)):
        table[b, : len(pages)] = pages
        flat = kv[:, pages].flatten(1, 2)
        flat[:, : each.shape[1]] = each
        kv[:, pages] = flat.unflatten(1, (len(pages), page_size))
    return (kv[0].contiguous(), kv[1].contiguous()), table


def attend(
    attention: Attention,
    case: TreeAttention,
    query: Tensor,
    entries: list[Tensor],
    counts: list[int],
    mask: Tensor | None,
) -> Tensor:
    kv, table = paged(entries, case.page_size)
    lengths = [each.shape[1] for each in entries]
    batch = PagedBatch(
        cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).int(),
        seqused_k=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        max_seqlen_q=max(counts),
        max_seqlen_k=max(lengths),
        tree_mask=mask,
    )
    return attention(query, kv, batch, case.params)


def tree_mask(trees: tuple[Tree, ...]) -> Tensor:
    num_words = -(-max(len(tree.parents) for tree in trees) // TREE_MASK_BITS)
    masks = []
    for path in (path for tree in trees for path in tree.paths):
        bits = sum(1 << row for row in path)
        words = [bits >> TREE_MASK_BITS * word & 0xFFFFFFFF for word in range(num_words)]
        masks.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(masks, dtype=torch.int32)


def outputs_of_chains(attention: Attention, case: TreeAttention, query: Tensor, entries: list[Tensor]) -> Tensor:
    """Each row in a chain of the entries of its path; the chains are the sequences of one batch.

    In C++ and Triton bits do not depend on the number of rows, so one chain serves all rows on a path to a leaf. In
    PyTorch they do, so there the chain of each row has one row.
    """
    rows, chains, counts, first = [], [], [], 0
    for tree, each in zip(case.trees, entries, strict=True):
        for row, path in enumerate(tree.paths):
            if attention is not IN_PYTORCH and row in tree.parents:
                continue
            computed = path[-1:] if attention is IN_PYTORCH else path
            rows += [first + other for other in computed]
            counts.append(len(computed))
            chains.append(each[:, [*range(tree.prefix), *(tree.prefix + other for other in path)]])
        first += len(tree.parents)
    outputs = torch.empty_like(query)
    outputs[rows] = attend(attention, case, query[rows], chains, counts, None)
    return outputs


def check(case: TreeAttention, attention: Attention = IN_CPP) -> None:
    query, entries = case.tensors()
    counts = [len(tree.parents) for tree in case.trees]
    got = attend(attention, case, query, entries, counts, tree_mask(case.trees))
    assert same_bits(got, outputs_of_chains(attention, case, query, entries))


@st.composite
def trees(draw: Any) -> Tree:
    count = draw(st.integers(1, 12) | st.sampled_from((33, 70)))
    deep = draw(st.booleans())
    back = [draw(st.integers(1, 2 if deep else row)) for row in range(1, count)]
    return Tree(draw(st.sampled_from(PREFIXES)), (-1, *(max(0, row - b) for row, b in enumerate(back, start=1))))


@st.composite
def cases(draw: Any, dtypes: tuple[torch.dtype, ...] = tuple(DTYPES.values())) -> TreeAttention:
    chosen = tuple(draw(st.lists(trees(), min_size=1, max_size=3)))
    kv_heads, group = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 2, 3, 8)))
    head_dim = draw(st.sampled_from((16, 20, 32, 64, 128)))
    dtype = draw(st.sampled_from(dtypes))
    size = draw(st.sampled_from((None, 1, 2, 5, 33, 64, 100)))
    rule = {draw(st.sampled_from(("sliding_window", "attention_chunk"))): size}
    sinks = torch.randn(kv_heads * group, generator=generator(5)).to(dtype) if draw(st.booleans()) else None
    params = AttentionParams(head_dim**-0.5, softcap=draw(st.sampled_from((None, 2.0))), sinks=sinks, **rule)
    page_size = draw(st.sampled_from((1, 16, 32)))
    return TreeAttention(chosen, kv_heads * group, kv_heads, head_dim, page_size, params, dtype, draw(SEEDS))


@fuzz(50)
@given(case=cases())
def test_rows_have_the_bits_of_their_chains(case):
    check(case)


# Every row is one call, so there are fewer examples.
@fuzz(8)
@given(case=cases())
def test_rows_have_the_bits_of_their_chains_in_pytorch(case):
    check(case, IN_PYTORCH)


BUSHY = Tree(60, (-1, 0, 0, 1, 1, 2, 3, 3, 6, 8, 0))
CASE = TreeAttention((BUSHY, Tree(5, (-1, 0, 1))), 4, 2, 64, 16, AttentionParams(0.125), torch.bfloat16, 3)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("version", _C.attention_versions())
def test_every_instruction_set(version, dtype):
    """A tile's edge lies inside the tree: positions 64 and 65 have entries in several places."""
    best = _C.attention_versions()[-1]
    _C.choose_attention_version(version)
    try:
        check(replace(CASE, dtype=dtype))
    finally:
        _C.choose_attention_version(best)


# Rows of depths 0, 1, 2, 1. The first position is hidden from the deepest one alone.
@pytest.mark.parametrize("rule", [{"sliding_window": 129}, {"attention_chunk": 129}], ids=["window", "chunk"])
@pytest.mark.parametrize("version", _C.attention_versions())
def test_a_deeper_row_between_others_sees_less(version, rule):
    best = _C.attention_versions()[-1]
    _C.choose_attention_version(version)
    try:
        for dtype in DTYPES.values():
            tree = Tree(127, (-1, 0, 1, 0))
            check(TreeAttention((tree,), 2, 2, 64, 16, AttentionParams(0.125, **rule), dtype, 3))
    finally:
        _C.choose_attention_version(best)


@pytest.mark.parametrize("attention", [IN_CPP, IN_PYTORCH], ids=["cpp", "torch"])
def test_the_check_sees_another_path(attention):
    query, entries = CASE.tensors()
    counts = [len(tree.parents) for tree in CASE.trees]
    other = (replace(BUSHY, parents=(-1, 0, 0, 1, 2, 2, 3, 3, 6, 8, 0)), CASE.trees[1])
    got = attend(attention, CASE, query, entries, counts, tree_mask(other))
    differs = (got != outputs_of_chains(attention, CASE, query, entries)).flatten(1).any(1)
    assert differs.nonzero().flatten().tolist() == [4], "row 4 alone has another parent"


def by_slots(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams) -> Tensor:
    """Leave the weights of a tree's rows at their slots, with zeros between them, in one product for all rows."""
    if batch.tree_mask is None:
        return IN_PYTORCH(query, kv, batch, params)
    num_rows, context = len(query), int(batch.seqused_k[0])
    entries = (cache[batch.block_table[0].long()].flatten(0, 1)[:context].transpose(0, 1) for cache in kv)
    is_above = batch.tree_mask[:, 0, None] >> torch.arange(num_rows) & 1
    visible = torch.cat([torch.ones(num_rows, context - num_rows), is_above], dim=1).bool()
    rows = query.transpose(0, 1)
    return scaled_dot_product_attention(rows, *entries, visible, scale=params.scale, enable_gqa=True).transpose(0, 1)


def test_the_check_rejects_tiles_cut_by_slots():
    case = replace(CASE, trees=(BUSHY,), dtype=torch.float32)
    check(case, IN_PYTORCH)
    with pytest.raises(AssertionError, match="same_bits"):
        check(case, by_slots)


def in_triton() -> Attention:
    """Return the Triton op; skips without Triton's interpreter."""
    pytest.importorskip("triton")
    if not INTERPRETING:
        pytest.skip("a GPU's run is bench.gpu; this is about the interpreter")
    return OP.load("triton")


def triton_case(*trees: Tree, heads: int = 2, kv_heads: int = 1, head_dim: int = 16, **params: Any) -> TreeAttention:
    sinks = torch.randn(heads, generator=generator(5)) if params.pop("sinks", False) else None
    attention = AttentionParams(head_dim**-0.5, **params, sinks=sinks)
    return TreeAttention(trees, heads, kv_heads, head_dim, 16, attention, torch.float32, 3)


# In fp16 a tile of KV has 64 positions, in fp32 16; a piece has 512. A program has 32 pairs of a row and a head.
LEVELS = (-1, 0, 0, 1, 1, 2, 2, 3, 5)  # level by level: no row is a child of the one before it, but row 1
DEEP = (-1, *(max(0, row - (3 if row % 9 == 5 else 1)) for row in range(1, 70)))  # branches
IN_TRITON = {
    "no_prefix": triton_case(Tree(0, LEVELS), Tree(1, (-1, 0, 0))),
    "tile_inside": triton_case(BUSHY, Tree(62, LEVELS)),
    "tile_begins": triton_case(Tree(64, LEVELS), Tree(63, (-1,))),
    "several_roots": triton_case(Tree(7, (-1, -1)), Tree(60, (-1, 0, -1, -1, 2))),
    "piece_inside": triton_case(Tree(509, (-1, 0, 0, 1, 2, 3, 4))),
    "piece_begins": triton_case(Tree(512, (-1, 0, 0)), Tree(3, (-1, 0))),
    "several_programs": triton_case(Tree(60, LEVELS), heads=16, kv_heads=2),
    "odd_group": triton_case(replace(BUSHY, prefix=30), heads=7, head_dim=24),
    "three_words": triton_case(Tree(40, DEEP), heads=1),
    "window_of_the_prefix": triton_case(BUSHY, Tree(100, LEVELS), sliding_window=40),
    "window_in_the_tree": triton_case(BUSHY, Tree(64, LEVELS), sliding_window=2),
    "window_of_one": triton_case(BUSHY, sliding_window=1),
    "chunk_of_the_prefix": triton_case(BUSHY, Tree(100, LEVELS), attention_chunk=40),
    "chunk_ends_in_the_tree": triton_case(Tree(62, LEVELS), Tree(64, LEVELS), attention_chunk=32),
    "chunks_in_the_tree": triton_case(BUSHY, Tree(63, LEVELS), attention_chunk=2),
    "chunk_of_one": triton_case(BUSHY, attention_chunk=1),
    "softcap_sinks": triton_case(BUSHY, softcap=2.0, sinks=True),
    "window_softcap_sinks": triton_case(BUSHY, sliding_window=33, softcap=2.0, sinks=True),
}


SPLITS = {"split": 1 << 30, "unsplit": 0}  # values of _ENOUGH_PROGRAMS
# fp32 in `make test`, because results in fp16 hide most other orders of addition.
KEPT = {(name, list(SPLITS)[i // 6 % 2], "float32") for i, name in enumerate(IN_TRITON) if i % 6 == 0} | {
    ("tile_inside", "split", "float16")
}
in_triton_each = pytest.mark.parametrize(
    ("name", "split", "dtype"), grid(product(IN_TRITON, SPLITS, ("float32", "float16")), KEPT)
)


@in_triton_each
def test_rows_have_the_bits_of_their_chains_in_triton(name, split, dtype, monkeypatch):
    attention = in_triton()
    monkeypatch.setattr(f"{KERNELS}.paged_attention._ENOUGH_PROGRAMS", SPLITS[split])
    check(replace(IN_TRITON[name], dtype=getattr(torch, dtype)), attention)


@pytest.mark.grid
@fuzz(20)
@given(case=cases((torch.float32, torch.float16)), is_split=st.booleans())  # NumPy has no bf16
def test_random_rows_have_the_bits_of_their_chains_in_triton(case, is_split):
    attention = in_triton()
    trees = tuple(tree for tree in case.trees if len(tree.parents) < 40)[:2] or (BUSHY,)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{KERNELS}.paged_attention.PIECE", 64)  # several pieces in short contexts
        patch.setattr(f"{KERNELS}.paged_attention._ENOUGH_PROGRAMS", SPLITS["split" if is_split else "unsplit"])
        check(replace(case, trees=trees), attention)


def test_the_check_rejects_slots_as_positions_in_triton(monkeypatch):
    attention, case = in_triton(), replace(IN_TRITON["tile_inside"], trees=(Tree(62, (-1, 0, 0, 2)),))
    chain = replace(case, trees=(Tree(62, (-1, 0, 1, 2)),))
    monkeypatch.setattr(f"{KERNELS}.attention_tile.slots_of", lambda position, inside, path, prefix: position)
    check(chain, attention)
    with pytest.raises(AssertionError, match="same_bits"):
        check(case, attention)
