"""A cache that keeps nothing, and records the keys and values of a model's layers, to lay out its pages."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from transformers import Cache

from specdec_fast.batch.ragged_batch import AttentionParams
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.kv_cache.cache_rules import CacheRules
from specdec_fast.kv_cache.layer_layout import KVLayout, KVShape
from specdec_fast.ops import Ops
from specdec_fast.ops.checks import FLOATS


class KVProbe(Cache):
    """The KV cache of a model during one forward that records the shapes of its keys and values.

    Pages keep what attention receives, whatever a model passes to its cache: multi-head latent attention caches a
    compressed form, from which it computes keys and values of different sizes.
    """

    rules = CacheRules()  # the numbers do not matter here, so windows and chunks do not either

    def __init__(self, ops: Ops) -> None:
        super().__init__(layers=[])
        self.ops = ops  # for other functions that are replaced
        self.real_rows: dict[int, int] = {}  # as in ``PagedCache``; there is no padding
        self.asks_for_length = False
        self._cached: set[int] = set()
        self._attended: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values by layer, in order
        self._calls: Counter[int] = Counter()  # of attention, by layer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Note the layer; nothing is kept."""
        self._cached.add(layer_idx)
        return key_states, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer_idx: int, params: AttentionParams) -> Tensor:
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

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: nothing precedes the rows of the probe."""
        self.asks_for_length = True
        return 0

    def layout(self, name: str) -> KVLayout:
        """Return the layout of the KV cache of a model called ``name``.

        Raises UnsupportedModelError if a layer does not attend through the hook once, or a dtype is not served.
        """
        num_layers = len(self._cached | set(self._attended))
        if not num_layers:
            raise UnsupportedModelError(
                f"{name} has no layer that writes to its KV cache or attends through transformers' AttentionInterface; "
                "only models of such layers can be served."
            )
        for layer, times in self._calls.items():
            if times > 1:
                raise UnsupportedModelError(
                    f"layer {layer} of {name} attends {times} times in a forward; pages hold one key and one value per "
                    "layer and position."
                )
        if set(self._attended) != set(range(num_layers)):
            raise UnsupportedModelError(
                f"{len(self._attended)} of {num_layers} layers of {name} attend through transformers' "
                "AttentionInterface; the others would not see the paged KV cache."
            )
        pairs = [self._attended[layer] for layer in range(num_layers)]
        dtypes = sorted({str(key.dtype) for key, _ in pairs})
        if len(dtypes) > 1:
            raise UnsupportedModelError(f"{name} attends in {' and '.join(dtypes)}; a KV cache has one dtype.")
        if pairs[0][0].dtype not in FLOATS:
            served = ", ".join(map(str, FLOATS))
            raise UnsupportedModelError(f"{name} attends in {dtypes[0]}; load it in one of {served}.")
        shapes = tuple(KVShape(key.shape[1], key.shape[3], value.shape[3]) for key, value in pairs)
        sources = tuple(
            next(layer for layer, (k, v) in enumerate(pairs) if k is key and v is value) for key, value in pairs
        )
        key = pairs[0][0]
        return KVLayout(shapes, sources, key.dtype, key.device)
