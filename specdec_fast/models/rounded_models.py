"""Models whose weights are rounded when they are loaded: which linears and experts, and what replaces them."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdec_fast.errors import ConfigError
from specdec_fast.model_watch import replaced_forward
from specdec_fast.models.experts import entry_name, mixtures_of, use_own_function
from specdec_fast.models.quantized_linears import PackedExperts, QuantizedLinear, quantized_linears
from specdec_fast.models.replaced_functions import lock_of
from specdec_fast.quantization.packed_weight import PackedWeight, stacked
from specdec_fast.quantization.rounding import ROUNDINGS, Rounding, rounded

_OUTPUT_LAYER = {4: 8}  # bits of the output layer, where it has more than the other linears


def linears_to_round(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    """Return by name the modules whose weights ``quantization`` rounds.

    These are plain ``nn.Linear`` and ``Conv1D`` without hooks that the model calls; it may read the weight of another
    one itself, as Mamba does that of ``dt_proj``. A hook may read the weight too, and belongs to the module.
    """
    linears = {
        name: module
        for name, module in model.named_modules()
        if (type(module).forward is nn.Linear.forward or type(module) is Conv1D)
        and replaced_forward(module) is None
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and type(module.weight) is nn.Parameter
        and module.weight.is_floating_point()
    }
    watch = _ReadWeights({id(module.weight) for module in linears.values()})
    token_ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    # What it cannot compute, the engine refuses with a reason.
    with _as_loaded(model), suppress(Exception), torch.inference_mode(), watch:
        model(input_ids=token_ids, use_cache=False)
    return {name: module for name, module in linears.items() if id(module.weight) not in watch.read}


def _as_loaded(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Wait until no engine in another thread has replaced functions of the model, and keep them from it."""
    lock: AbstractContextManager[Any] = lock_of(model.config.get_text_config(decoder=True))
    return lock


# What may be asked of a weight that is quantised: products, rows if the embeddings are tied to it, and its properties.
_KNOWN = (
    functional.linear,
    torch.addmm,
    functional.embedding,
    *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "ndim")),
)


class _ReadWeights(TorchFunctionMode):
    """Notes the ids of weights that no linear reads; a mode applies to one thread alone."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self._weights = weights
        self.read: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _KNOWN:
            given = tree_leaves((args, kwargs))  # torch.cat takes a list of tensors
            self.read |= {id(each) for each in given if isinstance(each, Tensor)} & self._weights
        return func(*args, **(kwargs or {}))


def round_weights(model: PreTrainedModel, quantization: str) -> None:
    """Replace a model's linears and experts by rounded ones, one after the other; embeddings and norms stay.

    ``quantization`` is a name in ``ROUNDINGS``. The output layer has 8 bits, also if the others have 4. A model whose
    linears are quantised already stays as it is. Raises ConfigError if a weight has numbers that cannot be rounded, or
    there is no linear.
    """
    if quantized_linears(model):
        return
    linears = linears_to_round(model)
    if not linears:
        raise ConfigError(
            f"quantization={quantization!r}, but {type(model).__name__} has no linear layers that can be rounded "
            "(plain torch.nn.Linear with weights of a floating dtype); leave it out."
        )
    for name, module in linears.items():
        weight = _rounded(name, _matrix_of(module), _rounding_of(model, module, quantization))
        replacement = QuantizedLinear(weight, module.bias, module.weight.dtype).train(module.training)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, replacement)
    for name, experts in mixtures_of(model).items():
        for attribute in (entry_name(experts), "down_proj"):
            weights = _matrices_of(experts, attribute)
            each = [_rounded(f"{name}.{attribute}", weight, ROUNDINGS[quantization]) for weight in weights]
            delattr(experts, attribute)
            setattr(experts, attribute, PackedExperts(stacked(each), weights.dtype))
        use_own_function(experts)


def rounded_copy(model: PreTrainedModel, quantization: str) -> PreTrainedModel:
    """Return a copy of a model with weights rounded as by ``round_weights``, which shares all other tensors with it."""
    if quantized_linears(model):
        return model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    with _as_loaded(model):
        own = copy.deepcopy(model, shared)
    round_weights(own, quantization)
    return own


def tensors_after_rounding(model: PreTrainedModel, quantization: str) -> tuple[list[Tensor], int]:
    """Return the parameters and buffers that rounding leaves as they are, and the bytes of the rounded weights."""
    linears = linears_to_round(model)
    sizes = [
        _rounding_of(model, module, quantization).bytes_of(*_matrix_of(module).shape) for module in linears.values()
    ]
    experts = mixtures_of(model).values()
    weights = {(each, name): _matrices_of(each, name) for each in experts for name in (entry_name(each), "down_proj")}
    for each in weights.values():
        num_experts, out_features, in_features = each.shape
        sizes.append(ROUNDINGS[quantization].bytes_of(out_features, in_features, num_experts))
    replaced = {(module, "weight") for module in linears.values()} | set(weights)
    kept = [
        tensor
        for module in model.modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and (module, name) not in replaced
    ]
    return kept, sum(sizes)


def _matrix_of(module: nn.Linear | Conv1D) -> Tensor:
    """Return the weight as ``[out_features, in_features]``."""
    weight: Tensor = module.weight.detach()
    return weight.t() if isinstance(module, Conv1D) else weight


def _matrices_of(experts: Any, name: str) -> Tensor:
    """Return the weights of all experts as ``[num_experts, out_features, in_features]``."""
    weights: Tensor = getattr(experts, name).detach()
    return weights.mT if experts.is_transposed else weights


def _rounding_of(model: PreTrainedModel, module: nn.Module, quantization: str) -> Rounding:
    rounding = ROUNDINGS[quantization]
    is_output_layer = module is model.get_output_embeddings()
    return replace(rounding, bits=_OUTPUT_LAYER.get(rounding.bits, rounding.bits)) if is_output_layer else rounding


def _rounded(name: str, weight: Tensor, rounding: Rounding) -> PackedWeight:
    try:
        return rounded(weight, rounding)
    except ValueError as error:
        raise ConfigError(f"{name}.weight cannot be quantised: {error}") from error
