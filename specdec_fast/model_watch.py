"""Detects changes of a model that its forward program or its graphs would not see.

Programs and graphs read weights from the model's memory, so most changes in place take effect. They do not see tensors
that were moved or replaced, modules, hooks or forwards that were added or replaced later, and which adapters of PEFT
are active. A program does not see changes of numbers that it copied: scalars, and results computed from weights alone.
Other attributes of modules are not watched: most are notes of trainers and users, which no forward reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import getattr_static
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from specdec_fast.errors import UnsupportedModelError

# Tensors up to this size are compared by value; for larger ones, PyTorch's version counter is compared.
_MOST_COPIED = 1 << 16
_SAMPLED = 64  # numbers in the middle of a tensor that tell whether it has changed without PyTorch's notice
_COLLECTING = "transformers.utils.output_capturing"  # the module of hooks that collect hidden states and attentions
_GLOBAL_HOOKS = (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks)
# Attributes of PEFT's modules that say which adapters are active, merged or disabled, and how strong they are.
_ADAPTER_SETTINGS = ("active_adapter", "_active_adapter", "merged_adapters", "_disable_adapters", "scaling")


class OwnForward(partial[Any]):
    """A forward that an engine gives a module while PyTorch runs the model's forward; no change of the model.

    Other engines over the model may look at it meanwhile, in other threads.
    """


def replaced_forward(module: nn.Module) -> Any | None:
    """Return the forward that a module has instead of its class's, unless it is an engine's; None without one."""
    forward = vars(module).get("forward")
    return None if isinstance(forward, OwnForward) else forward


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks of its own, besides those that matter to no forward of an engine.

    When a caller first asks a model for hidden states or attentions, transformers adds hooks that collect them, and
    leaves them there. They do nothing in a forward of which nobody asks that.
    """
    return any(map(_do_something, (module._forward_hooks, module._forward_pre_hooks)))


def _do_something(hooks: Mapping[int, Any]) -> bool:
    return any(getattr(hook, "__module__", None) != _COLLECTING for hook in hooks.values())


def error_of_change(name: str, change: str) -> UnsupportedModelError:
    """Return the error for a change of a model that its program or its graphs do not see."""
    return UnsupportedModelError(
        f"{name} has changed since the engine was made: {change}; make a new Engine. (Other changes of weights in "
        "place take effect without one.)"
    )


def hooked_class(model: nn.Module) -> str | None:
    """Return the class of a module with forward hooks, which recordings would not call; None if there is none."""
    if any(_GLOBAL_HOOKS):
        return nn.Module.__name__  # global hooks run for every module
    hooked = next(filter(has_hooks, model.modules()), None)
    return None if hooked is None else type(hooked).__name__


def training_modules(model: nn.Module) -> frozenset[str]:
    """Return the names of the modules in training mode, "" for the model itself."""
    return frozenset(name for name, module in model.named_modules() if module.training)


def check_repeats(model: nn.Module, compute: Callable[[], Tensor], known: frozenset[str]) -> frozenset[str]:
    """Return the names of the model's modules in training mode, after checking that they are not random.

    Replacing a module leaves the new one in training mode, which only matters if something in it has dropout. Raises
    UnsupportedModelError if the model itself is in training mode, or two computations of its logits of a short text
    (``compute``) differ. ``known`` is what this function returned before.
    """
    parts = training_modules(model)
    if "" in parts:
        raise UnsupportedModelError(
            f"{type(model).__name__} has been put in training mode since the engine was made, so dropout would change "
            "its output; call model.eval() first."
        )
    if parts - known and not torch.equal(compute(), compute()):
        raise UnsupportedModelError(
            f"{type(model).__name__} computes other logits each time, and its module {min(parts - known)} is in "
            "training mode (dropout); call model.eval() first."
        )
    return parts


class Watch:
    """The state of a model when its program or its graphs were made. It keeps the model's tensors alive.

    ``baked`` are parameters and buffers whose numbers a program has copied instead of reading them.
    """

    def __init__(self, model: nn.Module, baked: Sequence[Tensor]) -> None:
        modules = list(model.modules())
        places = [place for m in modules for place in (m._parameters, m._buffers, m._modules) if place]
        self._places: list[tuple[dict[str, Any], list[Any]]] = [(place, list(place.values())) for place in places]
        self._tensors = [*model.parameters(), *model.buffers()]
        self._addresses = [_address_of(tensor) for tensor in self._tensors]
        self._forwards = [(m, replaced_forward(m), _forward_of(type(m))) for m in modules]
        self._adapters = [
            (m, name, _adapters_of(m, name)) for m in modules for name in _ADAPTER_SETTINGS if name in vars(m)
        ]
        self._hooks = [*_GLOBAL_HOOKS, *chain.from_iterable((m._forward_hooks, m._forward_pre_hooks) for m in modules)]
        is_copied = [tensor.numel() <= _MOST_COPIED or tensor.is_inference() for tensor in baked]
        self._copies = [(t, t.detach().clone()) for t, copied in zip(baked, is_copied, strict=True) if copied]
        self._versions = [(t, t._version) for t, copied in zip(baked, is_copied, strict=True) if not copied]

    def change(self) -> str | None:
        """Describe a change that the program or the graphs would not see; None if there is none."""
        for place, values in self._places:
            if len(place) != len(values) or not all(map(is_, place.values(), values)):
                return "its weights, buffers or modules have been replaced"
        for module, forward, of_class in self._forwards:
            if replaced_forward(module) is not forward or _forward_of(type(module)) is not of_class:
                return "a forward of one of its modules has been replaced, which would not be called"
        if self._addresses != [_address_of(tensor) for tensor in self._tensors]:
            return "its weights have been moved, cast or negated"
        changed = any(not torch.equal(tensor, numbers) for tensor, numbers in self._copies)
        if changed or any(tensor._version != version for tensor, version in self._versions):
            return "weights whose numbers the program copied (scalars, or sums like 1 + w) have been changed in place"
        # Hooks last, so that other changes of a model with hooks, which has no program, are noticed.
        return self._other_adapters() or self._hook()

    def _other_adapters(self) -> str | None:
        for module, name, before in self._adapters:
            if _adapters_of(module, name) != before:
                return f"{name} of a {type(module).__name__} has another value (as when PEFT switches adapters)"
        return None

    def _hook(self) -> str | None:
        has_some = any(map(_do_something, self._hooks))
        return "forward hooks have been added to it, which would not be called" if has_some else None


def _forward_of(cls: type[nn.Module]) -> Any:
    """Return what a class has as its forward: TorchScript's or a ``partialmethod`` is another object at each look."""
    return getattr_static(cls, "forward", None)


def _adapters_of(module: nn.Module, name: str) -> Any:
    """Return a copy of a setting of adapters. PEFT writes one active adapter as its name or as a list of it."""
    value = vars(module).get(name)
    return [value] if isinstance(value, str) else copy.deepcopy(value)


class Numbers:
    """What weights are at one time, to find out later, in little time, whether their numbers have changed.

    PyTorch counts writes to a tensor, but not those through ``.data``, NumPy or a kernel, nor any to a tensor made in
    inference mode. So some numbers of every tensor are compared as well: an update of all weights, as training or a
    new checkpoint makes it, changes some of them. A change of a few weights that PyTorch does not count is not seen.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        tensors = list(weights)
        self._places = [(*_address_of(t), t.dtype, t.shape, None if t.is_inference() else t._version) for t in tensors]
        samples = [_sample(tensor) for tensor in tensors if tensor.is_contiguous() and tensor.numel()]
        devices = dict.fromkeys(sample.device for sample in samples)
        self._samples = [torch.cat([each for each in samples if each.device == device]) for device in devices]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Numbers) or self._places != other._places:
            return False
        return all(map(torch.equal, self._samples, other._samples))

    __hash__ = None  # type: ignore[assignment]


def _sample(tensor: Tensor) -> Tensor:
    """Return the bytes of some numbers in the middle of a contiguous tensor."""
    flat = tensor.detach().view(-1)
    start = max(0, len(flat) - _SAMPLED) // 2
    return flat[start : start + _SAMPLED].view(torch.uint8)


def _address_of(tensor: Tensor) -> tuple[int, bool]:
    """Return where a tensor's numbers are, and whether they have the other sign there (``torch._neg_view``)."""
    return tensor.data_ptr(), tensor.is_neg()
