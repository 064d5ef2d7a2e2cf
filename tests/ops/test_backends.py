"""Which backend serves an op, and what is said where none can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec_fast.errors import BackendError, ConfigError
from specdec_fast.ops import AUTO, BACKENDS, all_ops, availability, registry, resolve
from support.op_cases import CPU
from support.op_checks import device_for


def test_named_backend_that_cannot_run_says_why(monkeypatch):
    broken = replace(BACKENDS["cpp"], why_unavailable=lambda: "the moon is full; wait for the new one")
    monkeypatch.setitem(registry.BACKENDS, "cpp", broken)
    with pytest.raises(BackendError, match=r"backend 'cpp' cannot serve .*the moon is full; wait for"):
        resolve(CPU, "cpp")
    assert set(resolve(CPU, AUTO).chosen.values()) == {"torch"}, "auto falls back"
    reasons = {(op, backend): reason for op, backend, reason in availability()}
    assert reasons["verify_chain", "torch"] is None
    assert reasons["verify_chain", "cpp"] == "the moon is full; wait for the new one"


def test_auto_prefers_the_compiled_ops():
    device_for(all_ops()["verify_chain"], "cpp")
    wanted = {op.name: "cpp" if "cpp" in op.implementations else "torch" for op in all_ops().values()}
    assert resolve(CPU).chosen == wanted


def test_interpreted_kernels_serve_no_gpu():
    # the interpreter copies tensors to the host, but not what a list of addresses points to
    if not registry.INTERPRETING:
        pytest.skip("TRITON_INTERPRET is not set")
    with pytest.raises(BackendError, match="'triton' runs on cpu, not cuda"):
        resolve(torch.device("cuda"), "triton")
    assert "triton" not in resolve(torch.device("cuda")).chosen.values()
    assert set(resolve(CPU, "triton").chosen.values()) == {"triton"}


def test_backend_without_the_op_says_which_have_it():
    op = replace(all_ops()["verify_chain"], implementations={"torch": "nowhere:nothing"})
    with pytest.raises(BackendError, match=r"no implementation of this op \(there are: torch\)"):
        op.load("cpp")


def test_backend_of_another_device_is_refused():
    with pytest.raises(BackendError, match="runs on cpu, not cuda"):
        resolve(torch.device("cuda"), "cpp")


def test_unknown_backend_lists_the_known():
    known = ", ".join([AUTO, *BACKENDS])
    with pytest.raises(ConfigError, match=f"backend='abacus': expected one of {known}"):
        resolve(CPU, "abacus")


class Elsewhere(Tensor):
    """A tensor whose device is the second GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 1)


def test_kernels_are_launched_on_the_device_of_their_arguments(monkeypatch):
    """Triton launches on the current device; a model may be on another."""
    current, seen = [0], []

    @contextmanager
    def device(where: torch.device) -> Iterator[None]:
        before = current[0]
        current[0] = where.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(registry, "_imported", lambda path: lambda *args, **kwargs: seen.append(current[0]))
    monkeypatch.setitem(BACKENDS, "triton", replace(BACKENDS["triton"], why_unavailable=lambda: None))
    there = torch.ones(2).as_subclass(Elsewhere)
    in_triton = [op for op in all_ops().values() if "triton" in op.implementations]
    for op in in_triton:
        op.load("triton", check=False)(None, [there], there, shifts=there)
        op.load("triton", check=False)(layers=[there], starts=there)
        op.load("triton", check=False)(torch.ones(2))
    assert seen == [1, 1, 0] * len(in_triton)
    assert current == [0]
