"""Small integers on their way between the host and a device: out without waiting, back in one piece."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy to ``device`` without waiting for what is under way there, as ``torch.tensor(..., device=...)`` would.

    Args:
        values: an array, which keeps its dtype and is not to be written to afterwards, or numbers.
        device: where the tensor is wanted.
        dtype: of numbers.

    """
    is_array = isinstance(values, np.ndarray)
    tensor = torch.from_numpy(values) if is_array else torch.tensor(values, dtype=dtype, device="cpu")
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":  # a copy out of memory that is not pinned may wait
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Read flat integer tensors of one device, all in one transfer: the only place of a step that waits for a device.

    Returns:
        The numbers of each.

    """
    if tensors[0].device.type == "cpu":  # nothing is transferred; joining them takes longer
        return [tensor.tolist() for tensor in tensors]
    return _apart(torch.cat(list(tensors)).tolist(), [len(tensor) for tensor in tensors])


def _apart(values: list[int], lengths: Sequence[int]) -> list[list[int]]:
    pieces, start = [], 0
    for length in lengths:
        pieces.append(values[start : start + length])
        start += length
    return pieces
