"""The gates of ``bench.gpu`` for other choices of launches: rows of linears, and the bits of whole forwards."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic

import pytest

pytest.importorskip("triton")

from bench.gpu_ import decoding as gpu_decoding
from bench.gpu_ import variants
from bench.gpu_.isolated_tasks import Progress
from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.program.triton.executor import TritonProgram
from specdec_fast.triton_kernels import linear, linear_tiles
from support.gpu_check import SMOKE
from support.programs import needs_programs

pytestmark = [needs_programs, pytest.mark.skipif(not INTERPRETING, reason="a GPU's run is bench.gpu")]
OTHER = "3 stages"
VERIFICATIONS = (("verification", 4), ("large verification", 4))


@pytest.fixture(autouse=True)
def _one_layer(monkeypatch):
    sizes = gpu_decoding.SMOKE
    draft, target = (replace(shape, num_hidden_layers=1) for shape in (sizes.draft, sizes.target))
    monkeypatch.setattr(gpu_decoding, "SMOKE", replace(sizes, draft=draft, target=target))
    few = {name: variants.VARIANTS[name] for name in (variants.DEFAULT, OTHER)}
    monkeypatch.setattr(variants, "VARIANTS", few)


def compared():
    progress = Progress(monotonic() + 600, lambda result: None)
    variants.run(SMOKE, progress)
    return progress.result


@pytest.mark.grid
def test_equal_bits_are_green():
    found = compared()
    assert not found["failures"]
    assert {(row["what"], row["variant"], row["rows"]) for row in found["rows"]} == {
        (what, name, rows) for what, rows in (("draft forward", 1), *VERIFICATIONS) for name in variants.VARIANTS
    }
    for row in found["rows"]:
        assert row["equal_bits"] == {"first": True, "replayed": True}
        assert "microseconds" not in row, "interpreted kernels are not timed"


@pytest.mark.grid
def test_other_bits_are_red(monkeypatch):
    own = linear.linear
    monkeypatch.setattr(linear, "linear", lambda rows, *args: own(rows, *args) + (len(rows) == 1))

    class Wrong(TritonProgram):
        def __call__(self, *args):
            return super().__call__(*args) + (linear_tiles.CHOICES.most_stages == 3)

    monkeypatch.setattr(variants, "TritonProgram", Wrong)
    failures = [(failure["what"], failure["why"].split(":")[0]) for failure in compared()["failures"]]
    assert failures == [
        *(("rows of linear 2048x48", name) for name in (variants.DEFAULT, OTHER)),
        *(
            (f"{what}: {OTHER}", "other logits, keys or values")
            for what in ("draft forward", "verification", "large verification")
        ),
    ]


def test_choices_end_with_the_variant():
    before = vars(linear_tiles.CHOICES).copy()
    for variant in variants.VARIANTS.values():
        with linear_tiles.chosen(**variant):
            assert vars(linear_tiles.CHOICES) == before | variant
        assert vars(linear_tiles.CHOICES) == before


def test_a_cpu_without_the_interpreter_compares_nothing(monkeypatch):
    monkeypatch.setattr(variants, "INTERPRETING", False)
    found = compared()
    assert not found["rows"]
    assert "only a GPU" in found["variants"]
