"""What all formats share: the tensors of one linear, what is made of them, and the interface of a format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_fast.errors import ConfigError
from specdec_fast.quantization.packed_weight import BLOCK, PackedWeight

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class CheckpointLinear:
    """One linear as a checkpoint has it.

    Attributes:
        weight: the codes and scales.
        permutation: ``[in_features]`` int64: input i of ``weight`` is input ``permutation[i]`` of the linear. None: the
            inputs have their own order.
        bias: ``[out_features]``, or None.
    """

    weight: PackedWeight
    permutation: Tensor | None
    bias: Tensor | None


class LinearTensors:
    """The tensors of one linear by the last part of their names, taken one by one.

    Args:
        name: of the linear, such as ``model.layers.0.mlp.up_proj``.
        tensors: by suffix, such as ``qweight``.
        file_of: returns the file of a suffix, for errors.

    Its methods raise ConfigError, which names file and tensor.
    """

    def __init__(
        self, name: str, tensors: Mapping[str, Tensor], file_of: Callable[[str], str] = lambda suffix: ""
    ) -> None:
        self.name = name
        self._left = dict(tensors)
        self._file_of = file_of

    def fault(self, suffix: str, text: str) -> ConfigError:
        """Return the error of a tensor; the text begins with a verb."""
        file = self._file_of(suffix)
        return ConfigError(f"{file}: {self.name}.{suffix} {text}" if file else f"{self.name}.{suffix} {text}")

    def take(self, suffix: str, dtypes: Sequence[torch.dtype], *shapes: Sequence[int]) -> Tensor:
        """Return a tensor of one of several dtypes and shapes."""
        if suffix not in self._left:
            others = ", ".join(sorted(self._left)) or "nothing"
            raise self.fault(suffix, f"is missing; the linear has {others}.")
        tensor = self._left.pop(suffix)
        if tensor.dtype not in dtypes:
            expected = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise self.fault(suffix, f"is {str(tensor.dtype).removeprefix('torch.')}; expected {expected}.")
        if tuple(tensor.shape) not in [tuple(shape) for shape in shapes]:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.fault(suffix, f"has shape {list(tensor.shape)}; expected {wanted}.")
        return tensor

    def peek(self, suffix: str) -> Tensor:
        """Return a tensor without taking it."""
        return self._left[suffix]

    def take_scales(self, suffix: str, *shapes: Sequence[int]) -> Tensor:
        """Return scales, all of which are finite."""
        return self.finite(suffix, self.take(suffix, FLOATS, *shapes))

    def finite(self, suffix: str, tensor: Tensor) -> Tensor:
        """Return a tensor unchanged; an error names the first number that is not finite; on the meta device, none."""
        if tensor.is_meta:
            return tensor
        are_finite = torch.isfinite(tensor.float())
        if not are_finite.all():
            place = (~are_finite).nonzero()[0].tolist()
            raise self.fault(suffix, f"has numbers that are NaN or infinite, the first at {place}.")
        return tensor

    def take_bias(self, out_features: int) -> Tensor | None:
        """Return the bias, if the linear has one."""
        return self.take("bias", FLOATS, (out_features,)) if "bias" in self else None

    def __contains__(self, suffix: str) -> bool:
        return suffix in self._left

    def skip(self, *suffixes: str) -> None:
        """Drop tensors that the weights do not need."""
        for suffix in suffixes:
            self._left.pop(suffix, None)

    def close(self) -> None:
        """Raise ConfigError if a tensor has not been taken."""
        if self._left:
            raise self.fault(min(self._left), "is a tensor that its format does not have.")


class LinearFormat(ABC):
    """How a checkpoint stores the weights of its linears."""

    @property
    @abstractmethod
    def marker(self) -> str:
        """The suffix of a tensor that a linear has only if it is stored in this format."""

    def read(self, tensors: LinearTensors, out_features: int, in_features: int) -> CheckpointLinear:
        """Return one linear, codes and scales bit for bit.

        Raises ConfigError, which names file and tensor, if a tensor is missing, surplus, of another dtype or shape, or
        has numbers that are not finite.
        """
        weight, permutation = self.read_weight(tensors, out_features, in_features)
        bias = tensors.take_bias(out_features)
        tensors.close()
        return CheckpointLinear(weight, permutation, bias)

    @abstractmethod
    def read_weight(
        self, tensors: LinearTensors, out_features: int, in_features: int
    ) -> tuple[PackedWeight, Tensor | None]:
        """Take the tensors of the weight, and return it with the permutation of its inputs."""


def whole_rows(in_features: int) -> int:
    """Return the group size that has all inputs of an output in one group."""
    return -(-in_features // BLOCK) * BLOCK
