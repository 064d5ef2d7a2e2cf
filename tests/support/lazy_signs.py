"""Lazy negative views: their memory holds their numbers with the other sign."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def negative_view(tensor: Tensor) -> Tensor:
    """Return the same numbers as a lazy negative view."""
    view = torch._neg_view(tensor.detach().neg())
    assert view.is_neg()
    assert torch.equal(view.nan_to_num(), tensor.nan_to_num())
    return view


def with_lazy_weights(model: nn.Module) -> nn.Module:
    """Make every parameter of the model such a view, and return the model."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(negative_view(parameter), requires_grad=False)
    return model
