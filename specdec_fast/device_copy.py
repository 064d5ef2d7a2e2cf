"""Copies of small arrays between the host and a device: to the device without waiting, back in one transfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

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

    An array keeps its dtype, and the caller must not modify it afterwards. Other numbers get ``dtype``.
    """
    is_array = isinstance(values, np.ndarray)
    tensor = torch.from_numpy(values) if is_array else torch.tensor(values, dtype=dtype, device="cpu")
    return tensor if device.type == "cpu" else _copied(tensor, device)


def all_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy int32, int64 or float64 arrays to ``device`` in one transfer, without waiting for its queued work.

    The arrays, which the caller must not modify afterwards, are packed into one buffer of bytes. The results are views
    of its copy, with their dtypes and shapes, so nothing runs on the device to unpack it; the last of them frees it.
    """
    if device.type == "cpu":  # nothing is transferred, so packing would only cost time
        return [torch.from_numpy(array) for array in arrays]
    return _in_one_copy(arrays, device)


def _in_one_copy(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    starts, size = _starts([array.nbytes for array in arrays])
    packed = np.zeros(max(size, 1), np.uint8)  # slices of an empty tensor have stride 0, with which no view is possible
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    copy = _copied(torch.from_numpy(packed), device)
    return [
        copy[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def all_to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Copy tensors of one device to the host in one transfer, which waits for the device; they keep dtypes and shapes.

    On a CPU the arrays share the tensors' memory.
    """
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    return _in_one_copy_to_host(tensors)


def _in_one_copy_to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    # Those of wide numbers first, so that all begin at a multiple of their width.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    # A tensor of one number or none may have any stride, and bytes cannot be viewed with such a stride.
    flat = [tensors[i].contiguous().as_strided((tensors[i].numel(),), (1,)) for i in order]
    packed = torch.cat([tensor.view(torch.uint8) for tensor in flat]).cpu().numpy()
    arrays: dict[int, np.ndarray] = {}
    end = 0
    for i in order:
        start, end = end, end + tensors[i].numel() * tensors[i].element_size()
        dtype = torch.empty(0, dtype=tensors[i].dtype, device="cpu").numpy().dtype
        arrays[i] = packed[start:end].view(dtype).reshape(tensors[i].shape)
    return [arrays[i] for i in range(len(tensors))]


def _starts(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where each of several arrays begins in one buffer, and the size of the buffer, all in bytes."""
    starts = []
    size = 0
    for size_of_array in sizes:
        starts.append(size)
        size += -(-size_of_array // _ALIGNMENT) * _ALIGNMENT
    return starts, size


class PackedArrays:
    """Arrays that are sent to a device together, in one transfer, whenever the host has written new values.

    The tensors on the device stay the same, so a graph may read them. The host has two copies of the arrays and writes
    them in turn. So it writes the arrays of a step while the transfer of the step before may still run. ``shapes`` has
    dtype (int32, int64 or float64) and shape of each array, by name. All values are 0 at first.
    """

    def __init__(self, shapes: Mapping[str, tuple[Any, tuple[int, ...]]], device: torch.device) -> None:
        counts = {name: (np.dtype(dtype), int(np.prod(shape)), shape) for name, (dtype, shape) in shapes.items()}
        starts, size = _starts([dtype.itemsize * count for dtype, count, _ in counts.values()])
        self._packed = torch.zeros(size, dtype=torch.uint8, device=device)
        is_cuda = device.type == "cuda"
        self._turns = [torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=is_cuda) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._turns] if is_cuda else None
        self.on_device: dict[str, Tensor] = {}
        self._arrays: list[dict[str, np.ndarray]] = [{} for _ in self._turns]
        for start, (name, (dtype, count, shape)) in zip(starts, counts.items(), strict=True):
            end = start + dtype.itemsize * count
            self.on_device[name] = self._packed[start:end].view(_DTYPES[dtype]).view(shape)
            for arrays, packed in zip(self._arrays, self._turns, strict=True):
                arrays[name] = packed.numpy()[start:end].view(dtype).reshape(shape)
        self._turn = 0

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays to write before ``send``. They hold what was sent the time before last."""
        if self._sent is not None and not self._sent[self._turn].query():  # of two steps ago, so it has passed
            self._sent[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self) -> None:
        """Copy the arrays to the device without waiting for its queued work."""
        self._packed.copy_(self._turns[self._turn], non_blocking=True)
        if self._sent is not None:
            self._sent[self._turn].record(torch.cuda.current_stream(self._packed.device))
        self._turn = 1 - self._turn


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy from the host to another device without waiting.

    The memory that ``pin_memory`` allocates comes from PyTorch's cache. It records an event after the copy, and hands
    the memory out again only when the event has passed. So a step may write its arrays during the last step's copy.
    """
    if device.type == "cuda":  # a copy from memory that is not pinned may wait
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Joined(NamedTuple):
    """Several results in one tensor, as a graph leaves them."""

    values: Tensor  # ``[N]``, integers
    parts: tuple[slice, ...]  # which of them each result is


def joined(tensors: Sequence[Tensor]) -> Joined:
    """Join flat tensors of one device."""
    ends = list(accumulate(map(len, tensors), initial=0))
    return Joined(torch.cat(list(tensors)), tuple(map(slice, ends[:-1], ends[1:])))


class HostCopy:
    """A copy of results to the host that has begun; ``to_host`` waits for this copy, not for what is launched later."""

    def __init__(self, results: Sequence[Tensor] | Joined) -> None:
        values, self.parts = results if isinstance(results, Joined) else joined(results)
        is_cuda = values.device.type == "cuda"
        self.values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=is_cuda)
        self.values.copy_(values, non_blocking=is_cuda)  # without an event to wait for, the copy itself waits
        self._copied: torch.cuda.Event | None = None
        if is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(values.device))

    def wait(self) -> None:
        """Wait until the values have arrived."""
        if self._copied is not None:
            self._copied.synchronize()


def to_host(tensors: Sequence[Tensor] | Joined | HostCopy) -> list[list[int]]:
    """Return the values of flat integer tensors of one device, in one transfer; a step waits for a device here only."""
    if isinstance(tensors, HostCopy):
        tensors.wait()
    elif not isinstance(tensors, Joined):
        if tensors[0].device.type == "cpu":  # nothing is transferred, so concatenating would only cost time
            return [tensor.tolist() for tensor in tensors]
        tensors = joined(tensors)
    values = tensors.values.tolist()
    return [values[part] for part in tensors.parts]
