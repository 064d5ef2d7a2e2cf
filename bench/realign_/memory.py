"""The memory that a repad needs beside its cache: peak resident memory, measured in a new process."""

from __future__ import annotations

from typing import Any

import torch

from bench.common.peak_memory import RESET, RESET_PEAK, status_bytes
from bench.common.subprocesses import in_subprocess
from bench.realign_.methods import Shape, Step, layers_of, methods
from specdec_fast.ops import resolve


def extra_bytes(method: str, backend: str, shape: Shape, num_layers: int, step: Step) -> int | None:
    """Return by how many bytes peak memory rises while ``method`` runs once; None if the system does not report it.

    Args:
        method: a name in ``methods.methods``.
        backend: backend of the op, for ``fused``.
        shape, num_layers, step: the cache and its moves.

    """
    if not RESET.exists():
        return None
    return in_subprocess(_measure, method, backend, shape, num_layers, step)


def _measure(method: str, backend: str, shape: Shape, num_layers: int, step: Step) -> int:
    repad = methods(resolve(torch.device("cpu"), backend).realign_kv_)[method]
    small = Shape("warm-up", 1, 1, 1, shape.dtype)
    for _ in range(2):  # the first run loads code and starts threads, which are not the method's memory
        repad(layers_of(small.allocate(1, len(step.moves), step.cache_columns)), step.moves, step.num_columns)
    cache = layers_of(shape.allocate(num_layers, len(step.moves), step.cache_columns))
    RESET.write_text(RESET_PEAK)
    before = status_bytes("VmRSS")
    result: Any = repad(cache, step.moves, step.num_columns)
    peak = status_bytes("VmHWM")
    del result
    return peak - before
