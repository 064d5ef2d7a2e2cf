"""Modules of a model whose weights are quantised, and the replacement of a model's linears by them.

A module calls ``torch.ops.specdec_fast.quantized_linear``, an operation of PyTorch's dispatcher: recordings see it, as
they see ``linear``. While PyTorch runs an engine's forward, ``replaced_linears.py`` calls the engine's own op instead.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdec_fast.errors import ConfigError
from specdec_fast.model_watch import replaced_forward
from specdec_fast.ops import resolve
from specdec_fast.quantization.packed_weight import PackedWeight, dequantized
from specdec_fast.quantization.rounding import ROUNDINGS, Rounding, rounded

_OUTPUT_LAYER = {4: 8}  # bits of the output layer, where it has more than the other linears


_exact_rows: ContextVar[bool] = ContextVar("exact_rows", default=False)


@contextmanager
def exact_rows() -> Iterator[None]:
    """Let no quantised linear that this thread calls round its rows."""
    token = _exact_rows.set(True)
    try:
        yield
    finally:
        _exact_rows.reset(token)


class QuantizedLinear(nn.Module):
    """``nn.Linear`` with a :class:`PackedWeight`.

    Attributes:
        codes, scales, mins, table: the tensors of the packed weight, as buffers.
        bias: ``[out_features]``, or None.
        dtype: of the rows that the model passes; what ``weight.dtype`` says.
    """

    codes: Tensor
    scales: Tensor
    mins: Tensor | None
    table: Tensor | None

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype or weight.scales.dtype
        self.in_features = weight.in_features
        self.out_features = weight.out_features
        self.group_size = weight.group_size
        self.kind = weight.kind
        self.rounds_rows = weight.rounds_rows
        for name in ("codes", "scales", "mins", "table"):
            self.register_buffer(name, getattr(weight, name))
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """Dtype, shape and device of the weight, for models that ask; its numbers, which nothing may read, are NaN."""
        nothing = torch.full((), torch.nan, dtype=self.dtype, device=self.codes.device)
        return nothing.expand(self.out_features, self.in_features)

    @property
    def packed(self) -> PackedWeight:
        """The weight; its tensors are the module's."""
        return PackedWeight(
            self.codes, self.scales, self.mins, self.table,
            self.in_features, self.out_features, self.group_size, self.kind, self.rounds_rows,
        )  # fmt: skip

    def forward(self, rows: Tensor) -> Tensor:
        """Multiply ``[..., in_features]``: ``[..., out_features]`` in the dtype of ``rows``."""
        result: Tensor = torch.ops.specdec_fast.quantized_linear(
            rows, self.codes, self.scales, self.mins, self.table, self.bias,
            self.in_features, self.out_features, self.group_size, self.kind, self.rounds_rows and not _exact_rows.get(),
        )  # fmt: skip
        return result

    def extra_repr(self) -> str:
        """Describe sizes and format."""
        bits = 8 if self.table is None else 4
        rows = ", rows of int8" if self.rounds_rows else ""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {self.kind} of {bits} bits in groups of {self.group_size}{rows}"


_LIBRARY = torch.library.Library("specdec_fast", "DEF")
_LIBRARY.define(
    "quantized_linear(Tensor rows, Tensor codes, Tensor scales, Tensor? mins, Tensor? table, Tensor? bias, "
    "int in_features, int out_features, int group_size, str kind, bool rounds_rows) -> Tensor"
)


def _computed(rows: Tensor, codes: Tensor, scales: Tensor, mins: Any, table: Any, bias: Any, *sizes: Any) -> Tensor:
    weight = PackedWeight(codes, scales, mins, table, *sizes)
    op = resolve(rows.device).quantized_linear
    out: Tensor = op(rows.reshape(-1, weight.in_features), weight, None if bias is None else bias.to(rows.dtype))
    return out.view(*rows.shape[:-1], weight.out_features)


def _shape_alone(rows: Tensor, codes: Tensor, scales: Tensor, mins: Any, table: Any, bias: Any, *sizes: Any) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], sizes[1])


_LIBRARY.impl("quantized_linear", _computed, "CompositeExplicitAutograd")
torch.library.register_fake("specdec_fast::quantized_linear", _shape_alone, lib=_LIBRARY)


def linears_to_round(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    """Return by name the modules whose weights ``quantization`` rounds.

    These are plain ``nn.Linear`` and ``Conv1D`` that the model calls; it may read the weight of another one itself, as
    Mamba does that of ``dt_proj``.
    """
    linears = {
        name: module
        for name, module in model.named_modules()
        if (type(module).forward is nn.Linear.forward or type(module) is Conv1D)
        and replaced_forward(module) is None
        and type(module.weight) is nn.Parameter
        and module.weight.is_floating_point()
    }
    watch = _ReadWeights({id(module.weight) for module in linears.values()})
    token_ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    with suppress(Exception), torch.inference_mode(), watch:  # what it cannot compute, the engine refuses with a reason
        model(input_ids=token_ids, use_cache=False)
    return {name: module for name, module in linears.items() if id(module.weight) not in watch.read}


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
            given = {id(each) for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)}
            self.read |= given & self._weights
        return func(*args, **(kwargs or {}))


def _matrix_of(module: nn.Linear | Conv1D) -> Tensor:
    """Return the weight as ``[out_features, in_features]``."""
    weight: Tensor = module.weight.detach()
    return weight.t() if isinstance(module, Conv1D) else weight


def round_linears(model: PreTrainedModel, quantization: str) -> None:
    """Replace a model's linears by rounded ones, one after the other; embeddings and norms stay as they are.

    ``quantization`` is a name in ``ROUNDINGS``. The output layer has 8 bits, also if the others have 4. A model whose
    linears are quantised already stays as it is. Raises ConfigError if a weight has numbers that cannot be rounded, or
    there is no linear.
    """
    for name, module in _expected_linears(model, quantization).items():
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], _rounded_linear(model, name, module, quantization))


def rounded_copy(model: PreTrainedModel, quantization: str) -> PreTrainedModel:
    """Return a copy of a model with linears rounded as by ``round_linears``, which shares all other tensors with it."""
    linears = _expected_linears(model, quantization)
    if not linears:
        return model
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for name, module in linears.items():
        shared[id(module)] = _rounded_linear(model, name, module, quantization)
    return copy.deepcopy(model, shared)


def _expected_linears(model: PreTrainedModel, quantization: str) -> dict[str, nn.Linear | Conv1D]:
    linears = {} if quantized_linears(model) else linears_to_round(model)
    if not linears and not quantized_linears(model):
        raise ConfigError(
            f"quantization={quantization!r}, but {type(model).__name__} has no linear layers that can be rounded "
            "(plain torch.nn.Linear with weights of a floating dtype); leave it out."
        )
    return linears


def tensors_after_rounding(model: PreTrainedModel, quantization: str) -> tuple[list[Tensor], int]:
    """Return the parameters and buffers that rounding leaves as they are, and the bytes of the rounded weights."""
    linears = linears_to_round(model)
    rounded_modules = {id(module) for module in linears.values()}
    others = [module for module in model.modules() if id(module) not in rounded_modules]
    kept = [tensor for module in others for tensor in (*module._parameters.values(), *module._buffers.values())]
    kept += [module.bias for module in linears.values()]
    sizes = [
        _rounding_of(model, module, quantization).bytes_of(*_matrix_of(module).shape) for module in linears.values()
    ]
    return [tensor for tensor in kept if tensor is not None], sum(sizes)


def _rounding_of(model: PreTrainedModel, module: nn.Module, quantization: str) -> Rounding:
    rounding = ROUNDINGS[quantization]
    is_output_layer = module is model.get_output_embeddings()
    return replace(rounding, bits=_OUTPUT_LAYER.get(rounding.bits, rounding.bits)) if is_output_layer else rounding


def _rounded_linear(
    model: PreTrainedModel, name: str, module: nn.Linear | Conv1D, quantization: str
) -> QuantizedLinear:
    try:
        weight = rounded(_matrix_of(module), _rounding_of(model, module, quantization))
    except ValueError as error:
        raise ConfigError(f"{name}.weight of {type(model).__name__} cannot be quantised: {error}") from error
    return QuantizedLinear(weight, module.bias, module.weight.dtype).train(module.training)


def weight_of(module: nn.Module) -> Tensor:
    """Return a linear's weight ``[out_features, in_features]``; of a quantised one, what its codes mean in fp32."""
    weight = dequantized(module.packed, torch.float32) if isinstance(module, QuantizedLinear) else module.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def quantized_linears(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return a model's quantised linears by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def bytes_by_kind(model: nn.Module) -> dict[str, int]:
    """Return the bytes of a model's linears by kind: ``"int4"``, ``"int8-a8"``, or the dtype of plain ones."""
    found: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            found[_kind_of(module)] = found.get(_kind_of(module), 0) + module.packed.nbytes
        elif isinstance(module, nn.Linear | Conv1D):
            kind = str(module.weight.dtype).removeprefix("torch.")
            found[kind] = found.get(kind, 0) + module.weight.nbytes
    return found


def _kind_of(module: QuantizedLinear) -> str:
    name = "int4" if module.table is not None else module.kind
    return f"{name}-a8" if module.rounds_rows else name
