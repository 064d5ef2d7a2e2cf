"""Hugging Face models, called unmodified on ragged rows and a paged KV cache.

An attention function registered with ``transformers.AttentionInterface`` reads the pages, a ``Cache`` subclass writes
them, positions are passed explicitly, and logits are computed for the rows that need them only. There is no code for
any particular architecture.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.errors import SpecDecError, UnsupportedModelError
from specdec_fast.kv_cache.cache_rules import CacheRules
from specdec_fast.kv_cache.hf_cache import PagedCache
from specdec_fast.kv_cache.layer_layout import MOST_DRAFT_TOKENS
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.kv_cache.spread_cache import SpreadCache
from specdec_fast.model_arguments import cache_argument, takes_positions
from specdec_fast.models.experts import expert_configs
from specdec_fast.models.hidden_states import Taps
from specdec_fast.models.kv_probe import KVProbe
from specdec_fast.models.model_checks import (
    attention_chunks,
    indexed_layers,
    masks,
    sliding_layers,
    takes_length_of_each_row,
)
from specdec_fast.models.placement import computing_rows
from specdec_fast.models.probe import probe_of
from specdec_fast.models.recurrent_functions import own_cache, use_state_slots, why_own_recurrence
from specdec_fast.models.replaced_functions import active_cache, hooked, lock_of
from specdec_fast.models.replaced_linears import Linears
from specdec_fast.ops import Ops
from specdec_fast.ops.checks import stored
from specdec_fast.torch_threads import one_thread


class HFModel:
    """A Hugging Face model whose forwards PyTorch runs on ragged rows.

    Its attention function, experts and linears are replaced only during a forward, and by one thread at a time. Its
    recurrent functions are replaced for good, and compute from state slots only during a forward.
    ``token_ids`` ``[n]`` int64 are a short text with which the model is probed. Recurrent states have room for
    ``most_draft_tokens`` of a sequence. ``devices`` are those of its layers, if hooks move rows between several; the
    rows enter and the logits leave on that of ``token_ids``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ops: Ops,
        token_ids: Tensor,
        most_draft_tokens: int = MOST_DRAFT_TOKENS,
        devices: Sequence[torch.device] = (),
    ) -> None:
        self.model = model
        self._ops = ops
        self.config = model.config.get_text_config(decoder=True)
        self.linears = Linears(model, ops)
        self._expert_configs = expert_configs(model)
        self.has_experts = bool(self._expert_configs)
        self._lock = lock_of(self.config)
        self.taps: Taps | None = None  # where its hidden states are read; None before ``use_taps``
        self._attached_by: int | None = None  # id of the thread inside `attached`
        self._cache_argument = cache_argument(model)
        self._has_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._takes_positions = takes_positions(model)
        self._masks = masks(self.config, token_ids.device)
        self._output_layer: Any = None  # which receives the rows whose logits are wanted, if layers are spread
        if is_spread := len(devices) > 1:
            self._output_layer = model.get_output_embeddings()
            self._has_logits_to_keep = self._output_layer is not None
        self._on_cpu = "cpu" in {device.type for device in (token_ids.device, *devices)}
        use_state_slots(model)
        self.cache_class = own_cache(SpreadCache if is_spread else PagedCache, model)
        probe = own_cache(KVProbe, model)(ops)
        self._probe(probe, token_ids)
        # shapes and dtype of the KV entries of one position, and of the states of a sequence
        layout = probe.layout(type(model).__name__, model.dtype, token_ids.device)
        self.layout = replace(layout, most_draft_tokens=most_draft_tokens)
        # of the decoder, whatever they compute
        self.num_layers = self.config.num_hidden_layers if self.layout.states else self.layout.num_layers
        self.rules = CacheRules(
            sliding_layers(self.config, self.num_layers),
            attention_chunks(self.config, self.num_layers),
            indexed_layers(self.config) | set(layout.indexers),
        )
        self._asks_for_length = probe.asks_for_length

    def _probe(self, probe: KVProbe, token_ids: Tensor) -> None:
        """Record what the layers keep; a recurrence that no function of ours computes is refused with that reason."""
        failure: Exception | None = None
        try:
            with torch.inference_mode(), self.hooked():
                self.call(token_ids[None], torch.arange(len(token_ids), device=token_ids.device)[None], probe, None)
        except SpecDecError:
            raise
        except Exception as error:
            failure = error
        has_come_to_it = failure is None or probe.asked_for_state
        if has_come_to_it and not probe.states and (reason := why_own_recurrence(self.config)):
            raise UnsupportedModelError(f"{type(self.model).__name__} {reason}.") from failure
        if failure is not None:
            raise failure

    def find_answers(self, page_size: int) -> None:
        """Find whether its cache must return a length for each row; ``page_size`` is that of its pages."""
        if self._asks_for_length:
            with self.hooked():
                each_row = takes_length_of_each_row(self.call, self.layout, self.make_cache, page_size)
            self.rules = replace(self.rules, answers_each_row=each_row)

    def use_taps(self, ids: tuple[int | str, ...]) -> None:
        """Find where the taps ``ids`` are read, or raise UnsupportedModelError; () forgets them."""
        probe = probe_of(self.config.vocab_size, self.layout.device)
        with self._lock:
            self.taps = Taps(self.model, ids, self.num_layers, lambda: self.dense_logits(probe)) if ids else None

    def dense_hidden_states(self, token_ids: Tensor) -> Tensor:
        """Run the model on one sequence of ``n`` tokens as ``dense_logits`` does; return its taps ``[n, taps, H]``."""
        assert self.taps is not None, "use_taps has not been called"
        hidden_states = self.taps.empty(len(token_ids), self.layout.device)
        with self._lock, self.taps.written(hidden_states):
            self.dense_logits(token_ids)
        return hidden_states

    @torch.inference_mode()
    def dense_logits(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Run the unmodified model on ``[n]`` int64 ids of one sequence; return its logits ``[n, vocab_size]``.

        ``positions`` are ``[n]`` int64; None: the model counts itself.
        """
        # A recurrent layer and an indexer find their place in a cache by the config; without a cache they compute the
        # same.
        given: dict[str, Any] = {"use_cache": False}
        if not (self.layout.states or self.layout.indexers):
            given = {"use_cache": True, self._cache_argument: DynamicCache()}
        if positions is not None and self._takes_positions:
            given["position_ids"] = positions[None]
        with self._lock:
            return self.model(input_ids=token_ids[None], **given).logits[0]

    def forward(
        self,
        batch: RaggedBatch,
        pool: PagePool,
        logit_rows: Tensor | None = None,
        hidden_states: Tensor | None = None,
    ) -> Tensor:
        """Compute the batch's rows, operation by operation; see ``RaggedModel.forward``."""
        if pool.row_padding.one_by_one:
            rows = batch.one_by_one()
            taps = [None] * len(rows) if hidden_states is None else hidden_states.split(1)
            logits = torch.cat([self._run_attached(*each, pool, None) for each in zip(rows, taps, strict=True)])
            return logits if logit_rows is None else logits[logit_rows]
        return self._run_attached(batch, hidden_states, pool, logit_rows)

    def _run_attached(
        self, batch: RaggedBatch, hidden_states: Tensor | None, pool: PagePool, logit_rows: Tensor | None
    ) -> Tensor:
        # A step is already in inference mode, a drafting loop is already attached; entering each costs microseconds.
        if torch.is_inference_mode_enabled() and self._attached_by == get_ident():
            with self._written(hidden_states):
                return self._forward(batch, pool, logit_rows)
        with torch.inference_mode(), self.attached(), self._written(hidden_states):
            return self._forward(batch, pool, logit_rows)

    def _written(self, hidden_states: Tensor | None) -> AbstractContextManager[None]:
        """Write the taps of a forward into ``hidden_states``; None writes none."""
        if hidden_states is None:
            return nullcontext()
        assert self.taps is not None, "use_taps has not been called"
        return self.taps.written(hidden_states)

    def _forward(self, batch: RaggedBatch, pool: PagePool, logit_rows: Tensor | None) -> Tensor:
        token_ids = batch.token_ids
        positions = batch.positions
        wanted = logit_rows
        row_padding = pool.row_padding
        num_rows = len(token_ids)
        num_wanted = len(token_ids) if wanted is None else len(wanted)
        cache = self.make_cache(pool, batch, num_wanted)
        if missing := row_padding.padding(num_rows):  # padding rows: token 0 at position 0, which every model has
            token_ids = pad(token_ids, (0, missing))
            positions = pad(positions, (0, missing))
        if wanted is not None and (missing := row_padding.padding(num_wanted)):
            wanted = pad(wanted, (0, missing))
        self.linears.real_rows = cache.real_rows if row_padding.multiple > 1 else None
        with one_thread() if row_padding.multiple > 1 and self._on_cpu else nullcontext():
            logits = self.call(token_ids[None], positions[None], cache, wanted)[0]
        if cache.num_advanced != len(self.layout.states):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} called {cache.num_advanced} recurrent functions in a forward, and "
                f"{len(self.layout.states)} in another; every forward must make the same calls."
            )
        if cache.num_attended != self.layout.num_layers:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} attended {cache.num_attended} times in a forward, and "
                f"{self.layout.num_layers} times in another; every layer must attend through transformers' "
                "AttentionInterface once per forward."
            )
        if logit_rows is None:
            return logits[:num_rows]
        return logits[:num_wanted] if self._has_logits_to_keep else logits[logit_rows]

    def make_cache(self, pool: PagePool, batch: RaggedBatch, num_logit_rows: int | None = None) -> PagedCache:
        """Return the model's KV cache for one forward."""
        return self.cache_class(pool, batch, self._ops, self.rules, num_logit_rows)

    def call(
        self, token_ids: Tensor, positions: Tensor, cache: PagedCache | KVProbe, logit_rows: Tensor | None
    ) -> Tensor:
        """Call the Hugging Face model: ``[1, T]`` ids and positions to logits ``[1, R, vocab_size]``."""
        given: dict[str, Any] = {self._cache_argument: cache}
        if logit_rows is not None and self._has_logits_to_keep and self._output_layer is None:
            given["logits_to_keep"] = logit_rows
        if self._takes_positions:
            given["position_ids"] = positions
        if self._masks is not None:
            given["attention_mask"] = self._masks
        token = active_cache.set(cache)
        try:
            if self._output_layer is None or logit_rows is None:
                output = self.model(input_ids=token_ids, use_cache=True, **given)
            else:
                with computing_rows(self._output_layer, logit_rows):
                    output = self.model(input_ids=token_ids, use_cache=True, **given)
            return stored(output.logits)
        finally:
            active_cache.reset(token)

    def hooked(self) -> AbstractContextManager[None]:
        """Replace the model's attention function, and the function of its experts, for a ``with`` block."""
        return hooked(self.config, self._expert_configs, self._lock)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Replace the linears as well. A forward does so by itself, unless its caller has done it.

        Around several forwards it saves 20 microseconds per forward. It must not last longer, because drafters and
        callbacks may run the caller's model between steps.
        """
        with self.hooked(), self.linears.attached():
            before = self._attached_by
            self._attached_by = get_ident()
            try:
                yield
            finally:
                self._attached_by = before
