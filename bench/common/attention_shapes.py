"""Arguments of ``paged_attention`` at the sizes of serving, made on the device, because a CPU would take minutes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch


@dataclass(frozen=True)
class AttentionShape:
    """Ragged rows at the ends of their contexts; by default one layer of Qwen3-8B.

    Attributes:
        contexts: KV entries of each sequence, including those of its rows.
        rows: query rows of each sequence.
        heads, kv_heads, head_dim, page_size: sizes of the layer.

    """

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    def make(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict[str, Any]:
        """Make random queries and scattered pages; the same ones for the same seed."""
        generator = torch.Generator(device).manual_seed(seed)
        pages = torch.tensor([-(-context // self.page_size) for context in self.contexts])
        num_pages = int(pages.sum())
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).int() + 1  # page 0 is scratch
        table = torch.zeros(len(pages), int(pages.max()), dtype=torch.int32)
        for row, own in zip(table, order.split(pages.tolist()), strict=True):
            row[: len(own)] = own
        drawn = {"generator": generator, "dtype": dtype, "device": device}
        cache = (num_pages + 1, self.page_size, self.kv_heads, self.head_dim)
        return {
            "query": torch.randn(sum(self.rows), self.heads, self.head_dim, **drawn),
            "kv": (torch.randn(cache, **drawn), torch.randn(cache, **drawn)),
            "batch": paged_batch(self.rows, torch.tensor(self.contexts, device=device), table.to(device)),
            "params": AttentionParams(self.head_dim**-0.5),
        }


def paged_batch(rows: tuple[int, ...], contexts: Tensor, block_table: Tensor) -> PagedBatch:
    """Lay out sequences with ``rows`` rows each, at the ends of their contexts."""
    return PagedBatch(
        cu_seqlens_q=torch.tensor([0, *rows]).cumsum(0).to(torch.int32).to(contexts.device),
        seqused_k=contexts.to(torch.int32),
        block_table=block_table,
        max_seqlen_q=max(rows),
        max_seqlen_k=int(contexts.max()),
    )


def part_of(args: dict[str, Any], sequence: int, first: int, count: int) -> tuple[dict[str, Any], slice]:
    """Return the arguments for ``count`` rows of one sequence alone, from row ``first``, and their slice."""
    batch = args["batch"]
    begin, end = batch.cu_seqlens_q[sequence : sequence + 2].tolist()
    rows = slice(begin + first, min(begin + first + count, end))
    context = batch.seqused_k[sequence : sequence + 1] - (end - rows.stop)
    alone = paged_batch((rows.stop - rows.start,), context, batch.block_table[sequence : sequence + 1])
    return {**args, "query": args["query"][rows], "batch": alone}, rows


def repeated(args: dict[str, Any], times: int) -> dict[str, Any]:
    """Return the arguments for a batch with every sequence ``times`` times, on the same pages."""
    batch = args["batch"]
    rows = tuple(batch.cu_seqlens_q.diff().tolist()) * times
    many = paged_batch(rows, batch.seqused_k.repeat(times), batch.block_table.repeat(times, 1))
    return {**args, "query": args["query"].repeat(times, 1, 1), "batch": many}
