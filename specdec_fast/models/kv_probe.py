"""A cache that keeps nothing, and records what a model's layers keep, to lay out its pages and state slots."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from specdec_fast.batch.ragged_batch import AttentionParams
from specdec_fast.batch.recurrent_batch import LinearAttentionParams
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.kv_cache.cache_rules import CacheRules
from specdec_fast.kv_cache.hf_cache import NoStates
from specdec_fast.kv_cache.layer_layout import KVLayout, KVShape
from specdec_fast.kv_cache.state_pool import StateShape
from specdec_fast.ops import Ops
from specdec_fast.ops.checks import FLOATS


class KVProbe(NoStates, Cache):
    """The KV cache of a model during one forward that records the shapes of its keys, values and recurrent states.

    Pages keep what attention receives, whatever a model passes to its cache: multi-head latent attention caches a
    compressed form, from which it computes keys and values of different sizes.
    """

    rules = CacheRules()  # the numbers do not matter here, so windows and chunks do not either

    def __init__(self, ops: Ops) -> None:
        Cache.__init__(self, layers=[])
        self.ops = ops  # for other functions that are replaced
        self.real_rows: dict[int, int] = {}  # as in ``PagedCache``; there is no padding
        self.asks_for_length = False
        self._cached: set[int] = set()
        self.updated_layer = -1  # of the last call of update
        self._attended: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values by layer, in order
        self._index_keys: dict[int, Tensor] = {}  # of indexers, by layer
        self._calls: Counter[int] = Counter()  # of attention, by layer
        self.states: list[StateShape] = []  # of recurrent functions, in order of their calls
        self._state_devices: list[torch.device] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Note the layer; nothing is kept."""
        self._cached.add(layer_idx)
        self.updated_layer = layer_idx
        return key_states, value_states

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Record the keys of an indexer; return them."""
        self._index_keys[layer_idx] = keys
        return keys

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer_idx: int,
        params: AttentionParams,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Record keys and values; return zeros ``[1, T, num_heads, value_head_dim]`` as the result."""
        num_heads, num_rows = query.shape[1:3]
        fits = key.shape[0] == 1 and key.shape[2] == num_rows and key.shape[3] == query.shape[3]
        if not fits or key.shape[:3] != value.shape[:3] or num_heads % key.shape[1] or key.dtype != value.dtype:
            raise UnsupportedModelError(
                f"layer {layer_idx} attends from queries {list(query.shape)} over keys {list(key.shape)} in {key.dtype}"
                f" and values {list(value.shape)} in {value.dtype}; pages serve [1, heads, rows, head size], a key and "
                "a value per row, in one dtype, the heads of queries a multiple of theirs."
            )
        self._calls[layer_idx] += 1
        self._attended[layer_idx] = key, value  # kept alive, so that no other tensor is mistaken for it
        return query.new_zeros(1, num_rows, num_heads, value.shape[3])

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """Record the state of a convolution; return zeros ``[T, channels]``."""
        channels, kernel = weight.shape
        self.states.append(StateShape("conv_rows_", (kernel - 1, channels), 0, rows.dtype))
        self._state_devices.append(rows.device)
        return torch.zeros_like(rows)

    def attend_linearly(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        params: LinearAttentionParams,
    ) -> Tensor:
        """Record the state of linear attention; return zeros ``[T, heads, value_dim]``."""
        shape = (value.shape[1], key.shape[2], value.shape[2])
        kept = [each for each in (key, value, log_decay, beta) if each is not None]
        width = sum(each.shape[1:].numel() for each in kept)
        self.states.append(StateShape("linear_attention_rows_", shape, width))
        self._state_devices.append(value.device)
        return torch.zeros_like(value)

    def scan(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor | None) -> Tensor:
        """Record the state of a selective scan; return zeros ``[T, channels]``."""
        width = sum(each.shape[1:].numel() for each in (x, dt, B))
        self.states.append(StateShape("selective_scan_rows_", tuple(A.shape[::-1]), width))
        self._state_devices.append(x.device)
        return torch.zeros_like(x)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: nothing precedes the rows of the probe."""
        self.asks_for_length = True
        return 0

    def layout(self, name: str, dtype: torch.dtype, device: torch.device) -> KVLayout:
        """Return the layout of the KV cache of a model called ``name``.

        ``dtype`` is that of its weights, which a model that does not attend has; ``device`` is where its rows enter.

        Raises UnsupportedModelError if a layer does not attend through the hook once, or a dtype is not served.
        """
        layer_ids = sorted(self._cached | set(self._attended))
        num_layers = len(layer_ids)
        states = tuple(self.states)
        if not num_layers and not states:
            raise UnsupportedModelError(
                f"{name} has no layer that writes to its KV cache or attends through transformers' AttentionInterface, "
                "and calls no recurrent function; only models of such layers can be served."
            )
        for layer, times in self._calls.items():
            if times > 1:
                raise UnsupportedModelError(
                    f"layer {layer} of {name} attends {times} times in a forward; pages hold one key and one value per "
                    "layer and position."
                )
        if set(self._attended) != set(layer_ids) or (not states and layer_ids != list(range(num_layers))):
            raise UnsupportedModelError(
                f"{len(self._attended)} of {num_layers} layers of {name} attend through transformers' "
                "AttentionInterface; the others would not see the paged KV cache."
            )
        pairs = [self._attended[layer] for layer in layer_ids]
        dtypes = sorted({str(key.dtype) for key in (*(key for key, _ in pairs), *self._index_keys.values())})
        if len(dtypes) > 1:
            raise UnsupportedModelError(
                f"{name} attends in {' and '.join(dtypes)}; a KV cache has one dtype; load the model in torch.float32."
            )
        if pairs:
            dtype = pairs[0][0].dtype
        if dtype not in FLOATS:
            served = ", ".join(map(str, FLOATS))
            what = "attends" if pairs else "computes"
            raise UnsupportedModelError(f"{name} {what} in {dtype}; load it in one of {served}.")
        shapes = [KVShape(key.shape[1], key.shape[3], value.shape[3]) for key, value in pairs]
        indexers = sorted(self._index_keys)
        shapes += [KVShape(1, self._index_keys[layer].shape[-1], 0) for layer in indexers]
        sources = [next(layer for layer, (k, v) in enumerate(pairs) if k is key and v is value) for key, value in pairs]
        sources += range(num_layers, len(shapes))
        layout = KVLayout(
            shapes=tuple(shapes),
            sources=tuple(sources),
            dtype=dtype,
            device=device,
            layer_ids=tuple(layer_ids) if states else None,
            states=states,
            indexers=tuple(indexers),
        )
        devices = [key.device for key in (*(key for key, _ in pairs), *map(self._index_keys.__getitem__, indexers))]
        if set(devices) | set(self._state_devices) <= {device}:
            return layout
        return replace(layout, devices=tuple(devices), state_devices=tuple(self._state_devices))
