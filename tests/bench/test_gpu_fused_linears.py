"""The gate of ``bench.gpu`` for programs of fewer launches: their bits are those of separate launches."""

from __future__ import annotations

import importlib
from dataclasses import replace
from time import monotonic

import pytest

pytest.importorskip("triton")

from bench.gpu_ import decoding as gpu_decoding
from bench.gpu_ import fused_linears
from bench.gpu_.isolated_tasks import Progress
from specdec_fast.ops.registry import INTERPRETING
from support.gpu_check import SMOKE
from support.programs import needs_programs

pytestmark = [needs_programs, pytest.mark.skipif(not INTERPRETING, reason="a GPU's run is bench.gpu")]


@pytest.fixture(autouse=True)
def _one_batch_size(monkeypatch):
    monkeypatch.setattr(gpu_decoding, "SMOKE", replace(gpu_decoding.SMOKE, prompts={1: 1}))


def compared():
    progress = Progress(monotonic() + 600, lambda result: None)
    fused_linears.run(SMOKE, progress)
    return progress.result


@pytest.mark.grid
def test_equal_bits_are_green():
    found = compared()
    assert not found["failures"]
    assert [(row["what"], row["rows"]) for row in found["rows"]] == [
        ("draft forward", 1),
        ("verification", 4),
    ]
    for row in found["rows"]:
        assert row["equal_bits"] == {"fused linears": True, "fused linears and attention": True}
        assert "microseconds" not in row, "interpreted kernels are not timed"


@pytest.mark.grid
def test_other_bits_are_red(monkeypatch):
    module = importlib.import_module("specdec_fast.program.triton.executor")
    make = module.fused_step

    def wrong(*args):
        own = make(*args)

        def launched(forward):
            own(forward)
            for tensor in forward.memory.values():
                tensor[-1, -1] += tensor[-1, -1].abs().clamp(min=1)

        return launched

    monkeypatch.setattr(module, "fused_step", wrong)
    found = compared()
    assert len(found["failures"]) == 2 * len(found["rows"]) == 4


def test_a_cpu_without_the_interpreter_compares_nothing(monkeypatch):
    monkeypatch.setattr(fused_linears, "INTERPRETING", False)
    found = compared()
    assert not found["rows"]
    assert "only a GPU" in found["fused_linears"]
