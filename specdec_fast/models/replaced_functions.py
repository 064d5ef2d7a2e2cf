"""The functions that replace a Hugging Face model's attention function and experts during a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock, RLock
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specdec_fast.batch.ragged_batch import AttentionParams
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.kv_cache.hf_cache import PagedCache
from specdec_fast.models.experts import computed_by, mixture
from specdec_fast.models.kv_probe import KVProbe
from specdec_fast.ops.checks import stored

_ATTENTION = "specdec_paged"
_EXPERTS = "specdec_grouped"
# The cache of the current forward. Not every architecture passes unknown keyword arguments on to its attention, so the
# attention function finds its batch here.
active_cache: ContextVar[PagedCache | KVProbe] = ContextVar("active_cache")
# Locks by the identity of a config, which names the attention function of all models made with it.
_locks: WeakValueDictionary[int, Any] = WeakValueDictionary()
_locks_lock = Lock()


def lock_of(config: Any) -> Any:
    """Return the lock that a thread holds while it has replaced the attention function of ``config``."""
    with _locks_lock:
        return _locks.setdefault(id(config), RLock())


@contextmanager
def hooked(config: Any, expert_configs: list[Any], lock: Any) -> Iterator[None]:
    """Replace the functions that ``config`` and ``expert_configs`` name, for one thread at a time."""
    with lock:
        previous = config._attn_implementation
        config._attn_implementation = _ATTENTION
        try:
            with computed_by(_EXPERTS, expert_configs):
                yield
        finally:
            config._attn_implementation = previous


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Serve an attention call of ``transformers``: write its keys and values to pages and attend over these.

    No mask is needed: a model passes its sliding window, and the cache knows which layers attend within chunks.
    ``transformers`` passes attention sinks as ``s_aux``, and the positions that an indexer selects as ``indices``.
    """
    cache = active_cache.get()
    layer: Any = module.layer_idx
    if layer is None or layer < 0:  # layers share the module; the one that attends has just updated the cache
        layer = cache.updated_layer
    if sliding_window is None and layer in cache.rules.sliding:
        raise UnsupportedModelError(
            f"layer {layer} applies its sliding window by a mask alone; a paged KV cache has no mask, so it must pass "
            "sliding_window to its attention function."
        )
    chunk = cache.rules.chunks.get(layer)
    if sliding_window is not None and chunk is not None:
        raise UnsupportedModelError(
            f"layer {layer} passes sliding_window={sliding_window} to its attention function, and its config "
            f"says that it attends within chunks of {chunk} positions; expected one of them."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = kwargs.get("s_aux")
    params = AttentionParams(scale, sliding_window, softcap, None if sinks is None else stored(sinks), chunk)
    selected = kwargs.get("indices")
    if selected is not None and (sliding_window, chunk) != (None, None):
        raise UnsupportedModelError(
            f"layer {layer} passes indices and has sliding_window={sliding_window} or chunks of {chunk} positions; "
            "expected one of them."
        )
    return cache.attend(query, key, value, layer, params, selected), None


def _mix_experts(module: nn.Module, rows: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """Serve a call of a mixture of experts by ``transformers``; rows of padding get zeros."""
    cache = active_cache.get()
    num_real = cache.real_rows.get(len(rows), len(rows))
    out = mixture(cache.ops, module, rows[:num_real], expert_ids[:num_real], weights[:num_real])
    return out if num_real == len(rows) else pad(out, (0, 0, 0, len(rows) - num_real))


AttentionInterface.register(_ATTENTION, _attend)
ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _mix_experts)
