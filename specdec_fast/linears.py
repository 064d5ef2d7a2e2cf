"""A model's linear layers on the op ``linear``, for the duration of a forward.

PyTorch's linears read weights at a third of the memory's bandwidth at one row, and in fp32 sum in another order at few
rows. Where the op is chosen it is both faster and the same at any number of rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from specdec_fast.ops import Ops
from specdec_fast.ops.checks import FLOATS

# Fewer weights are multiplied in the time that a call takes. Which linears are exchanged must hang on nothing but their
# shape: another choice in another engine would be other bits.
SMALLEST = 1 << 18


class Linears:
    """The linears of one model that the op serves, exchanged by ``attach`` and put back by ``detach``.

    Only plain ``nn.Linear`` layers are taken: subclasses (quantised, LoRA, tensor-parallel) compute something else.

    Attributes:
        modules: those layers.

    """

    def __init__(self, model: nn.Module, ops: Ops) -> None:
        self.modules = [m for m in model.modules() if _serves(m)] if ops.has_own_linear else []
        self._forwards = [(m.__dict__, partial(_forward, m, ops)) for m in self.modules]

    def attach(self) -> None:
        """Let the layers compute by the op. An attribute of the instance hides the method of its class."""
        for attributes, forward in self._forwards:
            attributes["forward"] = forward

    def detach(self) -> None:
        """Put the layers back as they were."""
        for attributes, _ in self._forwards:
            attributes.pop("forward", None)


def _serves(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in module.__dict__:  # somebody else has exchanged it
        return False
    weight = module.weight
    return weight.numel() >= SMALLEST and weight.dtype in FLOATS and weight.is_contiguous()


def _forward(module: Any, ops: Ops, rows: Tensor) -> Tensor:
    flat = rows.reshape(-1, rows.shape[-1])
    return ops.linear(flat, module.weight, module.bias).view(*rows.shape[:-1], -1)
