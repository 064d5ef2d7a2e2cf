"""Mixtures of experts on the op ``grouped_linear``, for the duration of a forward.

``transformers`` calls its experts through ``ExpertsInterface``, as it calls attention. An expert module holds the
weights of all its experts, and receives the choices of every row. PyTorch's implementations group rows, so they sum in
another order in another batch. Here a row's sum has the order of its own choices, whatever the other rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specdec_fast.errors import UnsupportedModelError
from specdec_fast.models.quantized_linears import PackedExperts
from specdec_fast.ops import Ops, resolve
from specdec_fast.ops.checks import stored
from specdec_fast.torch_threads import invariant_call


def mixture(ops: Ops, module: Any, rows: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts of every row and add them up: ``[T, hidden_size]`` in the dtype of ``rows``.

    Products with the weights are rounded to the wider of both dtypes, as ``transformers`` does, and added in fp32, in
    the order of the choices. Raises UnsupportedModelError if the experts are spread over several devices.

    Args:
        ops: ops that include ``grouped_linear``.
        module: a module that ``transformers.integrations.moe.use_experts_implementation`` has decorated.
        rows: ``[T, hidden_size]``.
        expert_ids: ``[T, num_choices]`` int64.
        weights: ``[T, num_choices]``, of any floating dtype.
    """
    if getattr(module, "_is_expert_parallel", False):  # an attribute since transformers 5.20
        raise UnsupportedModelError(f"the experts of {type(module).__name__} are spread over several devices.")
    expert_ids = stored(expert_ids)
    products = _products(ops, module, entry_name(module), stored(rows)[:, None], expert_ids)
    products = module._apply_gate(products) if module.has_gate else module.act_fn(products)
    products = _products(ops, module, "down_proj", stored(products), expert_ids)
    if getattr(module, "has_post_expert_norm", False):  # an attribute since transformers 5.18
        products = module.post_expert_norm(products)
    weighted = products * weights[..., None]
    total = weighted[:, 0].float()
    for choice in range(1, expert_ids.shape[1]):
        total = total + weighted[:, choice]
    return total.to(rows.dtype)


def entry_name(module: Any) -> str:
    """Return the name of the weights that the rows are multiplied with first; the others are ``down_proj``."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def _products(ops: Ops, module: Any, name: str, rows: Tensor, expert_ids: Tensor) -> Tensor:
    weight = getattr(module, name)
    bias = stored(getattr(module, f"{name}_bias")) if module.has_bias else None
    if isinstance(weight, PackedExperts):
        result = invariant_call(ops.grouped_quantized_linear, rows, expert_ids, weight.packed, bias)
    else:
        weight = stored(weight)
        weight = weight.mT if module.is_transposed else weight
        result = invariant_call(ops.grouped_linear, rows, expert_ids, weight, bias)
    assert isinstance(result, Tensor)
    return result


def mixtures_of(model: nn.Module) -> dict[str, Any]:
    """Return by name the modules that hold the weights of all experts of a layer."""
    decorated = ("has_gate", "has_bias", "is_transposed")  # what every version's decorator sets
    return {name: each for name, each in model.named_modules() if all(hasattr(each, mark) for mark in decorated)}


def expert_configs(model: nn.Module) -> list[Any]:
    """Return the configs, each once, that name how the model's experts are computed."""
    return list({id(module.config): module.config for module in mixtures_of(model).values()}.values())


def use_own_function(module: Any) -> None:
    """Let a model compute experts with packed weights by ``mixture`` wherever it is called, also outside of engines."""
    module.config._experts_implementation_internal = _OF_PACKED


def _mix_packed(module: nn.Module, rows: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    return mixture(resolve(rows.device), module, rows, expert_ids, weights)


_OF_PACKED = "specdec_packed"
ALL_EXPERTS_FUNCTIONS.register(_OF_PACKED, _mix_packed)


@contextmanager
def computed_by(name: str, configs: list[Any]) -> Iterator[None]:
    """Replace the function that computes experts, not by the config's property, which would change other configs."""
    before = [config._experts_implementation_internal for config in configs]
    for config in configs:
        config._experts_implementation_internal = name
    try:
        yield
    finally:
        for config, previous in zip(configs, before, strict=True):
            config._experts_implementation_internal = previous
