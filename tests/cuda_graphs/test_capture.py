"""How ``CudaCapture`` uses ``torch.cuda``, recorded by a replacement for it, so that no GPU is needed."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from specdec_fast.host_calls import call_host
from specdec_fast.runner.graphs.capture import CudaCapture


@pytest.fixture
def calls(monkeypatch):
    """All calls of ``torch.cuda``, in order."""
    noted = []

    class Stream:
        number = 0

        def __init__(self, name=None):
            Stream.number += name is None
            self.name = name or f"stream {Stream.number}"

        def wait_stream(self, other):
            noted.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self):
            noted.append("replay")

    @contextmanager
    def within(*names, **options):
        noted.append(" ".join(["enter", *map(str, names), *map(str, options.values())]))
        yield
        noted.append("leave")

    mode = {"mode": 1}
    fake = SimpleNamespace(
        device=within,
        graph_pool_handle=lambda: "memory",
        current_stream=lambda: Stream("current"),
        Stream=Stream,
        stream=lambda stream: within(stream.name),
        CUDAGraph=Graph,
        graph=lambda graph, pool, stream, capture_error_mode: within(
            "recording", pool, stream.name, capture_error_mode
        ),
        get_sync_debug_mode=lambda: mode["mode"],
        set_sync_debug_mode=lambda value: (noted.append(f"waiting: {value}"), mode.update(mode=value)),
    )
    monkeypatch.setattr(torch, "cuda", fake)
    return noted


def test_it_warms_up_and_records_on_its_own_stream_and_lets_nothing_wait_the_second_time(calls):
    capture = CudaCapture(torch.device("cuda", 1))
    calls.clear()
    captured = capture(lambda: calls.append("run") or (torch.ones(2),))
    captured.replay()
    assert calls == [
        "enter cuda:1",
        *["stream 1 waits for current", "enter stream 1", "run", "waiting: error", "run", "leave"],
        *["waiting: 1", "current waits for stream 1"],
        *["enter recording memory stream 1 thread_local", "run", "leave"],
        "leave",
        "replay",
    ]
    assert torch.equal(captured.output[0], torch.ones(2))


def test_a_wait_is_reported_and_the_device_left_as_it_was(calls):
    def run():
        if "waiting: error" in calls:
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="called a synchronizing"):
        CudaCapture(torch.device("cuda", 0))(run)
    assert calls[-2:] == ["waiting: 1", "current waits for stream 1"]
    assert not any(call.startswith("enter recording") for call in calls)
    assert gc.isenabled()


def test_each_object_records_all_its_graphs_on_one_stream_of_its_own(calls):
    """Destroying a graph frees the cuBLAS workspace of its stream, which others must not need."""
    captures = [CudaCapture(torch.device("cuda", 0)) for _ in range(2)]
    for capture in (*captures, *captures):
        capture(lambda: torch.ones(1))
    recorded = [call for call in calls if call.startswith("enter recording")]
    assert recorded == [f"enter recording memory stream {i} thread_local" for i in (1, 2, 1, 2)]
    warmed_up = [call for call in calls if call.startswith("enter stream")]
    assert warmed_up == [f"enter stream {i}" for i in (1, 2, 1, 2)]


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_meanwhile(calls, enabled):
    """Destroying a graph while another one is recorded would break the recording."""
    seen = []

    def run():
        seen.append(gc.isenabled())
        return torch.ones(1)

    (gc.enable if enabled else gc.disable)()
    try:
        CudaCapture(torch.device("cuda", 0))(run)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert seen == [False] * 3


def test_calls_of_the_host_are_made_between_graphs(calls):
    """Those that may wait for the device, such as exchanges between ranks by way of the host."""

    def run():
        calls.append("kernels")
        call_host(lambda: calls.append("call"))
        calls.append("more kernels")
        return (torch.ones(2),)

    capture = CudaCapture(torch.device("cuda", 0))
    calls.clear()
    captured = capture(run)
    piece = "enter recording memory stream 1 thread_local"
    assert calls[calls.index("waiting: error") :] == [
        *["waiting: error", "kernels", "waiting: default", "call", "waiting: error", "more kernels", "leave"],
        *["waiting: 1", "current waits for stream 1"],
        *[piece, "kernels", "leave", piece, "more kernels", "leave"],  # not the call: its numbers are not there yet
        "leave",
    ]
    calls.clear()
    captured.replay()
    assert calls == ["replay", "call", "replay"]
    call_host(lambda: calls.append("at once"))
    assert calls[-1] == "at once"
