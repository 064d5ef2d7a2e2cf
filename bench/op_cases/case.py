"""Arguments of an op, drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One set of arguments."""

    name: str  # id of the test
    why: str  # the defect that this case would find; for a benchmark, the workload that it represents
    draw: Callable[[torch.Generator, torch.dtype], dict[str, Any]]  # returns the keyword arguments, on the CPU

    def make(self, generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Return the keyword arguments: the same numbers and strides on every device."""
        return with_tensors(self.draw(generator, dtype), lambda path, tensor: _moved(tensor, device))


@dataclass(frozen=True)
class OpCases:
    """What tests and benchmarks know of an op besides its declaration."""

    cases: tuple[Case, ...]  # arguments for which every implementation must agree with the oracle
    benchmarks: tuple[Case, ...]  # arguments of the sizes of real models, for python -m bench.ops
    bytes_moved: Callable[..., int]  # returns the least number of bytes to read and write, for given arguments
    # benchmarks of given numbers of rows; None if rows are not what an op's sizes differ in
    benchmarks_of_rows: Callable[[Iterable[int]], tuple[Case, ...]] | None = None


def with_tensors(value: Any, change: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """Return ``value`` with every tensor in it replaced by what ``change`` makes of its path and it.

    A path is ``batch.seqused_k``, for example.
    """
    if isinstance(value, Tensor):
        return change(path, value)
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.init]
        return replace(value, **{name: with_tensors(getattr(value, name), change, f"{path}.{name}") for name in names})
    if isinstance(value, dict):
        return {name: with_tensors(each, change, name) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(each, change, f"{path}.{i}") for i, each in enumerate(value))
    return value


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    moved = tensor.to(device)
    if moved.stride() == tensor.stride():
        return moved
    storage = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    return storage.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
