"""Copies of small arrays between the host and a device: to the device without waiting, back in one transfer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy to ``device`` without waiting for its queued work; ``torch.tensor(..., device=...)`` would wait.

    Args:
        values: numbers, or an array. An array keeps its dtype, and the caller must not modify it afterwards.
        device: device of the result.
        dtype: dtype of the result if ``values`` are numbers.

    """
    is_array = isinstance(values, np.ndarray)
    tensor = torch.from_numpy(values) if is_array else torch.tensor(values, dtype=dtype, device="cpu")
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":  # a copy from memory that is not pinned may wait
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Copy flat integer tensors of one device to the host, in one transfer. No other part of a step waits for a device.

    Returns:
        The values of each tensor.

    """
    if tensors[0].device.type == "cpu":  # nothing is transferred, so concatenating would only cost time
        return [tensor.tolist() for tensor in tensors]
    return _split(torch.cat(list(tensors)).tolist(), [len(tensor) for tensor in tensors])


def _split(values: list[int], lengths: Sequence[int]) -> list[list[int]]:
    pieces, start = [], 0
    for length in lengths:
        pieces.append(values[start : start + length])
        start += length
    return pieces
