"""Detects changes of a model that its forward program or its graphs would not see.

Programs and graphs read weights from the model's memory, so most changes in place take effect. They do not see tensors
that were moved or replaced, modules, hooks or forwards that were added or replaced later, and other settings of modules
(Python's numbers and names, such as PEFT's active adapter). A program does not see changes of numbers that it copied:
scalars, and results computed from weights alone.
"""

from __future__ import annotations

import copy
import dis
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import getattr_static
from itertools import chain
from math import isnan
from operator import is_
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.nn.modules.dropout import _DropoutNd
from transformers import GenerationMixin, PreTrainedModel

from specdec_fast.errors import UnsupportedModelError

# Tensors up to this size are compared by value; for larger ones, PyTorch's version counter is compared.
_MOST_COPIED = 1 << 16
_SAMPLED = 64  # numbers in the middle of a tensor that tell whether it has changed without PyTorch's notice
_COLLECTING = "transformers.utils.output_capturing"  # the module of hooks that collect hidden states and attentions
_GLOBAL_HOOKS = (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks)
# Attributes that change no forward in evaluation mode: PyTorch's own, and what trainers write.
_NO_SETTINGS = {*vars(nn.Module()), "gradient_checkpointing"}
# Classes whose attributes are names, plans of devices and notes of trainers, which no forward reads.
_WITHOUT_SETTINGS = {*PreTrainedModel.__mro__, *GenerationMixin.__mro__}
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


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
        names = {cls: _names_in(cls) for cls in set(map(type, modules))}
        self._settings = [(m, vars(m), *_settings_of(m, names[type(m)])) for m in modules]
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
        return self._other_setting() or self._hook()

    def _other_setting(self) -> str | None:
        for module, attributes, names, values in self._settings:
            present = tuple(map(attributes.get, names))
            if all(map(is_, present, values)):
                continue
            for name, now, before in zip(names, present, values, strict=True):
                if now is not before and not _are_equal(now, before):
                    return f"{name} of a {type(module).__name__} has another value (as when PEFT switches adapters)"
        return None

    def _hook(self) -> str | None:
        has_some = any(map(_do_something, self._hooks))
        return "forward hooks have been added to it, which would not be called" if has_some else None


def _forward_of(cls: type[nn.Module]) -> Any:
    """Return what a class has as its forward: TorchScript's or a ``partialmethod`` is another object at each look."""
    return getattr_static(cls, "forward", None)


class _Names(NamedTuple):
    """Names in the code of a module's class."""

    read: set[str]  # all of them
    written: set[str]  # of attributes to which its forward assigns


def _settings_of(module: nn.Module, names: _Names) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return names and values of a module's attributes that are plain values, or lists and dictionaries of such.

    What the code of its class does not name is a note of somebody else, such as a step or a history of losses, unless
    another forward may read it. A count that its forward keeps is a state, and so is None where it will keep tensors.
    """
    is_class_alone = replaced_forward(module) is None
    settings = {}
    for name, value in list(vars(module).items()):
        is_note = is_class_alone and name not in names.read
        is_state = name in names.written and (value is None or type(value) is int)
        if name not in _NO_SETTINGS and "dropout" not in name and not is_note and not is_state and _is_plain(value):
            settings[name] = copy.deepcopy(value)
    return tuple(settings), tuple(settings.values())


def _names_in(cls: type[nn.Module]) -> _Names:
    """Return the names in the code of a module's class. Dropout does nothing in evaluation mode, so it has none."""
    if issubclass(cls, _DropoutNd):
        return _Names(set(), set())
    methods: dict[str, list[CodeType]] = defaultdict(list)
    for base in cls.__mro__:
        if base not in _WITHOUT_SETTINGS:
            for name, value in list(vars(base).items()):
                methods[name] += _codes_of(value)
    codes = [code for some in methods.values() for code in some]
    # a text may be the name that setattr takes
    read = {each for code in codes for each in (*code.co_names, *code.co_consts) if isinstance(each, str)}
    written: set[str] = set()
    called = ["forward"]
    seen: set[str] = set()
    while called:
        name = called.pop()
        if name not in seen:
            seen.add(name)
            for code in methods.get(name, []):
                written.update(each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
                called += code.co_names
    return _Names(read, written)


def _codes_of(value: Any) -> list[CodeType]:
    """Return the code of a method or property, of what it decorates, and of the functions inside."""
    codes: list[CodeType] = []
    pending = [value]
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, CodeType):
            codes.append(each)
            pending += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
        elif isinstance(each, property):
            pending += [each.fget, each.fset]
        elif isinstance(each, (FunctionType, staticmethod, classmethod)):
            function = getattr(each, "__func__", each)
            pending += [getattr(function, "__code__", None), getattr(function, "__wrapped__", None)]
            pending += [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _has_value(cell)]
    return codes


def _has_value(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is not assigned yet
        return False


def _are_equal(now: Any, before: Any) -> bool:
    """Return whether a value equals a plain one that it was before; NaN equals NaN, and a name the list of it alone."""
    if isinstance(now, float) and isinstance(before, float) and isnan(now) and isnan(before):
        return True
    if isinstance(now, str) and isinstance(before, list):  # PEFT writes one active adapter in both ways
        now = [now]
    elif isinstance(now, list) and isinstance(before, str):
        before = [before]
    try:
        return bool(now == before)
    except (RuntimeError, ValueError):  # an array took its place
        return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    return isinstance(value, _PLAIN)


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
