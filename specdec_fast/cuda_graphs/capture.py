"""Recording work on a CUDA device, to run it again in one launch. Not yet run on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class Captured(NamedTuple):
    """Recorded work.

    Attributes:
        replay: runs it again, on the tensors that it was recorded with; nothing waits for it.
        output: what it computes, in the same memory every time.

    """

    replay: Callable[[], None]
    output: Tensor


Capture = Callable[[Callable[[], Tensor]], Captured]


class CudaCapture:
    """Records calls as CUDA graphs that share one memory pool, for graphs of which never two run at once.

    They overwrite one another's intermediate results, and a result may lie where another graph computes: it is to be
    read before any other of them runs.

    All of them are warmed up and recorded on one stream, which is this object's own. cuBLAS keeps a workspace per
    stream, whose address a graph contains, and destroying a graph frees the workspace of its stream (torch 2.13, issue
    193402 of PyTorch): on the stream that ``torch.cuda.graph`` shares between all its users, any of them would take
    it from these graphs. For the same reason graphs of one object are to be destroyed together.

    Args:
        device: a CUDA device.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._memory = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()

    def __call__(self, run: Callable[[], Tensor]) -> Captured:
        """Record what ``run`` launches; it is called three times, and must do the same each time.

        Raises:
            RuntimeError: ``run`` waits for the device, or does something else that cannot be recorded.

        """
        with torch.cuda.device(self._device), _nothing_collected():
            self._warm_up(run)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process may go on allocating meanwhile: "thread_local".
            with torch.cuda.graph(graph, self._memory, stream=self._stream, capture_error_mode="thread_local"):
                output = run()
        return Captured(graph.replay, output)

    def _warm_up(self, run: Callable[[], Tensor]) -> None:
        """Run twice: once to compile kernels and make handles, then to see that nothing waits.

        A wait would break the recording as well, but says here where it is.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        mode = torch.cuda.get_sync_debug_mode()
        try:
            with torch.cuda.stream(self._stream):
                run()
                torch.cuda.set_sync_debug_mode("error")
                run()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            current.wait_stream(self._stream)


# By device type; CPUs have programs instead.
CAPTURES: dict[str, Callable[[torch.device], Capture]] = {"cuda": CudaCapture}


def capture_for(device: torch.device) -> Capture | None:
    """Return what records forwards as graphs on ``device``; None where nothing does."""
    make = CAPTURES.get(device.type)
    return None if make is None else make(device)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keep the garbage collector from destroying graphs or events meanwhile, which would break a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
