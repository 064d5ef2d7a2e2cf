"""What the checks need from a GPU's own interface, with a counterpart on the CPU."""

from __future__ import annotations

import gc
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench.common.timing import Call, Clock
from specdec_fast.runner.graphs.capture import Capture, CudaCapture
from specdec_fast.runner.ragged_model import RaggedModel

WARM_UP_MS, MEASURE_MS = 10, 60  # milliseconds of triton's do_bench
CPU_SAMPLES = 3


def properties(device: torch.device) -> dict[str, Any]:
    """Return name, capability, memory and driver of the device."""
    if device.type != "cuda":
        return {"device": device.type}
    found = torch.cuda.get_device_properties(device)
    return {
        "device": found.name,
        "compute_capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_gib": found.total_memory / 2**30,
        "l2_mib": found.L2_cache_size / 2**20,
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
    }


def _driver_version() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return answer[0] if answer else None


def synchronize(device: torch.device) -> None:
    """Wait for all launched work; an error of a kernel is raised here at the latest."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def full_precision() -> None:
    """Compute fp32 products in fp32, without TF32."""
    torch.set_float32_matmul_precision("highest")


def as_graph(call: Call, device: torch.device) -> Call | None:
    """Return a call that runs ``call`` as one graph, without launches by the host; None if it cannot be recorded."""
    make = captures().get(device.type)
    if make is None:
        return None
    try:
        return make(device)(call).replay
    except RuntimeError:  # the call waits for the device, or copies from the host
        return None


def captures() -> dict[str, Callable[[torch.device], Capture]]:
    """Return the recorders of graphs by device type."""
    return {"cuda": CudaCapture}


def cold_seconds(call: Call, device: torch.device) -> float:
    """Return the median seconds of one call whose arguments are not in the cache.

    On a GPU, the device's events measure each call, and its L2 cache is overwritten between calls. That also gives the
    host time to launch ahead, if a call is one launch: see ``as_graph``. On a CPU, the wall clock measures, and no
    cache is overwritten.
    """
    if device.type == "cuda":
        from triton.testing import do_bench  # importing it needs a GPU's driver

        return float(do_bench(call, warmup=WARM_UP_MS, rep=MEASURE_MS, return_mode="median")) / 1e3
    clock = Clock(device)
    return median(clock.seconds(call) for _ in range(CPU_SAMPLES))


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill uninitialised memory with NaN and the largest integers, so that a kernel that does not write it is found."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)  # needed for the filling; nondeterminism only warns
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled


class ForwardMeter:
    """Adds up the time between the beginning and the end of every forward of some models, by the device's clock.

    If the host launches too slowly, its gaps inside a forward count as time of the forward. The time outside of all
    forwards is that of everything else in a step. A graph of a side of a step counts as a whole, with the choices in
    it. A program measures its forwards itself.
    """

    def __init__(self, models: list[RaggedModel], device: torch.device) -> None:
        self._device = device
        self._programs = [model.program for model in models if model.program is not None]
        self._models = [model for model in models if model.program is None]
        self._spans: list[tuple[Any, Any]] = []
        self._before = 0.0

    def __enter__(self) -> ForwardMeter:
        self._before = sum(program.seconds for program in self._programs)
        for model in self._models:
            model.forward = self._timed(model.forward)  # type: ignore[method-assign]
            if model.graphs is not None:
                model.graphs.draft = self._timed(model.graphs.draft)  # type: ignore[method-assign]
                model.graphs.verify = self._timed(model.graphs.verify)  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        for model in self._models:
            del model.forward  # the method of the class applies again
            if model.graphs is not None:
                del model.graphs.draft, model.graphs.verify

    def seconds(self) -> float:
        """Return the sum over all forwards so far."""
        synchronize(self._device)
        if self._device.type == "cuda":
            return sum(begin.elapsed_time(end) for begin, end in self._spans) / 1e3
        of_programs = sum(program.seconds for program in self._programs) - self._before
        return of_programs + sum(end - begin for begin, end in self._spans)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _timed(self, forward: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._now()
            result = forward(*args, **kwargs)
            self._spans.append((begin, self._now()))
            return result

        return timed
