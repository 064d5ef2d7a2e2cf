"""Models whose weights are rounded when they are loaded: which linears and experts, and what replaces them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdec_fast.errors import ConfigError
from specdec_fast.model_watch import has_hooks, replaced_forward
from specdec_fast.models.experts import computed_by, entry_name, expert_configs, mixtures_of, use_own_function
from specdec_fast.models.quantized_linears import (
    PackedExperts,
    PackedModule,
    QuantizedLinear,
    how_quantised,
    refuse_saving,
)
from specdec_fast.models.replaced_functions import lock_of
from specdec_fast.quantization.packed_weight import PackedWeight, stacked
from specdec_fast.quantization.rounding import A8, ROUNDINGS, Rounding, rounded

NARROW = 32  # inputs for each output, from which on a linear stays as it is: it has 1/32 of a square one's weights
_OUTPUT_LAYER = {4: 8}  # bits of the output layer, where it has more than the other linears


@dataclass(frozen=True, eq=False)
class WeightToRound:
    """A parameter that becomes codes: the weight of a linear, or one of those of all experts of a layer.

    Attributes:
        name: of the parameter in the model.
        module: the linear, or the module that holds the experts.
        attribute: the parameter's name in it.
        rounding: how it is rounded.
    """

    name: str
    module: Any
    attribute: str
    rounding: Rounding

    @property
    def parameter(self) -> Tensor:
        """The parameter."""
        weight: Tensor = getattr(self.module, self.attribute)
        return weight.detach()

    @property
    def is_of_experts(self) -> bool:
        """Whether the parameter has an axis of experts."""
        return not isinstance(self.module, nn.Linear | Conv1D)

    def bytes_of(self, part: Tensor) -> int:
        """Return the bytes that a part of the parameter has when it is rounded."""
        *experts, out_features, in_features = self._by_output(part).shape
        return self.rounding.bytes_of(out_features, in_features, *experts)

    def rounded(self, weight: Tensor) -> PackedWeight:
        """Round what the parameter holds, or will hold. Raises ConfigError for numbers that cannot be rounded."""
        matrices = self._by_output(weight)
        try:
            if self.is_of_experts:
                return stacked([rounded(each, self.rounding) for each in matrices])
            return rounded(matrices, self.rounding)
        except ValueError as error:
            raise ConfigError(f"{self.name} cannot be quantised: {error}") from error

    def _by_output(self, weight: Tensor) -> Tensor:
        """Return ``[out_features, in_features]``, of experts ``[num_experts, out_features, in_features]``."""
        is_transposed = self.module.is_transposed if self.is_of_experts else isinstance(self.module, Conv1D)
        return weight.mT if is_transposed else weight


def weights_to_round(model: PreTrainedModel, quantization: str, must_run: bool = False) -> list[WeightToRound]:
    """Return the weights that ``quantization``, a name in ``ROUNDINGS``, rounds.

    The output layer has 8 bits, also if the others have 4. Those of ``linears_to_keep`` are not among them.
    ``must_run`` is that of ``linears_to_round``.
    """
    linears = linears_to_round(model, must_run)
    kept = linears_to_keep(model, linears)
    found = [
        WeightToRound(f"{name}.weight", module, "weight", _rounding_of(model, module, quantization))
        for name, module in linears.items()
        if name not in kept
    ]
    for name, module in mixtures_of(model).items():
        for attribute in (entry_name(module), "down_proj"):
            found.append(WeightToRound(f"{name}.{attribute}", module, attribute, ROUNDINGS[quantization]))
    return found


def _rounding_of(model: PreTrainedModel, module: nn.Module, quantization: str) -> Rounding:
    rounding = ROUNDINGS[quantization]
    if module is not model.get_output_embeddings():
        return rounding
    return replace(rounding, bits=_OUTPUT_LAYER.get(rounding.bits, rounding.bits))


def linears_to_keep(model: PreTrainedModel, linears: Mapping[str, nn.Linear | Conv1D]) -> set[str]:
    """Return which linears stay as they are, because rounding them saves next to nothing and may cost much.

    These are routers, whose outputs choose experts: beside the experts of a layer, or in a module beside them, linears
    with an output for each expert. And narrow linears, with an output for 32 inputs or fewer outputs, which a model
    makes gates of, such as that of a shared expert.
    """
    numbers = {
        name.rpartition(".")[0]: len(getattr(module, entry_name(module))) for name, module in mixtures_of(model).items()
    }
    found = set()
    for name, module in linears.items():
        num_outputs = module.bias.shape[0] if isinstance(module, Conv1D) else module.out_features
        owners = accumulate(name.split(".")[:-1], "{}.{}".format)
        is_router = any(numbers.get(owner) == num_outputs for owner in owners)
        if is_router or num_outputs * NARROW <= module.weight.numel() // num_outputs:
            found.add(name)
    return found


def linears_to_round(model: PreTrainedModel, must_run: bool = False) -> dict[str, nn.Linear | Conv1D]:
    """Return by name the modules whose weights ``quantization`` rounds.

    These are plain ``nn.Linear`` and ``Conv1D`` without hooks that the model calls; it may read the weight of another
    one itself, as Mamba does that of ``dt_proj``. A hook may read the weight too, and belongs to the module. The model
    may be on the meta device. If it cannot compute two tokens, its error is raised with ``must_run``; else only what it
    read until then counts.
    """
    linears = {
        name: module
        for name, module in model.named_modules()
        if (type(module).forward is nn.Linear.forward or type(module) is Conv1D)
        and replaced_forward(module) is None
        and not has_hooks(module)
        and type(module.weight) is nn.Parameter
        and module.weight.is_floating_point()
    }
    watch = _ReadWeights({id(module.weight) for module in linears.values()})
    token_ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    computed = computed_by("batched_mm", expert_configs(model))  # the only one that runs on the meta device
    failures = () if must_run else (Exception,)
    with _as_loaded(model), suppress(*failures), torch.inference_mode(), computed, watch:
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

_ON_META: dict[Any, Callable[..., Any]] = {
    Tensor.__bool__: lambda tensor: False,
    functional.scaled_dot_product_attention: lambda query, key, value, *options: query.new_empty(
        *query.shape[:-1], value.shape[-1]
    ),
}


class _ReadWeights(TorchFunctionMode):
    """Notes the ids of weights that no linear reads; a mode applies to one thread alone.

    On the meta device, conditions on numbers are false, and attention has values of any width.
    """

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
        if args and isinstance(args[0], Tensor) and func in _ON_META and args[0].is_meta:
            return _ON_META[func](*args)
        return func(*args, **(kwargs or {}))


def expect_unquantised(model: PreTrainedModel, setting: str, quantization: str) -> None:
    """Raise ConfigError, which names the setting that asks for rounded weights, if a model's are quantised already."""
    if (how := how_quantised(model)) is not None:
        raise quantised_already(type(model).__name__, how, setting, quantization)


def round_rows(model: PreTrainedModel, setting: str) -> None:
    """Let rows be rounded that are multiplied with the codes of a model. Raises as ``expect_whole_codes``."""
    for module in expect_whole_codes(model, setting):
        module.round_rows()


def expect_whole_codes(model: PreTrainedModel, setting: str) -> list[PackedModule]:
    """Return the modules of a model that hold codes, for which rows can be rounded.

    Raises ConfigError, which names the setting, if there are none, or codes stand for other values than whole numbers.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}
    if not modules:
        raise ConfigError(
            f"{setting}={A8!r} rounds rows that are multiplied with codes of a checkpoint or a GGUF file, and "
            f"{type(model).__name__} has none that are read here; pass 'int8-a8' or 'int4-a8', which round weights too."
        )
    for name, module in modules.items():
        try:
            module.expect_whole_codes()
        except ValueError as error:
            raise ConfigError(f"{setting}={A8!r} does not serve {name}: {error}; leave it out.") from error
    return list(modules.values())


def quantised_already(name: str, how: str, setting: str, quantization: str) -> ConfigError:
    """Return the error of a model whose weights are asked to be rounded, and are quantised already as ``how`` says."""
    return ConfigError(
        f"{setting}={quantization!r} rounds weights, and those of {name} are quantised already ({how}); leave it out, "
        "or pass a model in bf16, fp16 or fp32."
    )


def round_weights(model: PreTrainedModel, quantization: str) -> None:
    """Replace a model's linears and experts by rounded ones, one after the other; embeddings and norms stay.

    ``quantization`` is a name in ``ROUNDINGS``. Raises ConfigError if a weight has numbers that cannot be rounded,
    there is no linear, or weights are quantised already.
    """
    expect_unquantised(model, "quantization", quantization)
    replace_weights(model, quantization, weights_to_round(model, quantization), {})


def replace_weights(
    model: PreTrainedModel, quantization: str, weights: list[WeightToRound], done: dict[str, PackedWeight]
) -> None:
    """Replace linears and experts by rounded ones; ``done`` has by name what is rounded already, and loses it.

    ``weights`` becomes empty, so that nothing keeps a linear that has been replaced.
    Raises ConfigError if a weight has numbers that cannot be rounded, or there is no linear.
    """
    if all(each.is_of_experts for each in weights):
        raise ConfigError(
            f"quantization={quantization!r}, but {type(model).__name__} has no linear layers that can be rounded "
            "(plain torch.nn.Linear with weights of a floating dtype); leave it out."
        )
    waiting = weights[::-1]
    weights.clear()
    while waiting:
        each = waiting.pop()
        packed = done.pop(each.name) if each.name in done else each.rounded(each.parameter)
        dtype = each.parameter.dtype
        if each.is_of_experts:
            delattr(each.module, each.attribute)
            setattr(each.module, each.attribute, PackedExperts(packed, dtype))
            use_own_function(each.module)
        else:
            replacement = QuantizedLinear(packed, each.module.bias, dtype).train(each.module.training)
            model.set_submodule(each.name.removesuffix(".weight"), replacement)


def rounded_copy(model: PreTrainedModel, quantization: str, setting: str = "quantization") -> PreTrainedModel:
    """Return a copy of a model with weights rounded as by ``round_weights``, which shares all other tensors with it.

    With ``"a8"`` it shares all tensors, and rows are rounded. Raises ConfigError as ``round_weights`` and
    ``round_rows``; ``setting`` is the name of the setting in errors.
    """
    if quantization != A8:
        expect_unquantised(model, setting, quantization)
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    with _as_loaded(model):
        own = copy.deepcopy(model, shared)
    if quantization == A8:
        round_rows(own, setting)
    else:
        round_weights(own, quantization)
    return refuse_saving(own)


class RoundedWeights:
    """The weights of a model that a copy of ``rounded_copy`` holds as codes, to round them again when they change."""

    def __init__(self, model: PreTrainedModel, rounded: PreTrainedModel, quantization: str) -> None:
        self._codes: list[tuple[WeightToRound, PackedModule]] = []
        for name, packed in rounded.named_modules():
            if isinstance(packed, PackedExperts):
                owner, _, attribute = name.rpartition(".")
                weight = WeightToRound(name, model.get_submodule(owner), attribute, ROUNDINGS[quantization])
            elif isinstance(packed, QuantizedLinear):
                linear = model.get_submodule(name)
                weight = WeightToRound(f"{name}.weight", linear, "weight", _rounding_of(model, linear, quantization))
            else:
                continue
            self._codes.append((weight, packed))

    @property
    def sources(self) -> list[Tensor]:
        """The model's present parameters."""
        return [weight.parameter for weight, _ in self._codes]

    @torch.inference_mode()
    def round_again(self) -> None:
        """Write the codes of the model's present weights to where a program or a graph reads those of the copy.

        Raises ConfigError if a weight has numbers that cannot be rounded; some codes may be new then.
        """
        for weight, module in self._codes:
            present = weight.rounded(weight.parameter)
            for held, new in zip(module.packed.tensors, present.tensors, strict=True):
                held.copy_(new)


def tensors_after_rounding(
    model: PreTrainedModel, quantization: str, part_of: Callable[[Tensor], Tensor] | None = None
) -> tuple[list[Tensor], int]:
    """Return the parameters and buffers that rounding leaves as they are, and the bytes of the rounded weights.

    ``part_of`` returns the part of a parameter that is rounded, on the meta device; None: all of it. Raises ConfigError
    if weights are quantised already.
    """
    expect_unquantised(model, "quantization", quantization)
    weights = weights_to_round(model, quantization)
    replaced = {(each.module, each.attribute) for each in weights}
    kept = [
        tensor
        for module in model.modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and (module, name) not in replaced
    ]
    parameters = [(each, getattr(each.module, each.attribute)) for each in weights]  # as the model has them, by id
    rounded_bytes = sum(each.bytes_of(whole if part_of is None else part_of(whole)) for each, whole in parameters)
    return kept, rounded_bytes
