"""Detects changes of a model that its forward program or its graphs would not see.

Programs and graphs read weights from the model's memory, so most changes in place take effect. They do not see tensors
that were moved or replaced, and modules, hooks or forwards that were added or replaced later. A program does not see
changes of numbers that it copied: scalars, and results computed from weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

# Tensors up to this size are compared by value; for larger ones, PyTorch's version counter is compared.
_MOST_COPIED = 1 << 16
_GLOBAL_HOOKS = (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks)


def hooked_class(model: nn.Module) -> str | None:
    """Return the class of a module with forward hooks, which recordings would not call; None if there is none."""
    if any(_GLOBAL_HOOKS):
        return nn.Module.__name__  # global hooks run for every module
    hooked = next((m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks), None)
    return None if hooked is None else type(hooked).__name__


def training_module(model: nn.Module) -> str | None:
    """Return the name of a module in training mode, "" for the model itself; None if all are in evaluation mode."""
    return next((name for name, module in model.named_modules() if module.training), None)


class Watch:
    """The state of a model when its program or its graphs were made. It keeps the model's tensors alive.

    Args:
        model: the model.
        baked: parameters and buffers whose numbers a program has copied instead of reading them.

    """

    def __init__(self, model: nn.Module, baked: Sequence[Tensor]) -> None:
        modules = list(model.modules())
        places = [place for m in modules for place in (m._parameters, m._buffers, m._modules) if place]
        self._places: list[tuple[dict[str, Any], list[Any]]] = [(place, list(place.values())) for place in places]
        self._tensors = [*model.parameters(), *model.buffers()]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._forwards = [(vars(m), vars(m).get("forward")) for m in modules]
        self._hooks = [*_GLOBAL_HOOKS, *chain.from_iterable((m._forward_hooks, m._forward_pre_hooks) for m in modules)]
        is_copied = [tensor.numel() <= _MOST_COPIED or tensor.is_inference() for tensor in baked]
        self._copies = [(t, t.detach().clone()) for t, copied in zip(baked, is_copied, strict=True) if copied]
        self._versions = [(t, t._version) for t, copied in zip(baked, is_copied, strict=True) if not copied]

    def change(self) -> str | None:
        """Describe a change that the program or the graphs would not see; None if there is none."""
        if any(self._hooks):
            return "forward hooks have been added to it, which would not be called"
        for place, values in self._places:
            if len(place) != len(values) or not all(map(is_, place.values(), values)):
                return "its weights, buffers or modules have been replaced"
        if not all(attributes.get("forward") is forward for attributes, forward in self._forwards):
            return "a forward of one of its modules has been replaced, which would not be called"
        if self._addresses != [tensor.data_ptr() for tensor in self._tensors]:
            return "its weights have been moved or cast"
        changed = any(not torch.equal(tensor, copy) for tensor, copy in self._copies)
        if changed or any(tensor._version != version for tensor, version in self._versions):
            return "weights whose numbers the program copied (scalars, or sums like 1 + w) have been changed in place"
        return None
