"""The recurrent functions of transformers, replaced by ops that read and write state slots.

The layers of transformers call recurrences as functions of their module (``causal_conv1d_fn``, for example). In each
module of a served model, these names are set, once and for all, to functions that compute from the state slots during a
forward of this library, and call the function of transformers at any other time. So no lock is needed, and the model
computes for its owner as before.

The cache answers a layer that it has no state (``kv_cache/hf_cache.py``), so a layer calls the functions for many
tokens, whatever the number of rows, with no state as their argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers import Cache
from transformers.activations import ACT2FN

from specdec_fast.batch.recurrent_batch import LinearAttentionParams
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.models.replaced_functions import active_cache
from specdec_fast.ops.conv_rows import ACTIVATIONS

RECURRENT_LAYER_TYPES = frozenset(("linear_attention", "conv", "hybrid", "hybrid_sliding"))
CacheT = TypeVar("CacheT", bound=Cache)
_SAME_ACTIVATIONS: dict[str | None, str] = {"swish": "silu"}  # two names of one function in transformers
_L2NORM_EPS = 1e-6  # of the queries and keys of delta rules, in transformers
# Functions for a single token, which a layer calls if the cache has a state for it.
_OF_ONE_TOKEN = (
    "causal_conv1d_update",
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update",
    "mamba_selective_state_update",
)


def use_state_slots(model: nn.Module) -> None:
    """Let the recurrent functions of a model's modules compute from state slots, during forwards of this library."""
    modules = _modules_of(model)
    for kind in {type(module) for module in model.modules()}:
        if kind.__name__ in _FORWARDS:
            _replace(kind, "forward", _FORWARDS[kind.__name__])
    for module in modules:
        for name, ours in _FUNCTIONS.items():
            _replace(module, name, ours)
        for name in _OF_ONE_TOKEN:
            _replace(module, name, _refusing(name))


def why_own_recurrence(config: Any) -> str:
    """Return why a model that called no recurrent function is refused; empty if its config names no such layers."""
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) & RECURRENT_LAYER_TYPES)
    if not kinds:
        return ""
    return (
        f"has layers of type {', '.join(kinds)}, but a recurrence of its own: it calls none of "
        f"{', '.join(_FUNCTIONS)}, which state slots serve"
    )


def own_cache(kind: type[CacheT], model: nn.Module) -> type[CacheT]:
    """Return a cache class that is also a model's own cache class, which its forward may demand (MiniMax)."""
    own = [
        value
        for module in _modules_of(model)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Cache) and value.__module__ == module.__name__
    ]
    most_derived = [each for each in own if not any(each in other.__mro__[1:] for other in own)]
    return type(kind.__name__, (kind, *most_derived), {}) if own else kind


def _modules_of(model: nn.Module) -> list[ModuleType]:
    """Return the Python modules that define the classes of a model's parts."""
    names = {type(part).__module__ for part in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def _replace(module: ModuleType | type, name: str, ours: Callable[..., Any]) -> None:
    theirs = getattr(module, name, None)
    if theirs is None or getattr(theirs, "is_specdec_fast", False):
        return

    @wraps(theirs)
    def function(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or active_cache.get(None) is None:
            return theirs(*args, **kwargs)
        return ours(*args, **kwargs)

    function.is_specdec_fast = True  # type: ignore[attr-defined]
    setattr(module, name, function)


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModelError(
            f"the model calls {name}, which computes one token from a state of its own; only functions that compute "
            f"any number of tokens are served: {', '.join(_FUNCTIONS)}."
        )

    return refuse


def _convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor:
    """Compute ``causal_conv1d_fn``: ``[1, channels, T]`` to the same shape."""
    rows = hidden_states[0].transpose(0, 1).to(weight.dtype)
    own = _SAME_ACTIVATIONS.get(activation, activation)
    is_of_op = own in ACTIVATIONS
    out = active_cache.get().convolve(rows, weight.contiguous(), bias, own if is_of_op else None)
    if activation is not None and not is_of_op:  # checkpoints have SiLU, but a config may name any other
        out = ACT2FN[activation](out)
    return out.transpose(0, 1)[None].to(hidden_states.dtype)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute a gated delta rule: ``[1, T, heads, head size]`` each, ``g`` per head or per key channel."""
    params = LinearAttentionParams(
        scale=query.shape[-1] ** -0.5, l2norm_eps=_L2NORM_EPS if use_qk_l2norm_in_kernel else None
    )
    rows = (query[0], key[0], value[0], g[0].float(), beta[0].float())
    return active_cache.get().attend_linearly(*rows, params)[None], _no_state(value)


def _mamba2_scan(  # noqa: PLR0913, PLR0917  # the arguments of transformers
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    """Compute the scan of Mamba-2 (arXiv 2405.21060) as linear attention: B are its keys, C its queries.

    ``hidden_states`` ``[1, T, heads, head size]``, ``dt`` ``[1, T, heads]``, ``A`` ``[heads]``, ``B`` and ``C``
    ``[1, T, groups, state size]``.
    """
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = softplus(dt)
    steps = torch.clamp(dt, *dt_limit)[0].float()
    params = LinearAttentionParams(delta_rule=False, skip=None if D is None else D.float().contiguous())
    # in fp32, as transformers: the norm that follows reads the result without rounding
    rows = (C[0].float(), B[0].float(), hidden_states[0].float())
    out = active_cache.get().attend_linearly(*rows, steps * A.float(), steps, params)[None]
    return (out, _no_state(out)) if return_final_states else out


def _selective_scan(  # noqa: PLR0913, PLR0917  # the arguments of transformers
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Any:
    """Compute the scan of Mamba (arXiv 2312.00752).

    ``hidden_states``, ``dt`` and ``z`` are ``[1, channels, T]``, ``A`` is ``[channels, N]``, ``B`` and ``C`` are
    ``[1, N, T]``.
    """
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = softplus(dt)
    # in fp32, as transformers: what follows reads the result without rounding
    x, steps, keys, queries = (each[0].transpose(0, 1).float() for each in (hidden_states, dt, B, C))
    skip = None if D is None else D.float().contiguous()
    out = active_cache.get().scan(x, steps, A.float(), keys[:, None], queries[:, None], skip).transpose(0, 1)[None]
    if z is not None:
        out = out * silu(z)
    return (out, _no_state(out)) if return_last_state else out


def _lightning_attention(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the lightning attention of MiniMax (arXiv 2501.08313), whose forward has its recurrence inline.

    ``hidden_states`` and the result are ``[1, T, H]``.
    """
    rows = module.act_fn(module.qkv_proj(hidden_states))[0].unflatten(1, (module.num_attention_heads, -1))
    log_decay = -module.slope_rate.float().view(1, -1).expand(len(rows), -1)
    params = LinearAttentionParams(delta_rule=False)
    query, key, value = rows.split(module.head_dim, dim=2)
    out = active_cache.get().attend_linearly(query, key, value, log_decay, None, params)
    out = module.norm(out.flatten(1)[None])
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * out), None


def _no_state(like: Tensor) -> Tensor:
    """Return what stands for the final state, which the layer passes to the cache: that keeps none of it."""
    return torch.zeros(1, 1, device=like.device)  # Zamba joins those of its heads along the second axis


_FORWARDS: dict[str, Callable[..., Any]] = {"MiniMaxLightningAttention": _lightning_attention}  # by class
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba_selective_scan": _selective_scan,
}
