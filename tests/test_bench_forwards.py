"""``bench.forwards``: both ways to run a forward are timed, and a wrong one is refused."""

from __future__ import annotations

import json

import pytest
import torch

from bench import forwards
from specdec_fast.ops.registry import all_ops

pytestmark = pytest.mark.skipif(
    all_ops()["linear"].why_unavailable("cpp") is not None, reason="programs run in the C++ extension"
)
SMALL = ["--pair", "smoke", "--batch-sizes", "1,3", "--num-draft-tokens", "2", "--context", "20", "--repeats", "2"]


def test_both_are_timed(tmp_path, capsys):
    file = tmp_path / "forwards.json"
    forwards.main([*SMALL, "--json", str(file)])
    report = json.loads(file.read_text())
    shapes = [(row["model"], row["batch_size"], row["rows_per_sequence"]) for row in report["rows"]]
    assert shapes == [(model, b, n) for model in ("target", "draft") for b in (1, 3) for n in (1, 3)]
    for row in report["rows"]:
        assert row["program_milliseconds"] > 0
        assert row["eager_milliseconds"] > 0
        assert row["logit_distance"] < 1e-5
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report


def test_wrong_logits_have_no_speed(monkeypatch):
    apart = {"program": lambda: torch.ones(2, 3), "eager": lambda: torch.full((2, 3), 1.01)}
    monkeypatch.setattr(forwards.Forwards, "calls", lambda *args: apart)
    with pytest.raises(SystemExit, match="no speed is reported"):
        forwards.main(SMALL)
