"""The KV cache of a model whose layers lie on several devices: each layer's pages and batch are on its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import AttentionParams, RaggedBatch
from specdec_fast.batch.recurrent_batch import LinearAttentionParams
from specdec_fast.kv_cache.cache_rules import CacheRules
from specdec_fast.kv_cache.hf_cache import PagedCache
from specdec_fast.kv_cache.indexed_rows import OfEachRow
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops


class SpreadCache(PagedCache):
    """A ``PagedCache`` of one forward whose layers lie on several devices.

    The batch comes on the device where rows enter. Another device gets a copy of it once in a forward, when its first
    layer needs it, and serves its layers by a ``PagedCache`` of its own.
    """

    def __init__(
        self, pool: PagePool, batch: RaggedBatch, ops: Ops, rules: CacheRules, num_logit_rows: int | None = None
    ) -> None:
        super().__init__(pool, batch, ops, rules, num_logit_rows)
        self._num_logit_rows = num_logit_rows
        self._parts: dict[torch.device, PagedCache] = {}

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer_idx: int,
        params: AttentionParams,
        selected: Tensor | None = None,
    ) -> Tensor:
        part = self._part_on(query.device)
        if selected is not None:
            self._bring(selected, part or self)
        if part is None:
            return super().attend(query, key, value, layer_idx, params, selected)
        self.num_attended += 1
        return part.attend(query, key, value, layer_idx, params, selected)

    def update_indexer(self, keys: Tensor, layer_idx: int) -> OfEachRow:
        part = self._part_on(keys.device)
        return super().update_indexer(keys, layer_idx) if part is None else part.update_indexer(keys, layer_idx)

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        part = self._part_of_call(rows.device)
        convolve = super().convolve if part is None else part.convolve
        return convolve(rows, weight, bias, activation)

    def attend_linearly(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        params: LinearAttentionParams,
    ) -> Tensor:
        part = self._part_of_call(value.device)
        attend_linearly = super().attend_linearly if part is None else part.attend_linearly
        return attend_linearly(query, key, value, log_decay, beta, params)

    def scan(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor | None) -> Tensor:
        part = self._part_of_call(x.device)
        scan = super().scan if part is None else part.scan
        return scan(x, dt, A, B, C, skip)

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """Return the length, or those of the rows, for a layer that computes with it; on the layer's device."""
        length = super().get_seq_length(layer_idx)
        layout = self.pool.layout
        place = layout.places.get(layer_idx)
        if place is None or not layout.devices or not isinstance(length, Tensor):
            return length
        part = self._part_on(layout.devices[place])
        if part is None:
            return length
        if part.length_of_each_row is None:  # `check_ignores_answers` has set this cache's
            part.length_of_each_row = length.to(layout.devices[place])
        return part.length_of_each_row

    def _part_on(self, device: torch.device) -> PagedCache | None:
        """Return the cache of the layers on ``device``; None for those where rows enter, which this one serves."""
        if device == self.batch.positions.device:
            return None
        part = self._parts.get(device)
        if part is None:
            given: Any = (self.pool, self.batch.to(device), self.ops, self.rules, self._num_logit_rows)
            part = self._parts[device] = PagedCache(*given)
        return part

    def _bring(self, selected: Tensor, cache: PagedCache) -> None:
        """Let a layer attend over what an indexer has selected on another device, and a hook has copied."""
        for other in (self, *self._parts.values()):
            rows = other._indexed_rows
            if other is not cache and rows is not None and rows.has_selected(selected):
                cache._rows_of_indexers().adopt(selected)
                return

    def _part_of_call(self, device: torch.device) -> PagedCache | None:
        """Return the cache for the next recurrent call; calls are counted over all devices."""
        part = self._part_on(device)
        if part is not None:
            part.num_advanced = self.num_advanced
            self.num_advanced += 1
        return part
