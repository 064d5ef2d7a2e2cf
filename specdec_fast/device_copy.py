"""Copies of small arrays between the host and a device: to the device without waiting, back in one transfer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Bytes. Triton compiles kernels again for pointers that are not multiples of 16, and they load narrower pieces.
_ALIGNMENT = 16

_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
}


def to_device(values: np.ndarray | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy to ``device`` without waiting for its queued work; ``torch.tensor(..., device=...)`` would wait.

    Args:
        values: numbers, or an array. An array keeps its dtype, and the caller must not modify it afterwards.
        device: device of the result.
        dtype: dtype of the result if ``values`` are numbers.

    """
    is_array = isinstance(values, np.ndarray)
    tensor = torch.from_numpy(values) if is_array else torch.tensor(values, dtype=dtype, device="cpu")
    return tensor if device.type == "cpu" else _copied(tensor, device)


def all_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy several arrays to ``device`` in one transfer, without waiting for its queued work.

    The arrays are packed into one buffer of bytes. The results are views of its copy, so nothing runs on the device to
    unpack it, and the copy is freed with the last of them.

    Args:
        arrays: int32, int64 or float64, of any shapes; the caller must not modify them afterwards.
        device: device of the results.

    Returns:
        A tensor per array, with its dtype and shape.

    """
    if device.type == "cpu":  # nothing is transferred, so packing would only cost time
        return [torch.from_numpy(array) for array in arrays]
    return _in_one_copy(arrays, device)


def _in_one_copy(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Pack, copy, and return views of the copy."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = np.zeros(size, np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    copy = _copied(torch.from_numpy(packed), device)
    return [
        copy[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy from the host to another device without waiting.

    The memory that ``pin_memory`` allocates comes from PyTorch's cache. It records an event after the copy, and hands
    the memory out again only when the event has passed. So a step may write its arrays while the copy of the step
    before still runs.
    """
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
