"""How the forward of a Hugging Face model names its arguments, where versions of ``transformers`` differ."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Since transformers 5.24, forwards take their KV cache as ``cache``; the older name ends with 5.40. The older one comes
# first: a forward that names both was written for an older version, and its ``cache`` is something else. Models whose
# layers are all recurrent (Mamba) have a name of their own.
_CACHE_ARGUMENTS = ("past_key_values", "cache", "cache_params")


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the argument by which the forward of ``model`` takes its KV cache.

    A forward that wraps another one may name neither (``*args, **kwargs``); then those of the model's classes count.
    """
    for parameters in _parameters(model):
        for name in _CACHE_ARGUMENTS:
            if name in parameters:
                return name
    return _CACHE_ARGUMENTS[0]


def takes_positions(model: PreTrainedModel) -> bool:
    """Return whether the forward of ``model`` takes positions: layers that are all recurrent may need none."""
    named = any("position_ids" in parameters for parameters in _parameters(model))
    return named or cache_argument(model) != "cache_params"


def _parameters(model: PreTrainedModel) -> Iterator[Mapping[str, inspect.Parameter]]:
    """Yield the parameters of the model's forward, then of its classes' forwards."""
    of_classes = [vars(cls)["forward"] for cls in type(model).__mro__ if "forward" in vars(cls)]
    for forward in (model.forward, *of_classes):
        yield inspect.signature(forward).parameters
