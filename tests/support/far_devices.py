"""Devices that no machine has, ``lazy:0``, ``lazy:1`` and so on, on which a model's layers can be spread.

PyTorch knows the device type ``lazy``, and no build that tests use has kernels for it. Here its tensors are a subclass
that wraps a tensor of the CPU. Every operation on them computes on the wrapped tensors, and raises if it gets tensors
of several devices, as CUDA does; numbers without an axis may lie on the CPU, and copies may go anywhere. CUDA also
takes indices from the CPU; here that is refused, because it would wait for the device. What is missing is what a GPU
has besides: work that is only queued, kernels with other bits, and memory that runs out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from specdec_fast.models import replaced_linears
from specdec_fast.models.hidden_states import decoder_layers
from specdec_fast.models.placement import place
from specdec_fast.ops import BACKENDS

TYPE = "lazy"
FIRST, SECOND = f"{TYPE}:0", f"{TYPE}:1"
_CPU = torch.device("cpu")
_BETWEEN_DEVICES = ("aten::copy_", "aten::_copy_from", "aten::_has_compatible_shallow_copy_type", "aten::set_data")


class FarTensor(Tensor):
    """A tensor of a simulated device; ``inner`` has its numbers, on the CPU."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> FarTensor:
        made = Tensor._make_wrapper_subclass(
            cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=device
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:
        return f"FarTensor({self.inner!r}, {self.device})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        return self.inner.tolist()

    def is_neg(self) -> bool:
        return self.inner.is_neg()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().split(".")[0]
        if name in _BETWEEN_DEVICES:
            return _between_devices(name, func, args)
        values = tree_flatten((args, kwargs))[0]
        tensors = [value for value in values if isinstance(value, Tensor)]
        devices = {tensor.device for tensor in tensors if tensor.dim() or isinstance(tensor, FarTensor)}
        if len(devices) > 1:
            raise RuntimeError(f"{name} got tensors on several devices: {', '.join(sorted(map(str, devices)))}")
        asked = next((value for value in values if isinstance(value, torch.device)), None)
        args_here, kwargs_here = tree_map(_here, (args, kwargs))
        if name == "aten::histc":  # of integers: GPUs have it, and the CPU has not
            args_here = (args_here[0].float(), *args_here[1:])
        out = func(*args_here, **kwargs_here)
        if any(isinstance(each, FarTensor) and each.shape != each.inner.shape for each in tensors):
            raise RuntimeError(f"{name} has resized a tensor, which the tensor that wraps it does not see")
        return _there(out, asked or devices.pop(), values)


def _between_devices(name: str, func: Any, args: Any) -> Any:
    if name in ("aten::copy_", "aten::_copy_from"):
        target, source = args[:2] if name == "aten::copy_" else args[1::-1]
        _here(target).copy_(_here(source))
        return target
    return func(*map(_here, args))


def _here(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _CPU
    return value.inner if isinstance(value, FarTensor) else value


def _there(out: Any, device: torch.device, given: list[Any]) -> Any:
    if device.type != TYPE:
        return out
    known = {id(value.inner): value for value in given if isinstance(value, FarTensor) and value.device == device}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return known[id(value)] if id(value) in known else FarTensor(value, device)  # in place: what it was given

    with torch.inference_mode(all(value.is_inference() for value in known.values())) if known else nullcontext():
        return tree_map(wrap, out)  # a view of a tensor that counts its versions counts them too


@cache
def _register() -> torch.library.Library:
    """Give PyTorch the functions that make tensors of this type of device, from which it composes all others."""
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, *, dtype: Any = None, device: Any = None, **others: Any) -> Tensor:
        return FarTensor(torch.empty(size, dtype=dtype, device=_CPU), device)

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **others: Any) -> Tensor:
        return FarTensor(torch.empty_strided(size, stride, dtype=dtype, device=_CPU), device)

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        return _between_devices("aten::_copy_from", None, (source, target))

    def arange(*numbers: Any, dtype: Any = None, device: Any = None, **others: Any) -> Tensor:
        return FarTensor(torch.arange(*numbers, dtype=dtype, device=_CPU), device)

    library.impl("empty.memory_format", empty, "Lazy")
    for overload in ("arange", "arange.start", "arange.start_step"):
        library.impl(overload, arange, "Lazy")
    library.impl("empty_strided", empty_strided, "Lazy")
    library.impl("_copy_from", copy_from, "Lazy")
    return library


@contextmanager
def far_devices() -> Iterator[None]:
    """Let there be such devices for a ``with`` block; the backend ``torch`` serves them."""
    _register()
    backend = replace(BACKENDS["torch"], device_types=(*BACKENDS["torch"].device_types, TYPE))
    is_autocast = torch.is_autocast_enabled

    def no_autocast(*device_type: str) -> bool:
        return device_type != (TYPE,) and is_autocast(*device_type)

    def is_linear(rows: Tensor, weight: Tensor) -> bool:
        return weight.dim() == 2 <= rows.dim() and rows.dtype == weight.dtype and weight.is_floating_point()

    plain = (*replaced_linears._PLAIN, FarTensor)
    with (
        patch.dict(BACKENDS, torch=backend),
        patch.object(torch, "is_autocast_enabled", no_autocast),
        patch.object(replaced_linears, "_PLAIN", plain),
        patch.object(replaced_linears, "_is_linear", is_linear),
    ):
        yield


def map_over(model: nn.Module, devices: list[str], ends: tuple[str, str] | None = None) -> dict[str, str]:
    """Return a device map that spreads the decoder layers of a model over devices, one for each.

    ``ends`` are the devices of what comes before the layers, and after them; None: those of the first and last layer.
    """
    first, last = ends or (devices[0], devices[-1])
    layers = decoder_layers(model, len(devices))
    name_of = {id(module): name for name, module in model.named_modules()}
    within = name_of[id(layers)]
    device_map = {f"{within}.{i}": device for i, device in enumerate(devices)}
    above = within.rpartition(".")[0]
    for name, _ in model.get_submodule(above).named_children():
        if name != within.rpartition(".")[2]:
            device_map[f"{above}.{name}"] = last if "norm" in name else first
    for name, _ in model.named_children():
        if not above.startswith(name):
            device_map[name] = last
    return device_map


def spread(model: nn.Module, devices: list[str], ends: tuple[str, str] | None = None) -> nn.Module:
    """Return a copy of a model that is spread as an engine with ``device_map`` does it; see ``map_over``."""
    spread_model = copy.deepcopy(model).requires_grad_(False)
    place(spread_model, map_over(spread_model, devices, ends))
    return spread_model
