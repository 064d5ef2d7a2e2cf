"""Sparse attention by an indexer (DeepSeek sparse attention): which positions each row of a forward attends over.

An indexer of ``transformers`` caches a key per position, computes a score of its queries with every key of the cache,
and takes the ``index_topk`` best positions. Its own code does so here as well. It receives an ``OfEachRow`` as the keys
of the cache, which notes what the indexer computes from them. ``topk`` then computes that for one row at a time, over
the keys of the row's own sequence up to its own position. So the bits of its scores depend on the row alone. Among
equal scores the lowest position comes first; ``torch.topk`` promises no order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import PagedBatch, RaggedBatch
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.torch_threads import invariant_call


class IndexedRows:
    """The rows of one forward for its indexers; the rows are chains.

    Args:
        batch: ``T`` rows.
        page_size: of the pages.
        padding: number of rows that the model computes behind them.
    """

    def __init__(self, batch: RaggedBatch, page_size: int, padding: int) -> None:
        self._batch = batch
        self._page_size = page_size
        self._padding = padding
        self._contexts = [position + 1 for position in batch.positions.tolist()]  # entries that each row sees
        self._starts = batch.cu_seqlens_q.tolist()
        # positions that an indexer of this forward has selected, and the same rows for attention over these
        self._selected: list[tuple[Tensor, PagedBatch]] = []

    @property
    def num_rows(self) -> int:
        """The number of rows that the model computes, padding rows included."""
        return len(self._contexts) + self._padding

    @property
    def longest(self) -> int:
        """The largest number of positions that a row sees."""
        return max(self._contexts, default=0)

    def append(self, pages: Tensor, keys: Tensor) -> OfEachRow:
        """Write the keys of the rows, and return those that each row sees.

        ``pages`` are ``[num_pages, page_size, 1, D]``, ``keys`` ``[1, T + padding, D]``.
        """
        slots = self._batch.slot_mapping.long()
        pages.flatten(0, 2).index_copy_(0, slots, keys[0, : len(slots)])
        keys_of_rows: list[Tensor] = []  # of each row's sequence
        for b, (first, stop) in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            num_pages = -(-max(self._contexts[first:stop], default=0) // self._page_size)
            of_sequence = pages[self._batch.block_table[b, :num_pages].long()].flatten(0, 2)  # [positions, D]
            keys_of_rows += [of_sequence] * (stop - first)
        return OfEachRow(self, lambda row: keys_of_rows[row][: self._contexts[row]][None])

    def row_of(self, tensor: Tensor, row: int) -> Tensor:
        """Return ``[1, 1, ...]`` of ``[1, T + padding, ...]``; a tensor without an axis of rows as it is.

        It is copied, because a library may add in another order at another alignment.
        """
        if tensor.dim() > 1 and tensor.shape[:2] == (1, self.num_rows):
            return tensor[:, row : row + 1].clone(memory_format=torch.contiguous_format)
        if tensor.dim() < 2 or tensor.shape[:2] == (1, 1):
            return tensor
        raise UnsupportedModelError(
            f"an indexer computes scores with a tensor of shape {list(tensor.shape)}; expected the {self.num_rows} "
            "rows of the forward in its second axis, behind a first one of size 1."
        )

    def select(self, scores_of: Callable[[int], Tensor], most: int) -> Tensor:
        """Return the ``most`` best positions of each row, or all that it sees if these are fewer.

        ``scores_of`` a row are ``[1, 1, positions that it sees]``. The result is ``[1, T + padding, most]`` int32, in
        ascending order, with -1 behind the positions of a row. Scores of a row that selects all do not matter; those of
        the first row are computed all the same, so that a model of other scores is refused when it is loaded.
        """
        device = self._batch.positions.device
        selected = torch.full((1, self.num_rows, most), -1, dtype=torch.int32, device=device)
        everything = torch.arange(most, dtype=torch.int32, device=device)
        for row, context in enumerate(self._contexts):
            if row and context <= most:
                selected[0, row, :context] = everything[:context]
                continue
            scores = scores_of(row)
            if scores.shape != (1, 1, context):
                raise UnsupportedModelError(
                    f"an indexer computes scores of shape {list(scores.shape)} for a row that sees {context} "
                    "positions; expected one score per position."
                )
            best = scores[0, 0].sort(descending=True, stable=True).indices[:most]
            selected[0, row, : len(best)] = best.sort().values
        self._selected.append((selected, self._attending(selected)))
        return selected

    def attending(self, selected: Tensor) -> PagedBatch | None:
        """Return the rows for attention over ``selected`` alone; None if no indexer of this forward selected these.

        Each row is a sequence of its own, and each position a page of its own: the KV entry in slot i is page i.
        """
        return next((batch for known, batch in self._selected if known is selected), None)

    def has_selected(self, elsewhere: Tensor) -> bool:
        """Return whether an indexer has selected these positions; they are a copy, on another device."""
        return any(torch.equal(known.to(elsewhere.device), elsewhere) for known, _ in self._selected)

    def adopt(self, selected: Tensor) -> None:
        """Let rows attend over positions that an indexer has selected on another device."""
        self._selected.append((selected, self._attending(selected)))

    def _attending(self, selected: Tensor) -> PagedBatch:
        rows = self._batch.row_by_row()
        positions = selected[0, : len(self._contexts)].long()
        is_position = positions >= 0
        positions = positions.clamp(min=0)
        pages = rows.block_table.long().gather(1, positions // self._page_size)
        slots = pages * self._page_size + positions % self._page_size
        return PagedBatch(
            cu_seqlens_q=rows.cu_seqlens_q,
            seqused_k=is_position.sum(dim=1).int(),
            block_table=torch.where(is_position, slots, 0).int(),
            max_seqlen_q=1,
            max_seqlen_k=selected.shape[2],
        )


class Selection(NamedTuple):
    """What stands for the result of ``torch.topk``; its values are not kept."""

    indices: Tensor  # [1, T + padding, k] int32, see ``IndexedRows.select``


class OfEachRow:
    """A tensor of which every row of a forward has its own, as long as its own context.

    What a model computes from it (operators, methods of tensors, functions of torch) is an ``OfEachRow`` too, and is
    computed when ``topk`` needs it. Other tensors in such an operation have the forward's rows in their second axis.

    Args:
        rows: of the forward.
        compute: from the number of a row to its tensor.
    """

    def __init__(self, rows: IndexedRows, compute: Callable[[int], Tensor]) -> None:
        self._rows = rows
        self._compute = compute

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Tensor], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> OfEachRow:
        rows = next(arg._rows for arg in args if isinstance(arg, OfEachRow))

        def compute(row: int) -> Tensor:
            return func(*(_of_row(rows, arg, row) for arg in args), **(kwargs or {}))

        return cls(rows, compute)

    def __getattr__(self, name: str) -> Callable[..., OfEachRow]:
        method = getattr(Tensor, name, None)
        if name.startswith("_") or name.endswith("_") or not callable(method):
            raise AttributeError(f"keys of an indexer have no {name!r}: each row of the forward has its own keys.")
        return partial(self._apply, method)

    def _apply(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> OfEachRow:
        return self.__torch_function__(func, (), (self, *args), kwargs)

    def __add__(self, other: Any) -> OfEachRow:
        return self._apply(torch.add, other)

    def __mul__(self, other: Any) -> OfEachRow:
        return self._apply(torch.mul, other)

    def __truediv__(self, other: Any) -> OfEachRow:
        return self._apply(torch.div, other)

    def __matmul__(self, other: Any) -> OfEachRow:
        return self._apply(torch.matmul, other)

    __radd__ = __add__
    __rmul__ = __mul__

    @property
    def shape(self) -> torch.Size:
        """The shape of scores: ``[1, T + padding, positions that the row with the longest context sees]``."""
        return torch.Size((1, self._rows.num_rows, self._rows.longest))

    def topk(self, k: int, dim: int = -1) -> Selection:
        """Select the positions of the ``k`` largest scores of each row."""
        if dim not in (-1, 2):
            raise UnsupportedModelError(f"an indexer takes its top-k along dimension {dim}; expected the last one.")
        with torch._C.DisableTorchFunction():  # rows are plain tensors, and none of their products is a linear
            return Selection(invariant_call(self._rows.select, self._compute, k))


def _of_row(rows: IndexedRows, value: Any, row: int) -> Any:
    if isinstance(value, OfEachRow):
        return value._compute(row)
    return rows.row_of(value, row) if isinstance(value, Tensor) else value
