"""The adapter between a Hugging Face model and the pages: it writes KV entries to pages and attends over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from specdec_fast.batch.ragged_batch import AttentionParams, RaggedBatch
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.kv_cache.cache_rules import CacheRules
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.ops.checks import stored
from specdec_fast.torch_threads import invariant_call


class PagedCache(Cache):
    """The KV cache of a Hugging Face model during one forward over a ragged batch.

    ``update`` returns the new states unchanged. The attention function writes the keys and values that it receives into
    pages, and reads pages. The model may compute padding rows after the rows of the batch: they are not written, and
    their attention output is 0. ``num_logit_rows`` is the number of rows whose logits the caller needs; None: all.
    """

    def __init__(
        self,
        pool: PagePool,
        batch: RaggedBatch,
        ops: Ops,
        rules: CacheRules,
        num_logit_rows: int | None = None,
    ) -> None:
        # The base class is not initialised: every attribute of it that is not defined here raises, see below.
        self.pool = pool
        self.batch = batch
        self.claimed_length = 0  # `check_ignores_answers` refuses a model whose logits depend on it
        self.questions: set[str] = set()  # the methods that returned it
        self._num_rows = batch.positions.shape[0]
        self._padding = pool.row_padding.padding(self._num_rows)
        counts = sorted((self._num_rows, self._num_rows if num_logit_rows is None else num_logit_rows))
        # maps a padded number of rows to the number before padding, for every row count of the forward; if two counts
        # are padded to the same number, it has the larger one
        self.real_rows = {count + pool.row_padding.padding(count): count for count in counts}
        self._attention_batch = batch.row_by_row() if pool.row_padding.attend_per_row else batch
        # The pool made the layout, so only the model's tensors need checks, and `attend` makes them.
        self.ops = ops.unchecked or ops
        self.rules = rules
        # [T + padding] int64: a row's position minus its number in the forward, so that their sum is its position
        self.length_of_each_row: Tensor | None = None
        if rules.answers_each_row:
            positions = pad(batch.positions, (0, self._padding)) if self._padding else batch.positions
            self.length_of_each_row = positions - torch.arange(len(positions), device=positions.device)
        self.num_attended = 0  # calls of attend: one per layer, if the model goes through the hook

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the states of one layer unchanged: a model may cache other states than it attends over."""
        return key_states, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer_idx: int, params: AttentionParams) -> Tensor:
        """Attend over one layer's pages, after writing its keys and values unless it shares those of an earlier layer.

        Args:
            query: ``[1, num_heads, T, key_head_dim]``.
            key: ``[1, num_kv_heads, T, key_head_dim]``.
            value: ``[1, num_kv_heads, T, value_head_dim]``; the result is ``[1, T, num_heads, value_head_dim]``.
            layer_idx, params: index of the layer; scale, sliding window, soft cap and sinks.
        """
        self.num_attended += 1
        pages = self.pool.layers[layer_idx]
        num_heads, key_head_dim, value_head_dim = self.pool.layout.shapes[layer_idx]
        self._check("queries", layer_idx, query, key_head_dim, query.shape[1] % num_heads == 0)
        if self.pool.layout.sources[layer_idx] == layer_idx:
            self._check("keys", layer_idx, key, key_head_dim, key.shape[1] == num_heads)
            self._check("values", layer_idx, value, value_head_dim, value.shape[1] == num_heads)
            rows = (self._real_rows_of(key), self._real_rows_of(value))  # [T, num_kv_heads, head size]
            invariant_call(self.ops.append_kv_, *pages, *rows, self.batch.slot_mapping)
        out = invariant_call(self.ops.paged_attention, self._real_rows_of(query), pages, self._attention_batch, params)
        return (pad(out, (0, 0, 0, 0, 0, self._padding)) if self._padding else out)[None]

    def _real_rows_of(self, states: Tensor) -> Tensor:
        """Drop padding and batch axis of ``[1, heads, T + padding, head size]``: return ``[T, heads, head size]``."""
        return stored(states[0].transpose(0, 1)[: self._num_rows])

    def _check(self, name: str, layer_idx: int, states: Tensor, head_dim: int, heads_fit: bool) -> None:
        """Check the model's tensors against the pool's layout: with others a kernel would read and write past rows."""
        layout = self.pool.layout
        num_rows = self._num_rows + self._padding
        fits = heads_fit and (states.shape[0], *states.shape[2:]) == (1, num_rows, head_dim)
        if not fits or states.dtype != layout.dtype:
            raise UnsupportedModelError(
                f"layer {layer_idx} computed {name} of shape {list(states.shape)} in {states.dtype}; the KV cache is "
                f"laid out for [1, heads of {layout.shapes[layer_idx].num_kv_heads}, {num_rows}, {head_dim}] in "
                f"{layout.dtype}."
            )

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """Return ``length_of_each_row`` if the model computes with it, else ``claimed_length``.

        The batch has many lengths, and the model receives its positions explicitly.
        """
        self.questions.add("get_seq_length")
        return self.claimed_length if self.length_of_each_row is None else self.length_of_each_row

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return ``claimed_length``, for the same reason."""
        self.questions.add("get_query_offset")
        return self.claimed_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return length and offset of a mask over ``claimed_length`` entries and the rows; the engine uses no mask."""
        self.questions.add("get_mask_sizes")
        return self.claimed_length + int(query_length), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: the cache has no maximum length."""
        return -1

    def __len__(self) -> int:
        return self.pool.layout.num_layers

    @property
    def is_sliding(self) -> list[bool]:
        """Whether each layer has a sliding window."""
        return [layer in self.rules.sliding for layer in range(len(self))]

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer has linear attention: no layer has."""
        return [False] * len(self)

    is_dummy = is_linear

    @property
    def is_compileable(self) -> bool:
        """Whether ``torch.compile`` supports this cache: it does not."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether there is memory for keys and values."""
        return True


def _refuse(name: str) -> property:
    def refuse(self: PagedCache) -> Any:
        raise UnsupportedModelError(f"the model asks its KV cache for `{name}`, which a paged cache cannot answer.")

    return property(refuse)


# The base class would answer these from layers that do not exist here, and the model would compute with wrong answers.
for _name in {*dir(Cache), "layers", "layer_class_to_replicate", "offloading"} - set(vars(PagedCache)):
    if not _name.startswith("_"):
        setattr(PagedCache, _name, _refuse(_name))
