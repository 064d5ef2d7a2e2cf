"""The adapter between a Hugging Face model and its memory: pages of KV entries, and state slots of recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch, RaggedBatch
from specdec_fast.batch.recurrent_batch import LinearAttentionParams, RecurrentBatch
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.kv_cache.cache_rules import CacheRules
from specdec_fast.kv_cache.indexed_rows import IndexedRows, OfEachRow
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.ops.checks import stored
from specdec_fast.torch_threads import invariant_call


class NoStates:
    """The answers of a cache before the first token, so that a layer computes any number of rows in the same way."""

    asked_for_state = False  # whether a layer has asked for its state

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        """Return None: the inputs of a convolution are in state slots."""
        self.asked_for_state = True

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> None:
        """Return None: the recurrent state is in state slots."""
        self.asked_for_state = True

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """Return False, for the same reason."""
        self.asked_for_state = True
        return False

    def is_recording_past(self, *args: Any, **kwargs: Any) -> bool:
        """Return False: no layer records inputs."""
        return False

    def update_conv_state(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the new inputs unchanged."""
        return states

    def update_recurrent_state(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the new state unchanged: it has been written already."""
        return states


class PagedCache(NoStates, Cache):
    """The KV cache of a Hugging Face model during one forward over a ragged batch.

    ``update`` returns the new states unchanged. The attention function writes the keys and values that it receives into
    pages, and reads pages. The model may compute padding rows after the rows of the batch: they are not written, and
    their attention output is 0. ``num_logit_rows`` is the number of rows whose logits the caller needs; None: all.

    The cache answers a recurrent layer that it has no state, so the layer computes as for a new text of many tokens.
    The functions that it then calls (``models/recurrent_functions.py``) compute from the state slots. The i-th call of
    a forward has the i-th state of the layout.
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
        self.ops = ops.without_checks
        self.rules = rules
        # [T + padding] int64: a row's position minus its number in the forward, so that their sum is its position
        self.length_of_each_row: Tensor | None = None
        if rules.answers_each_row:
            positions = pad(batch.positions, (0, self._padding)) if self._padding else batch.positions
            self.length_of_each_row = positions - torch.arange(len(positions), device=positions.device)
        self._indexed_rows: IndexedRows | None = None  # from the first call of an indexer on
        self.num_attended = 0  # calls of attend: one per layer, if the model goes through the hook
        self.updated_layer = -1  # of the last call of update
        self.num_advanced = 0  # calls of recurrent functions: one per state

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the states of one layer unchanged: a model may cache other states than it attends over."""
        self.updated_layer = layer_idx
        return key_states, value_states

    def update_indexer(self, keys: Tensor, layer_idx: int) -> OfEachRow:
        """Write the keys of a layer's indexer, ``[1, T + padding, D]``, and return those that each row sees."""
        layout = self.pool.layout
        place = layout.places_of_indexers.get(layer_idx)
        if place is None:
            raise UnsupportedModelError(
                f"layer {layer_idx} caches keys of an indexer, but did not when the model was loaded; pages are laid "
                f"out for indexers of layers {', '.join(map(str, layout.indexers)) or 'none'}."
            )
        expected = (1, self._num_rows + self._padding, layout.shapes[place].key_head_dim)
        if keys.shape != expected or keys.dtype != layout.dtype:
            raise UnsupportedModelError(
                f"the indexer of layer {layer_idx} computed keys of shape {list(keys.shape)} in {keys.dtype}; the KV "
                f"cache is laid out for {list(expected)} in {layout.dtype}."
            )
        return invariant_call(self._rows_of_indexers().append, self.pool.layers[place][0], keys)

    def _rows_of_indexers(self) -> IndexedRows:
        if self._indexed_rows is None:
            self._indexed_rows = IndexedRows(self.batch, self.pool.page_size, self._padding)
        return self._indexed_rows

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer_idx: int,
        params: AttentionParams,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Attend over one layer's pages, after writing its keys and values unless it shares those of an earlier layer.

        Args:
            query: ``[1, num_heads, T, key_head_dim]``.
            key: ``[1, num_kv_heads, T, key_head_dim]``.
            value: ``[1, num_kv_heads, T, value_head_dim]``; the result is ``[1, T, num_heads, value_head_dim]``.
            layer_idx, params: index of the layer; scale, sliding window, soft cap and sinks.
            selected: the positions that an indexer of this forward has selected, over which alone the rows attend;
                None: they attend over all.
        """
        self.num_attended += 1
        layout = self.pool.layout
        place = layout.places.get(layer_idx, -1)
        if place < 0:
            raise UnsupportedModelError(
                f"layer {layer_idx} attends, but did not when the model was loaded; pages are laid out for layers "
                f"{', '.join(map(str, layout.places))}."
            )
        pages = self.pool.layers[place]
        num_heads, key_head_dim, value_head_dim = layout.shapes[place]
        self._check("queries", layer_idx, query, key_head_dim, query.shape[1] % num_heads == 0)
        if layout.sources[place] == place:
            self._check("keys", layer_idx, key, key_head_dim, key.shape[1] == num_heads)
            self._check("values", layer_idx, value, value_head_dim, value.shape[1] == num_heads)
            keys = self._real_rows_of(key)  # [T, num_kv_heads, head size]
            values = self._real_rows_of(value)
            invariant_call(self.ops.append_kv_, *pages, keys, values, self.batch.slot_mapping)
        batch = self._attention_batch
        if selected is not None:
            batch = self._attending(selected, layer_idx)
            # every position is a page of its own
            pages = (pages[0].flatten(0, 1)[:, None], pages[1].flatten(0, 1)[:, None])
        elif layer_idx in self.rules.indexed:
            raise UnsupportedModelError(
                f"layer {layer_idx} attends over positions that an indexer selects, but passes no indices to its "
                "attention function; a paged KV cache has no mask, so it must pass these positions."
            )
        out = invariant_call(self.ops.paged_attention, self._real_rows_of(query), pages, batch, params)
        return (pad(out, (0, 0, 0, 0, 0, self._padding)) if self._padding else out)[None]

    def _attending(self, selected: Tensor, layer_idx: int) -> PagedBatch:
        """Return the rows for attention over the selected positions."""
        batch = None if self._indexed_rows is None else self._indexed_rows.attending(selected)
        if batch is None:
            raise UnsupportedModelError(
                f"layer {layer_idx} attends over indices that no indexer of this forward has selected; expected those "
                "of one that takes the top-k of scores over the keys that it caches (update_indexer)."
            )
        return batch

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """Convolve rows over a sequence's last inputs; the contract is that of ``conv_rows_`` without its state.

        ``rows`` and the result are ``[T + padding, channels]``; padding rows get 0.
        """
        batch, (state,) = self._next_state("conv_rows_", (weight.shape[1] - 1, weight.shape[0]), rows.dtype)
        real = rows[: self._num_rows]
        return self._padded(invariant_call(self.ops.conv_rows_, real, state, weight, bias, activation, batch))

    def attend_linearly(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        params: LinearAttentionParams,
    ) -> Tensor:
        """Advance and read a state by linear attention; the contract is that of ``linear_attention_rows_``.

        The rows and the result have padding rows at their end; these get 0.
        """
        shape = (value.shape[1], key.shape[2], value.shape[2])
        batch, pools = self._next_state("linear_attention_rows_", shape)
        inputs = (None if each is None else each[: self._num_rows] for each in (query, key, value, log_decay, beta))
        return self._padded(invariant_call(self.ops.linear_attention_rows_, *inputs, pools, batch, params))

    def scan(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor | None) -> Tensor:
        """Advance and read a state by a selective scan; the contract is that of ``selective_scan_rows_``.

        The rows and the result have padding rows at their end; these get 0.
        """
        batch, pools = self._next_state("selective_scan_rows_", tuple(A.shape[::-1]))
        x, dt, B, C = (each[: self._num_rows] for each in (x, dt, B, C))
        return self._padded(invariant_call(self.ops.selective_scan_rows_, x, dt, A, B, C, skip, pools, batch))

    def _next_state(
        self, op: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> tuple[RecurrentBatch, tuple[Tensor, ...]]:
        """Return the rows' batch and the tensors of the next state, which must be the one that the call expects."""
        states = self.pool.layout.states
        call = self.num_advanced
        self.num_advanced += 1
        if call >= len(states) or (states[call].op, states[call].shape, states[call].dtype) != (op, shape, dtype):
            there = f"{states[call].op} of {list(states[call].shape)}" if call < len(states) else "no further call"
            raise UnsupportedModelError(
                f"recurrent call {call + 1} of a forward is {op} of a state {list(shape)} in {dtype}; when the model "
                f"was loaded it was {there}. Every forward must make the same calls."
            )
        assert self.batch.recurrent is not None
        assert self.pool.states is not None
        return self.batch.recurrent, self.pool.states.tensors[call]

    def _padded(self, out: Tensor) -> Tensor:
        """Add the padding rows to ``[T, ...]``."""
        return pad(out, (0, 0) * (out.dim() - 1) + (0, self._padding)) if self._padding else out

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
                f"laid out for [1, heads of {layout.shapes[layout.places[layer_idx]].num_kv_heads}, {num_rows}, "
                f"{head_dim}] in {layout.dtype}."
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
        """Whether each layer of pages has a sliding window."""
        return [layer in self.rules.sliding for layer in self.pool.layout.places]

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer of pages has linear attention: none has; recurrent layers have state slots."""
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
_answered = {*vars(PagedCache), *vars(NoStates)}
for _name in {*dir(Cache), "layers", "layer_class_to_replicate", "offloading"} - _answered:
    if not _name.startswith("_"):
        setattr(PagedCache, _name, _refuse(_name))
