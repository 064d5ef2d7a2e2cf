"""Modules with quantised weights, which stand in a model instead of its linears and its experts' weights.

A module calls ``torch.ops.specdec_fast.quantized_linear``, an operation of PyTorch's dispatcher: recordings see it, as
they see ``linear``. While PyTorch runs an engine's forward, ``replaced_linears.py`` calls the engine's own op instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdec_fast.errors import NotYetSupportedError
from specdec_fast.ops import resolve
from specdec_fast.ops.quantized_linear import LARGEST_WHOLE
from specdec_fast.quantization.packed_weight import INT8, TENSORS, PackedWeight, dequantized

_exact_rows: ContextVar[bool] = ContextVar("exact_rows", default=False)


@contextmanager
def exact_rows() -> Iterator[None]:
    """Let no quantised linear that this thread calls round its rows."""
    token = _exact_rows.set(True)
    try:
        yield
    finally:
        _exact_rows.reset(token)


_NOTHING = torch.empty(0, device="cpu")


class PackedModule(nn.Module):
    """Holds a :class:`PackedWeight`.

    Attributes:
        codes, table, scales, mins, super_scales, super_mins: the tensors of the packed weight, as buffers.
        dtype: of the rows that the model passes; of the weight that the codes replace.
    """

    codes: Tensor
    table: Tensor | None
    scales: Tensor
    mins: Tensor | None
    super_scales: Tensor | None
    super_mins: Tensor | None

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        nothing: dict[str, Any] = {name: _NOTHING if name in ("codes", "scales") else None for name in TENSORS}
        self._sizes = replace(weight, **nothing)
        for name in TENSORS:
            self.register_buffer(name, getattr(weight, name))

    @property
    def packed(self) -> PackedWeight:
        """The weight; its tensors are the module's."""
        return replace(self._sizes, **{name: getattr(self, name) for name in TENSORS})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        """Move the codes and scales, or give them other memory, but keep their dtypes: they are what the weights mean.

        So ``model.half()`` and ``model.to(dtype)`` change the dtype of rows, of biases and of the other weights alone.
        """
        before = {name: getattr(self, name) for name in TENSORS}
        device = self.codes.device
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            if tensor is not None and getattr(self, name).dtype != tensor.dtype:
                setattr(self, name, tensor.to(getattr(self, name).device))
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=device)).dtype
        return self

    @property
    def rounds_rows(self) -> bool:
        """Whether the op rounds rows."""
        return self._sizes.rounds_rows

    def round_rows(self) -> None:
        """Let the op round rows from now on; see ``expect_whole_codes``."""
        self._sizes = replace(self._sizes, rounds_rows=True)

    def expect_whole_codes(self) -> None:
        """Raise ValueError unless codes stand for whole numbers, which rounded rows can be multiplied with."""
        has_whole = self._sizes.kind == INT8
        if self.table is not None:
            table = torch.zeros(1, device="cpu") if self.table.is_meta else self.table.cpu()
            has_whole = bool((table == table.round()).all()) and float(table.abs().max()) <= LARGEST_WHOLE
        if not has_whole:
            values = self._sizes.kind if self.table is None else "of 4 bits for fractions"
            raise ValueError(f"its codes are {values}, and rows are rounded for whole numbers up to {LARGEST_WHOLE}")


class QuantizedLinear(PackedModule):
    """``nn.Linear`` with a packed weight, whose ``weight.dtype`` is ``dtype``.

    Attributes:
        bias: ``[out_features]``, or None.
        permutation: ``[in_features]`` int64, a buffer: input i of the packed weight is input ``permutation[i]`` of the
            module. None: inputs have their own order.
    """

    permutation: Tensor | None

    def __init__(
        self,
        weight: PackedWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
        permutation: Tensor | None = None,
    ) -> None:
        super().__init__(weight, dtype)
        self.in_features = weight.in_features
        self.out_features = weight.out_features
        self.group_size = weight.group_size
        self.kind = weight.kind
        self.register_buffer("permutation", permutation)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """Dtype, shape and device of the weight, for models that ask; its numbers, which nothing may read, are NaN."""
        nothing = torch.full((), torch.nan, dtype=self.dtype, device=self.codes.device)
        return nothing.expand(self.out_features, self.in_features)

    def ordered(self, rows: Tensor) -> Tensor:
        """Return rows ``[..., in_features]`` with inputs in the order of the packed weight."""
        return rows if self.permutation is None else rows.index_select(-1, self.permutation)

    def forward(self, rows: Tensor) -> Tensor:
        """Multiply ``[..., in_features]``: ``[..., out_features]`` in the dtype of ``rows``."""
        result: Tensor = torch.ops.specdec_fast.quantized_linear(
            self.ordered(rows), self.codes, self.scales, self.mins, self.table, self.bias,
            self.in_features, self.out_features, self.group_size, self.kind, self.rounds_rows and not _exact_rows.get(),
            self.super_scales, self.super_mins,
        )  # fmt: skip
        return result

    def extra_repr(self) -> str:
        """Describe sizes and format."""
        bits = 8 if self.table is None else 4
        rows = ", rows of int8" if self.rounds_rows else ""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {self.kind} of {bits} bits in groups of {self.group_size}{rows}"


class PackedExperts(PackedModule):
    """The weights of all experts of a layer, in place of a parameter with three axes."""


_LIBRARY = torch.library.Library("specdec_fast", "DEF")
_LIBRARY.define(
    "quantized_linear(Tensor rows, Tensor codes, Tensor scales, Tensor? mins, Tensor? table, Tensor? bias, "
    "int in_features, int out_features, int group_size, str kind, bool rounds_rows, Tensor? super_scales=None, "
    "Tensor? super_mins=None) -> Tensor"
)


def _computed(rows: Tensor, codes: Tensor, scales: Tensor, mins: Any, table: Any, bias: Any, *sizes: Any) -> Tensor:
    weight = PackedWeight(codes, scales, mins, table, *sizes)
    op = resolve(rows.device).quantized_linear
    out: Tensor = op(rows.reshape(-1, weight.in_features), weight, None if bias is None else bias.to(rows.dtype))
    return out.view(*rows.shape[:-1], weight.out_features)


def _shape_alone(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    mins: Any,
    table: Any,
    bias: Any,
    in_features: int,
    out_features: int,
    *others: Any,
) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], out_features)


_LIBRARY.impl("quantized_linear", _computed, "CompositeExplicitAutograd")
torch.library.register_fake("specdec_fast::quantized_linear", _shape_alone, lib=_LIBRARY)


def weight_of(module: nn.Module) -> Tensor:
    """Return a linear's weight ``[out_features, in_features]``; of a quantised one, what its codes mean in fp32."""
    if not isinstance(module, QuantizedLinear):
        weight: Any = module.weight
        return weight.detach()
    weights = dequantized(module.packed, torch.float32)
    return weights if module.permutation is None else weights[:, module.permutation.argsort()]


def quantized_linears(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return a model's quantised linears by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def refuse_saving(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model whose ``save_pretrained`` raises if it holds codes, and so do those of the models in it.

    No format of checkpoint has the names of these codes, and ``from_pretrained`` would draw weights at random for them.
    """
    if any(isinstance(module, PackedModule) for module in model.modules()):
        parts: list[Any] = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        for part in parts:
            part.save_pretrained = _no_saving
    return model


def _no_saving(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotYetSupportedError(
        "save_pretrained() of a model whose weights this package holds as codes would write a checkpoint that nothing "
        "reads; keep the folder or file that it was loaded from, and pass quantization= again if it was rounded. "
        "torch.save(model.state_dict()) has the codes, for the same model quantised in the same way."
    )


def how_quantised(model: nn.Module) -> str | None:
    """Return what a model's weights are quantised as, ``"int4 and int8"`` or ``"bitsandbytes"``; None: they are not."""
    kinds = sorted({_kind_of(module) for module in model.modules() if isinstance(module, PackedModule)})
    if kinds:
        return " and ".join(kinds)
    if (method := how_quantised_by(getattr(model, "config", None))) is not None:
        return method
    weights = (module.weight for module in model.modules() if isinstance(module, nn.Linear))
    for weight in weights:
        is_plain = type(weight) is nn.Parameter or hasattr(weight, "device_mesh")  # that of a sharded one
        if not is_plain or not weight.is_floating_point():
            return f"{type(weight).__name__} of {str(weight.dtype).removeprefix('torch.')}"
    return None


def how_quantised_by(config: Any) -> str | None:
    """Return the method that a model's config names, ``"gptq"`` for example; None if it names none."""
    parts = (config, config.get_text_config(decoder=True)) if isinstance(config, PreTrainedConfig) else ()
    for part in parts:
        fields: Any = getattr(part, "quantization_config", None)
        if fields is not None:
            method = fields.get("quant_method") if isinstance(fields, dict) else getattr(fields, "quant_method", None)
            return str(getattr(method, "value", method))
    return None


def bytes_by_kind(model: nn.Module) -> dict[str, int]:
    """Return the bytes of a model's linears by kind: ``"int4"``, ``"int8-a8"``, or the dtype of plain ones."""
    found: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, PackedModule):
            found[_kind_of(module)] = found.get(_kind_of(module), 0) + module.packed.nbytes
        elif isinstance(module, nn.Linear | Conv1D):
            kind = str(module.weight.dtype).removeprefix("torch.")
            found[kind] = found.get(kind, 0) + module.weight.nbytes
    return found


def _kind_of(module: PackedModule) -> str:
    packed = module.packed
    name = "int4" if packed.table is not None else packed.kind
    return f"{name}-a8" if packed.rounds_rows else name
