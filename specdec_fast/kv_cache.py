"""The paged KV cache: a pool of pages, block tables, and the adapter that Hugging Face models write through.

One allocation per model, ``[num_layers, 2, num_pages, page_size, num_kv_heads, head_dim]``. Page 0 is scratch:
padding rows may write there and nobody reads it. Rejecting draft tokens never touches the pool: the owner of the
pages just counts fewer positions as its own, and the stale entries are overwritten (invariant I4).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from specdec_fast.errors import KVCacheAllocationError, KVCacheTooSmallError, UnsupportedModelError
from specdec_fast.ops import Ops
from specdec_fast.ragged import PagedBatch, Scores


@dataclass(frozen=True)
class KVLayout:
    """What one model keeps per position: ``num_layers x 2 x num_kv_heads x head_dim`` numbers of ``dtype``."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV of one position over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Rows:
    """Consecutive positions of one owner that a forward computes: ``start`` to ``start + count - 1``."""

    owner: Hashable
    start: int
    count: int


@dataclass(frozen=True, kw_only=True)
class RaggedBatch(PagedBatch):
    """The rows of one forward, sequence after sequence, never padded.

    Attributes:
        token_ids: ``[T]`` int64.
        positions: ``[T]`` int64, each token's index in its own sequence (I1).
        slot_mapping: ``[T]`` int32, where each row's KV entry goes.

    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor


@lru_cache(maxsize=256)
def _row_layout(counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where each sequence's rows begin ``[B + 1]``, and each row's sequence and place in it ``[T]``.

    Kept, because a run asks for the same few again and again.
    """
    cu_seqlens = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=cu_seqlens[1:])
    sequence = np.repeat(np.arange(len(counts)), counts)
    return cu_seqlens, sequence, np.arange(len(sequence)) - cu_seqlens[sequence]


def _ragged_batch(token_ids: Tensor, /, **fields: Any) -> RaggedBatch:
    return RaggedBatch(token_ids=token_ids, **fields)


class PagePool:
    """Pages of one model's KV cache, handed out on demand and taken back when their owner ends.

    An owner reserves what it may come to need before it gets its first page, so a running sequence never finds
    the pool empty: whoever does not fit waits, or is told that it never will.
    """

    def __init__(self, layout: KVLayout, num_tokens: int, page_size: int) -> None:
        self.layout = layout
        self.page_size = page_size
        self.num_pages = -(-num_tokens // page_size)  # page 0, the scratch page, comes on top
        shape = (layout.num_layers, 2, self.num_pages + 1, page_size, layout.num_kv_heads, layout.head_dim)
        try:
            self.tensor = torch.zeros(shape, dtype=layout.dtype, device=layout.device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            needed = (self.num_pages + 1) * page_size * layout.bytes_per_token
            raise KVCacheAllocationError(
                f"a KV cache of {num_tokens} positions needs {needed / 2**30:.1f} GiB on {layout.device}, which is not "
                "to be had; set kv_cache_tokens, or lower max_new_tokens, max_batch_size or window_size."
            ) from error
        # per layer: keys and values, each [num_pages + 1, page_size, num_kv_heads, head_dim]
        self.layers: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in self.tensor]
        self._on_cpu = layout.device.type == "cpu"
        self._free = list(range(self.num_pages, 0, -1))
        self._tables: dict[Hashable, list[int]] = {}
        self._reserved: dict[Hashable, int] = {}
        self._num_reserved = 0

    @property
    def num_free_pages(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def block_table(self, owner: Hashable) -> list[int]:
        """Return the pages ``owner`` holds, in order of position."""
        return self._tables[owner]

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Tell whether an empty pool could hold one owner of ``num_tokens`` positions."""
        return self._pages(num_tokens) <= self.num_pages

    def fits(self, num_tokens: int) -> bool:
        """Tell whether a new owner of up to ``num_tokens`` positions can be promised its pages now."""
        return self._num_reserved + self._pages(num_tokens) <= self.num_pages

    def open(self, owner: Hashable, num_tokens: int) -> None:
        """Reserve pages for up to ``num_tokens`` positions of a new owner; none is handed out yet.

        Raises:
            KVCacheTooSmallError: they are not to be had now; ask ``fits`` first.

        """
        if owner in self._tables:
            raise ValueError(f"{owner!r} already holds pages; close it first.")
        pages = self._pages(num_tokens)
        if not self.fits(num_tokens):
            raise KVCacheTooSmallError(
                f"{num_tokens} KV positions need {pages} pages; {self.num_pages - self._num_reserved} of "
                f"{self.num_pages} are unreserved. Raise kv_cache_tokens, or lower max_new_tokens."
            )
        self._reserved[owner] = pages
        self._num_reserved += pages
        self._tables[owner] = []

    def close(self, owner: Hashable) -> None:
        """Take back every page and the reservation of ``owner``."""
        self._free.extend(reversed(self._tables.pop(owner)))
        self._num_reserved -= self._reserved.pop(owner)

    def batch(self, rows: Sequence[Rows], token_ids: Tensor) -> RaggedBatch:
        """Lay out one forward, handing out the pages that its new positions need.

        Args:
            rows: the spans of each sequence, in batch order.
            token_ids: ``[T]`` int64 on the layout's device, the spans' tokens one after the other.

        Raises:
            KVCacheTooSmallError: a span goes beyond what its owner has reserved.

        """
        for span in rows:
            self._hand_out(span)
        starts = np.array([span.start for span in rows], np.int64)
        counts = tuple(span.count for span in rows)
        cu_seqlens, sequence, offset = _row_layout(counts)
        table = self._table_of([span.owner for span in rows])
        positions = starts[sequence] + offset
        used = (starts + counts).astype(np.int32)
        return RaggedBatch(
            token_ids=token_ids,
            positions=self._to_device(positions),
            slot_mapping=self._to_device(self._slots(table, sequence, positions)),
            cu_seqlens_q=self._to_device(cu_seqlens.copy()),
            seqused_k=self._to_device(used),
            block_table=self._to_device(table),
            max_seqlen_q=max(counts, default=0),
            max_seqlen_k=int(used.max(initial=0)),
        )

    def successive(self, rows: Sequence[Rows]) -> list[Callable[[Tensor], RaggedBatch]]:
        """Lay out several forwards at once: the first position of every span, then the second of every span, ...

        A forward after the first is known before its tokens are, so a drafting loop need not stop to lay it out.

        Args:
            rows: spans of one length, ``num_forwards``, one per sequence, in batch order.

        Returns:
            One function per forward, from its ``[B]`` token ids to the batch of ``B`` rows.

        Raises:
            KVCacheTooSmallError: a span goes beyond what its owner has reserved.

        """
        for span in rows:
            self._hand_out(span)
        num_forwards, batch_size = rows[0].count, len(rows)
        starts = np.array([span.start for span in rows])
        table = self._table_of([span.owner for span in rows])
        positions = starts + np.arange(num_forwards)[:, None]  # [num_forwards, B]
        slots = self._slots(table, np.arange(batch_size), positions)
        used = (positions + 1).astype(np.int32)
        arrays = (positions, slots, used)
        per_forward = zip(*(self._to_device(array).unbind() for array in arrays), strict=True)
        shared: dict[str, Any] = {
            "cu_seqlens_q": self._to_device(np.arange(batch_size + 1, dtype=np.int32)),
            "block_table": self._to_device(table),
            "max_seqlen_q": 1,
            "max_seqlen_k": int(used.max()),
        }
        return [
            partial(_ragged_batch, positions=positions, slot_mapping=slots, seqused_k=used, **shared)
            for positions, slots, used in per_forward
        ]

    def _slots(self, table: np.ndarray, sequence: np.ndarray, positions: np.ndarray) -> np.ndarray:
        page, offset = np.divmod(positions, self.page_size)
        return table[sequence, page] * np.int32(self.page_size) + offset.astype(np.int32)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _hand_out(self, span: Rows) -> None:
        table = self._tables[span.owner]
        needed = self._pages(span.start + span.count)
        if needed > self._reserved[span.owner]:
            raise KVCacheTooSmallError(
                f"position {span.start + span.count - 1} lies beyond the {self._reserved[span.owner]} pages reserved."
            )
        while len(table) < needed:
            table.append(self._free.pop())

    def _table_of(self, owners: Iterable[Hashable]) -> np.ndarray:
        tables = [self._tables[owner] for owner in owners]
        table = np.zeros((len(tables), max(map(len, tables), default=1) or 1), np.int32)
        for row, pages in zip(table, tables, strict=True):
            row[: len(pages)] = pages
        return table

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._on_cpu else tensor.to(self.layout.device, non_blocking=True)


class PagedCache(Cache):
    """What a Hugging Face model takes for its KV cache during one forward over a ragged batch.

    ``update`` writes the new rows into pages and hands the rows themselves back; the attention hook reads the pages.
    """

    def __init__(self, pool: PagePool, batch: RaggedBatch, ops: Ops, sliding_layers: frozenset[int]) -> None:
        super().__init__(layers=[])
        self.pool, self.batch = pool, batch
        # The pool has laid the batch out, so only what the model brings is checked, and that here.
        self._ops = ops.unchecked or ops
        self.sliding_layers = sliding_layers  # layers that must tell their window with every call
        self.num_attended = 0  # calls of attend: one per layer, if the model goes through the hook

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write ``[1, num_kv_heads, T, head_dim]`` keys and values of one layer through ``slot_mapping``."""
        keys, values = self.pool.layers[layer_idx]
        for name, states in (("keys", key_states), ("values", value_states)):
            self._check(name, layer_idx, states, states.shape[1] == self.pool.layout.num_kv_heads)
        rows = (key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))  # [T, num_kv_heads, head_dim]
        self._ops.append_kv_(keys, values, *rows, self.batch.slot_mapping)
        return key_states, value_states

    def attend(self, query: Tensor, layer_idx: int, scores: Scores) -> Tensor:
        """Attend from ``[1, num_heads, T, head_dim]`` queries; return ``[1, T, num_heads, head_dim]``."""
        self.num_attended += 1
        self._check("queries", layer_idx, query, query.shape[1] % self.pool.layout.num_kv_heads == 0)
        rows = query[0].transpose(0, 1)
        return self._ops.paged_attention(rows, self.pool.layers[layer_idx], self.batch, scores)[None]

    def _check(self, name: str, layer_idx: int, states: Tensor, heads_fit: bool) -> None:
        """Hold what the model computed to the pool's layout: a kernel would read and write past its rows."""
        layout, num_rows = self.pool.layout, self.batch.token_ids.shape[0]
        fits = heads_fit and (states.shape[0], *states.shape[2:]) == (1, num_rows, layout.head_dim)
        if not fits or states.dtype != layout.dtype:
            raise UnsupportedModelError(
                f"layer {layer_idx} computed {name} of shape {list(states.shape)} in {states.dtype}; the KV cache is "
                f"laid out for [1, heads of {layout.num_kv_heads}, {num_rows}, {layout.head_dim}] in {layout.dtype}."
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are passed to the model explicitly, so nothing may be inferred from a length."""
        return 0
