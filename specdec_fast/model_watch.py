"""Whether a model is still what its forward program or its graphs were made from.

Both read weights where they are, so most changes in place are their own. They do not see tensors that are moved or
exchanged, modules or hooks that come later, and a program no numbers that it keeps a copy of: scalars, and what was
computed from weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

# Numbers of a tensor that are compared by value; of larger ones, the counter of changes that PyTorch keeps.
_MOST_COPIED = 1 << 16
_GLOBAL_HOOKS = (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks)


def hooked_class(model: nn.Module) -> str | None:
    """Return the class of a module with forward hooks, None if there is none: what is recorded would not call them."""
    if any(_GLOBAL_HOOKS):
        return nn.Module.__name__  # hooks of every module
    hooked = next((m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks), None)
    return None if hooked is None else type(hooked).__name__


class Watch:
    """What a model was when its program or its graphs were made. Its tensors are kept alive.

    Args:
        model: the model.
        baked: parameters and buffers of which numbers are kept instead of reading them.

    """

    def __init__(self, model: nn.Module, baked: Sequence[Tensor]) -> None:
        modules = list(model.modules())
        places = [place for m in modules for place in (m._parameters, m._buffers, m._modules) if place]
        self._places: list[tuple[dict[str, Any], list[Any]]] = [(place, list(place.values())) for place in places]
        self._tensors = [*model.parameters(), *model.buffers()]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._hooks = [*_GLOBAL_HOOKS, *chain.from_iterable((m._forward_hooks, m._forward_pre_hooks) for m in modules)]
        is_copied = [tensor.numel() <= _MOST_COPIED or tensor.is_inference() for tensor in baked]
        self._copies = [(t, t.detach().clone()) for t, copied in zip(baked, is_copied, strict=True) if copied]
        self._versions = [(t, t._version) for t, copied in zip(baked, is_copied, strict=True) if not copied]

    def change(self) -> str | None:
        """Return what has changed that would not be seen; None if nothing has."""
        if any(self._hooks):
            return "forward hooks have been added to it, which would not be called"
        for place, values in self._places:
            if len(place) != len(values) or not all(map(is_, place.values(), values)):
                return "its weights, buffers or modules have been exchanged"
        if self._addresses != [tensor.data_ptr() for tensor in self._tensors]:
            return "its weights have been moved or cast"
        changed = any(not torch.equal(tensor, copy) for tensor, copy in self._copies)
        if changed or any(tensor._version != version for tensor, version in self._versions):
            return "weights have been changed in place of which the program keeps numbers (scalars, or sums like 1 + w)"
        return None
