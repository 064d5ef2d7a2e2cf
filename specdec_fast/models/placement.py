"""Models whose layers lie on several devices, as ``device_map`` of transformers spreads them.

Hooks of accelerate move hidden states, and what else layers receive, to the device of each layer, and the logits back
to the device where the rows entered. A model that the engine loads has one hook per entry of its map. One that its
caller has loaded may have a hook on every module: where the engine replaces a module's ``forward``, it moves the rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specdec_fast.errors import ConfigError

OFFLOADED = ("disk", "meta")


def devices_of(model: nn.Module) -> tuple[torch.device, ...]:
    """Return the devices of a model's weights, that of its embedding, where rows enter, first."""
    entry = entry_device(model)
    return tuple(dict.fromkeys((entry, *(parameter.device for parameter in model.parameters()))))


def entry_device(model: Any) -> torch.device:
    """Return the device of the embedding, or of the first weight if there is none."""
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    weight = getattr(embedding, "weight", None)
    return weight.device if isinstance(weight, Tensor) else next(model.parameters()).device


def place(model: Any, device_map: Mapping[str, Any]) -> None:
    """Put the modules that ``device_map`` names on their devices, and let hooks move what they receive.

    Modules on the CPU are computed there; hooks of accelerate would copy their weights to a GPU in every forward. A
    weight that two modules share is copied if they lie on different devices. Names of single weights are skipped.

    Raises:
        ConfigError: a module would lie on the disk, the map has no device for a weight, or names nothing in the model.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules

    expect_in_memory(device_map)
    expect_device_of_each(model, device_map)
    remove_hook_from_submodules(model)  # brings weights back from the CPU's memory, too
    modules = dict(model.named_modules())
    skipped = getattr(model, "_skip_keys_device_placement", None)
    for name in sorted(device_map, key=lambda name: name.count(".") if name else -1):
        if name in modules:
            hook = AlignDevicesHook(
                torch.device(device_map[name]), io_same_device=not name, place_submodules=True, skip_keys=skipped
            )
            add_hook_to_module(modules[name], hook)
    if "" not in device_map:
        root = AlignDevicesHook(entry_device(model), io_same_device=True, skip_keys=skipped)
        add_hook_to_module(model, root)
    model.hf_device_map = dict(device_map)


def expect_device_of_each(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Raise a ConfigError if a map has no device for a weight of a model, or names nothing in it."""
    prefixes = tuple(map(_dot, device_map))
    bare = [name for name, _ in model.named_parameters() if not f"{name}.".startswith(prefixes)]
    if bare:
        raise ConfigError(
            f'device_map names no device for {", ".join(bare[:3])} ({len(bare)} in all); add their modules, or "".'
        )
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    known = {name for name, _ in (*model.named_modules(remove_duplicate=False), *tensors)}
    unknown = [name for name in device_map if name not in known]
    if unknown:
        raise ConfigError(
            f"device_map names {', '.join(unknown[:3])} ({len(unknown)} in all), which a {type(model).__name__} has "
            "not got; take names of model.named_modules()."
        )


def expect_in_memory(device_map: Mapping[str, Any]) -> None:
    """Raise a ConfigError if a map puts modules on the disk, or on a device that keeps no numbers."""
    away = [f"{name or 'the model'} ({device})" for name, device in device_map.items() if str(device) in OFFLOADED]
    if away:
        raise ConfigError(
            f"device_map puts parts of the model where nothing computes: {', '.join(away[:3])} ({len(away)} in all); "
            "name a GPU, or 'cpu', which is slow."
        )


def _dot(name: str) -> str:
    return f"{name}." if name else ""


def moves_rows(module: nn.Module) -> bool:
    """Return whether a module's ``forward`` is its class's behind a hook of accelerate that moves its arguments."""
    hook: Any = getattr(module, "_hf_hook", None)
    own = getattr(getattr(module, "_old_forward", None), "__func__", None)
    is_plain = type(hook).__name__ == "AlignDevicesHook" and not hook.offload and not hook.io_same_device
    return is_plain and own is type(module).forward


@contextmanager
def computing_rows(layer: nn.Module, rows: Tensor) -> Iterator[None]:
    """Let an output layer compute ``rows`` ``[R]`` of its input ``[1, T, H]`` alone, on the device of that input.

    The argument ``logits_to_keep`` of a model would be moved to the device of the embedding.
    """
    attributes = vars(layer)
    before = attributes.get("forward")
    attributes["forward"] = partial(_of_rows, layer.forward, rows)
    try:
        yield
    finally:
        if before is None:
            attributes.pop("forward", None)
        else:
            attributes["forward"] = before


def _of_rows(forward: Any, rows: Tensor, hidden: Tensor) -> Tensor:
    logits: Tensor = forward(hidden[:, rows.to(hidden.device)])
    return logits


def copied_to(layer: nn.Module, device: torch.device) -> nn.Module:
    """Return a layer that computes on ``device``: itself, or a copy without hooks."""
    if all(parameter.device == device for parameter in layer.parameters()):
        return layer
    from accelerate.hooks import remove_hook_from_module

    moved: nn.Module = remove_hook_from_module(copy.deepcopy(layer), recurse=True)
    return moved.to(device)
