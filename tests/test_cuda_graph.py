"""How ``CudaCapture`` uses ``torch.cuda``, told by a stand-in for it: no GPU has run it yet."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from specdec_fast.ops import cuda_graph


@pytest.fixture
def calls(monkeypatch):
    """Everything that is asked of the device, in order."""
    noted = []

    class Stream:
        def __init__(self, name="beside"):
            self.name = name

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
        graph=lambda graph, pool, capture_error_mode: within("recording", pool, capture_error_mode),
        get_sync_debug_mode=lambda: mode["mode"],
        set_sync_debug_mode=lambda value: (noted.append(f"waiting: {value}"), mode.update(mode=value)),
    )
    monkeypatch.setattr(cuda_graph.torch, "cuda", fake)
    return noted


def test_it_warms_up_beside_and_lets_nothing_wait_the_second_time(calls):
    capture = cuda_graph.CudaCapture(torch.device("cuda", 1))
    calls.clear()
    captured = capture(lambda: calls.append("run") or torch.ones(2))
    captured.replay()
    assert calls == [
        "enter cuda:1",
        *["beside waits for current", "enter beside", "run", "waiting: error", "run", "leave"],
        *["waiting: 1", "current waits for beside"],
        *["enter recording memory thread_local", "run", "leave"],
        "leave",
        "replay",
    ]
    assert torch.equal(captured.output, torch.ones(2))


def test_what_waits_is_told_and_the_device_left_as_it_was(calls):
    def run():
        if "waiting: error" in calls:
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="called a synchronizing"):
        cuda_graph.CudaCapture(torch.device("cuda", 0))(run)
    assert calls[-2:] == ["waiting: 1", "current waits for beside"]
    assert not any(call.startswith("enter recording") for call in calls)
