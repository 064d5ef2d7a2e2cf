"""Sums over the ranks of a process group whose bits depend on no size: fp32, in the order of the ranks, rounded once.

The sums of communication libraries (``all_reduce``) have an order that depends on the size of the message, so on the
batch. Processes of one host exchange numbers of a CPU through memory that they share, others by ``all_gather``; both
give the same bits.
"""

from __future__ import annotations

import importlib
import os
import socket
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from specdec_fast.host_calls import call_host

CHUNK_BYTES = 1 << 20  # that a rank sends at a time; two chunks per rank are shared
ABORTED = "an exchange between ranks was aborted"  # what the C++ extension raises in ranks that wait for a failed one
TIMEOUT_SECONDS = 600.0  # after which a rank that waits for another one raises an error
_SHARED_FOLDERS = ("/dev/shm", tempfile.gettempdir())


class Ranks(Protocol):
    """The processes of a sharded model. All of them make the same calls in the same order.

    Attributes:
        rank: of this process.
        size: their number.
        native: what a forward program in C++ exchanges numbers with; None if only PyTorch can.
    """

    rank: int
    size: int
    native: Any | None

    def sum(self, rows: Tensor) -> Tensor:
        """Return the sum over all ranks of ``rows``, of any shape; it is the same in every process."""

    def concatenate(self, rows: Tensor, widths: list[int]) -> Tensor:
        """Return the ``[..., width]`` of all ranks one after the other along the last axis; ``widths`` by rank."""


class GroupRanks(Ranks):
    """Exchanges by ``torch.distributed``: NCCL, or Gloo.

    A CUDA graph records those of NCCL, which are kernels. Gloo copies the numbers through the host.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        self.native = None
        self._is_recorded = distributed.Backend.NCCL in distributed.get_backend(group)

    def sum(self, rows: Tensor) -> Tensor:
        total, *others = [part.float() for part in self._gathered(rows.contiguous())]
        for part in others:
            total = total + part
        return total.to(rows.dtype)

    def concatenate(self, rows: Tensor, widths: list[int]) -> Tensor:
        missing = max(widths) - rows.shape[-1]
        parts = self._gathered(torch.nn.functional.pad(rows, (0, missing)).contiguous())
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)

    def _gathered(self, rows: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(rows) for _ in range(self.size)]

        def gather() -> None:
            distributed.all_gather(parts, rows, group=self._group)

        if self._is_recorded:
            gather()
        else:
            call_host(gather)
        return parts


class SharedMemoryRanks(Ranks):
    """Exchanges through memory that the processes of one host share; ``csrc/program/rank_exchange.h``."""

    def __init__(self, group: Any, memory: Tensor) -> None:
        self._codes: dict[torch.dtype, int] = importlib.import_module("specdec_fast.ops.cpp").DTYPE_CODES
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        self._memory = memory  # the object below writes there
        self.native = _extension().RankExchange(memory.data_ptr(), CHUNK_BYTES, self.rank, self.size, TIMEOUT_SECONDS)

    def sum(self, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        self.native.sum(self._codes[rows.dtype], rows.data_ptr(), out.data_ptr(), rows.numel())
        return out

    def concatenate(self, rows: Tensor, widths: list[int]) -> Tensor:
        rows = rows.contiguous()
        out = rows.new_empty(*rows.shape[:-1], sum(widths))
        sizes = [width * rows.element_size() for width in widths]
        self.native.concatenate(rows.data_ptr(), out.data_ptr(), rows.numel() // rows.shape[-1], sizes)
        return out


def connected(group: Any, device: torch.device) -> Ranks:
    """Return the ranks of a process group, each of which makes this call.

    Processes of one host whose model is on a CPU share memory, if the C++ extension is there in all of them.
    """
    can_share = device.type == "cpu" and _has_extension()
    hosts: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(hosts, (_host(), can_share), group=group)
    if len(set(hosts)) > 1 or not can_share:
        return GroupRanks(group)
    memory = _shared_memory(group)
    return GroupRanks(group) if memory is None else SharedMemoryRanks(group, memory)


def _extension() -> Any:
    return importlib.import_module("specdec_fast._C")  # an installation may lack it


def _has_extension() -> bool:
    try:
        _extension()
    except ImportError:
        return False
    return True


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"


def _shared_memory(group: Any) -> Tensor | None:
    """Return zeros that all ranks share; None if there is no memory for them, or a rank cannot map them."""
    num_bytes = _extension().RankExchange.bytes_for(distributed.get_world_size(group), CHUNK_BYTES)
    is_first = distributed.get_rank(group) == 0
    shared = [_reserved(num_bytes) if is_first else None]
    distributed.broadcast_object_list(shared, group=group, group_src=0)
    path = shared[0]
    memory: Tensor | None = None
    if path is not None and Path(path).exists():
        memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    mapped: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(mapped, memory is not None, group=group)
    if is_first and path is not None:
        Path(path).unlink()  # what is mapped stays until the last process ends
    return memory if all(mapped) else None


def _reserved(num_bytes: int) -> str | None:
    for folder in _SHARED_FOLDERS:
        try:
            descriptor, path = tempfile.mkstemp(prefix="specdec_fast-", dir=folder)
        except OSError:
            continue
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)  # a page that is missing later would kill the process
            return path
        except OSError:
            Path(path).unlink()
        finally:
            os.close(descriptor)
    return None
