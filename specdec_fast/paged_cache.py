"""The adapter between a Hugging Face model and the pages: it writes through it, and attends through it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache

from specdec_fast.errors import UnsupportedModelError
from specdec_fast.kv_cache import PagePool
from specdec_fast.ops import Ops
from specdec_fast.ragged import Scores
from specdec_fast.rows import RaggedBatch


class PagedCache(Cache):
    """What a Hugging Face model takes for its KV cache during one forward over a ragged batch.

    ``update`` writes the new rows into pages and hands the rows themselves back; the attention hook reads the pages.
    """

    def __init__(self, pool: PagePool, batch: RaggedBatch, ops: Ops, sliding_layers: frozenset[int]) -> None:
        super().__init__(layers=[])
        self.pool, self.batch = pool, batch
        self._attended = batch.row_by_row() if pool.row_rule.attends_alone else batch
        # The pool has laid the batch out, so only what the model brings is checked, and that here.
        self.ops = ops.unchecked or ops
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
        self.ops.append_kv_(keys, values, *rows, self.batch.slot_mapping)
        return key_states, value_states

    def attend(self, query: Tensor, layer_idx: int, scores: Scores) -> Tensor:
        """Attend from ``[1, num_heads, T, head_dim]`` queries; return ``[1, T, num_heads, head_dim]``."""
        self.num_attended += 1
        self._check("queries", layer_idx, query, query.shape[1] % self.pool.layout.num_kv_heads == 0)
        rows = query[0].transpose(0, 1)
        return self.ops.paged_attention(rows, self.pool.layers[layer_idx], self._attended, scores)[None]

    def _check(self, name: str, layer_idx: int, states: Tensor, heads_fit: bool) -> None:
        """Hold what the model computed to the pool's layout: a kernel would read and write past its rows."""
        layout, num_rows = self.pool.layout, self.batch.positions.shape[0]
        fits = heads_fit and (states.shape[0], *states.shape[2:]) == (1, num_rows, layout.head_dim)
        if not fits or states.dtype != layout.dtype:
            raise UnsupportedModelError(
                f"layer {layer_idx} computed {name} of shape {list(states.shape)} in {states.dtype}; the KV cache is "
                f"laid out for [1, heads of {layout.num_kv_heads}, {num_rows}, {layout.head_dim}] in {layout.dtype}."
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are passed to the model explicitly, so nothing may be inferred from a length."""
        return 0
