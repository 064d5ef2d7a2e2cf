"""A replacement for CUDA graphs on a CPU, and a detector of code that would wait for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_fast.program import executors
from specdec_fast.runner import verification
from specdec_fast.runner.graphs.capture import CAPTURES, Captured, Run


class Repeated:
    """Records nothing: a replay calls again, and copies the result to the memory of the first one."""

    def __init__(self, device: torch.device) -> None:
        self.num_replayed = 0

    def __call__(self, run: Run) -> Captured:
        outputs = tuple(output.clone() for output in run())

        def replay() -> None:
            self.num_replayed += 1
            for output in outputs:
                output.fill_(torch.nan if output.is_floating_point() else -1)
            for output, found in zip(outputs, run(), strict=True):
                output.copy_(found)

        return Captured(replay, outputs)


def graphs_for_cpu(monkeypatch: Any) -> None:
    """Let engines on the CPU work as on a GPU: no programs, but graphs."""
    monkeypatch.setattr(executors, "EXECUTORS", {})
    monkeypatch.setitem(CAPTURES, "cpu", Repeated)


_READS = {"tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
_WAITING_OPS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "item"}


class Waits(TorchFunctionMode):
    """Notes what would wait for a GPU if the tensors were there, in ``found``: reads, and copies to it that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        # A device named "cpu" is the host, as on a machine with a GPU; a device taken from a tensor counts as the GPU.
        leaves_host = not isinstance((kwargs or {}).get("device"), (str, NoneType))
        if name == "numpy" and args[0].dtype == torch.uint8:  # the host's side of a transfer, see PackedArrays
            return function(*args, **(kwargs or {}))
        if name in _READS or name == "new_tensor" or (name in ("tensor", "as_tensor") and leaves_host):
            self.found.append(name)
        if name in ("__getitem__", "__setitem__") and _holds_list(args[1]):
            self.found.append(f"{name} by a list")
        return function(*args, **(kwargs or {}))


class _WaitingOps(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if name in _WAITING_OPS or by_mask:
            self.found.append(f"aten.{name}")
        return function(*args, **(kwargs or {}))


def _holds_list(index: Any) -> bool:
    return any(isinstance(x, list) for x in (index if isinstance(index, tuple) else (index,)))


@contextmanager
def waits(monkeypatch: Any) -> Iterator[list[str]]:
    """Note everything that would wait for a GPU; the one transfer that a step may wait for is called "to_host"."""
    functions = Waits()
    to_host = verification.to_host

    def noted(tensors: Any) -> list[list[int]]:
        seen = len(functions.found)
        values = to_host(tensors)
        functions.found[seen:] = ["to_host"]
        return values

    with monkeypatch.context() as patch, functions, _WaitingOps(functions.found):
        patch.setattr(verification, "to_host", noted)
        yield functions.found


def waits_in_steps(engine: Any, monkeypatch: Any, prompts: Any, params: Any) -> list[tuple[list[str], list[str]]]:
    """Return what would wait for a GPU, in every step of a run: in its launch, and in its end."""
    launch = engine.core._launch
    finish = engine.core._finish
    found_in: list[tuple[list[str], list[str]]] = []

    def watched_launch(*args: Any) -> Any:
        with waits(monkeypatch) as found:
            step = launch(*args)
        found_in.append((found, []))
        return step

    def watched_finish(step: Any) -> Any:
        with waits(monkeypatch) as found:
            emitted = finish(step)
        found_in[-1][1].extend(found)
        return emitted

    monkeypatch.setattr(engine.core, "_launch", watched_launch)
    monkeypatch.setattr(engine.core, "_finish", watched_finish)
    for output in engine.generate(prompts, params, progress=False):
        output.raise_for_error()
    assert len(found_in) > 5
    return found_in
