"""Ops that record themselves: what a forward does through ``Ops`` becomes instructions, whoever calls it."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch, RaggedBatch
from specdec_fast.batch.recurrent_batch import LinearAttentionParams, RecurrentBatch
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.program.record.recurrent_calls import attend_linearly, convolve, scan
from specdec_fast.program.record.row_views import NotLowerableError
from specdec_fast.program.record.tracer import Recorder
from specdec_fast.quantization.packed_weight import PackedWeight


def recording_ops(recorder: Recorder, ops: Ops, pool: PagePool, batch: RaggedBatch) -> Ops:
    """Return ops that compute as ``ops`` do, and record it.

    The forward may use the pages of ``pool``, and no other layout than ``batch``'s: the program's caller lays out rows.
    """
    calls = _RecordedCalls(recorder, ops.without_checks, pool, batch)
    return calls.ops.replaced(
        append_kv_=calls.append_kv_,
        paged_attention=calls.paged_attention,
        linear=torch.nn.functional.linear,  # the recorder sees it as an operation of PyTorch
        grouped_linear=calls.grouped_linear,
        grouped_quantized_linear=calls.grouped_quantized_linear,
        conv_rows_=calls.conv_rows_,
        linear_attention_rows_=calls.linear_attention_rows_,
        selective_scan_rows_=calls.selective_scan_rows_,
    )


class _RecordedCalls:
    def __init__(self, recorder: Recorder, ops: Ops, pool: PagePool, batch: RaggedBatch) -> None:
        self.ops = ops
        self._recorder = recorder
        self._batch = batch
        tensors = [] if pool.states is None else pool.states.tensors
        self._states = {each[0].data_ptr(): call for call, each in enumerate(tensors)}
        self._layers = {keys.data_ptr(): layer for layer, (keys, _) in reversed(list(enumerate(pool.layers)))}

    def append_kv_(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        layer = self._layer(keys)
        if slot_mapping is not self._batch.slot_mapping:
            raise NotLowerableError("KV entries are written to slots of the model's own")
        with self._recorder.paused():
            self.ops.append_kv_(keys, values, key, value, slot_mapping)
        self._recorder.tape.append(layer, key, value)

    def paged_attention(
        self, query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams
    ) -> Tensor:
        layer = self._layer(kv[0])
        if batch is not self._batch:
            raise NotLowerableError("attention over rows in a layout of the model's own")
        with self._recorder.paused():
            result: Tensor = self.ops.paged_attention(query, kv, batch, params)
        self._recorder.tape.attend(layer, query, params, result)
        return result

    def grouped_linear(self, rows: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        with self._recorder.paused():
            result: Tensor = self.ops.grouped_linear(rows, expert_ids, weight, bias)
        self._recorder.tape.grouped_linear(rows, expert_ids, weight, bias, result)
        return result

    def grouped_quantized_linear(
        self, rows: Tensor, expert_ids: Tensor, weight: PackedWeight, bias: Tensor | None = None
    ) -> Tensor:
        with self._recorder.paused():
            result: Tensor = self.ops.grouped_quantized_linear(rows, expert_ids, weight, bias)
        self._recorder.tape.grouped_quantized_linear(rows, expert_ids, weight, bias, result)
        return result

    def conv_rows_(
        self,
        rows: Tensor,
        state: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        batch: RecurrentBatch,
    ) -> Tensor:
        call = self._state(state, batch)
        with self._recorder.paused():
            result: Tensor = self.ops.conv_rows_(rows, state, weight, bias, activation, batch)
        convolve(self._recorder.tape, call, rows, weight, bias, activation, result)
        return result

    def linear_attention_rows_(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        pools: tuple[Tensor, Tensor],
        batch: RecurrentBatch,
        params: LinearAttentionParams,
    ) -> Tensor:
        call = self._state(pools[0], batch)
        with self._recorder.paused():
            given = (query, key, value, log_decay, beta)
            result: Tensor = self.ops.linear_attention_rows_(*given, pools, batch, params)
        attend_linearly(self._recorder.tape, call, *given, params, result)
        return result

    def selective_scan_rows_(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        skip: Tensor | None,
        pools: tuple[Tensor, Tensor],
        batch: RecurrentBatch,
    ) -> Tensor:
        call = self._state(pools[0], batch)
        with self._recorder.paused():
            result: Tensor = self.ops.selective_scan_rows_(x, dt, A, B, C, skip, pools, batch)
        scan(self._recorder.tape, call, x, dt, A, B, C, skip, result)
        return result

    def _state(self, tensor: Tensor, batch: RecurrentBatch) -> int:
        """Return the number of the recurrent call whose state a tensor of the pool is."""
        if batch is not self._batch.recurrent:
            raise NotLowerableError("recurrent rows in a layout of the model's own")
        if tensor.data_ptr() not in self._states:
            raise NotLowerableError("states of another pool")
        return self._states[tensor.data_ptr()]

    def _layer(self, keys: Tensor) -> int:
        """Return the layer whose pages these are: of several that share them, the one that writes them."""
        if keys.data_ptr() not in self._layers:
            raise NotLowerableError("pages of another pool")
        return self._layers[keys.data_ptr()]
