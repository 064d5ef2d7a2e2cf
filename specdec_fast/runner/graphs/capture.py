"""Recording work on a CUDA device, to run it again in one launch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_fast.host_calls import HostCall, host_calls_taken_by


class Captured(NamedTuple):
    """Recorded work.

    Attributes:
        replay: runs the work again, on the tensors with which it was recorded, without waiting for the device.
        output: the results, in the same memory every time.

    """

    replay: Callable[[], None]
    output: tuple[Tensor, ...]


Run = Callable[[], tuple[Tensor, ...]]
Capture = Callable[[Run], Captured]


class CudaCapture:
    """Records calls as CUDA graphs that share one memory pool; no two of these graphs may run at once.

    The graphs overwrite one another's intermediate results, and another graph may overwrite a result. So the caller
    reads a result before it runs another graph.

    The object warms up and records all its graphs on one stream of its own. cuBLAS keeps a workspace per stream, and a
    graph contains its address. Destroying a graph frees the workspace of its stream (torch 2.13, issue 193402 of
    PyTorch). On the stream that all users of ``torch.cuda.graph`` share, another user's graph could free the workspace
    of these graphs. For the same reason the graphs of one object must be destroyed together.

    Calls of the host amid the work (``call_host``) divide it: a replay launches a graph, makes a call, launches the
    next graph, and so on.

    Args:
        device: a CUDA device.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._memory = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()

    def __call__(self, run: Run) -> Captured:
        """Record what ``run`` launches. ``run`` is called three times, and must launch the same each time.

        Raises:
            RuntimeError: ``run`` waits for the device, or does something else that cannot be recorded.

        """
        with torch.cuda.device(self._device), _nothing_collected():
            self._warm_up(run)
            return self._recorded(run)

    def _recorded(self, run: Run) -> Captured:
        pieces: list[HostCall] = []
        with ExitStack() as recording:

            def begin() -> None:
                graph = torch.cuda.CUDAGraph()
                # "thread_local": other threads of the process may allocate meanwhile.
                piece = torch.cuda.graph(graph, self._memory, stream=self._stream, capture_error_mode="thread_local")
                recording.enter_context(piece)
                pieces.append(graph.replay)

            def divide(call: HostCall) -> None:  # the call is not made: what it reads has not been computed
                recording.close()
                pieces.append(call)
                begin()

            begin()
            with host_calls_taken_by(divide):
                output = run()
        return Captured(pieces[0] if len(pieces) == 1 else partial(_in_turn, pieces), output)

    def _warm_up(self, run: Run) -> None:
        """Run twice: first to compile kernels and make handles, then to check that nothing waits for the device.

        A wait would also break the recording, but only here does the error show where it is.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        mode = torch.cuda.get_sync_debug_mode()
        try:
            with torch.cuda.stream(self._stream):
                run()
                torch.cuda.set_sync_debug_mode("error")
                with host_calls_taken_by(_waiting):
                    run()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            current.wait_stream(self._stream)


def _waiting(call: HostCall) -> None:
    """Make a call that may wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _in_turn(pieces: list[HostCall]) -> None:
    for piece in pieces:
        piece()


# Recorders of graphs by device type. CPUs have programs instead.
CAPTURES: dict[str, Callable[[torch.device], Capture]] = {"cuda": CudaCapture}


def capture_for(device: torch.device, *others: torch.device) -> Capture | None:
    """Return what records forwards as graphs on ``device``; None where nothing does, or if they use others as well."""
    make = None if others else CAPTURES.get(device.type)
    return None if make is None else make(device)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Disable the garbage collector: if it destroyed a graph or an event meanwhile, the recording would break."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
