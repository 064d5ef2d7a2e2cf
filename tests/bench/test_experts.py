"""``bench.experts`` times every way to compute a layer of experts, and reports no time for a wrong one."""

from __future__ import annotations

import json

import pytest
import torch

from bench import experts
from specdec_fast.ops.registry import all_ops

pytestmark = pytest.mark.skipif(
    all_ops()["linear"].why_unavailable("cpp") is not None, reason="programs run in the C++ extension"
)
SMALL = ["--shape", "smoke", "--rows", "1,5", "--repeats", "2", "--dtype", "float32"]


def test_every_way_is_timed(tmp_path, capsys):
    file = tmp_path / "experts.json"
    experts.main([*SMALL, "--json", str(file)])
    report = json.loads(file.read_text())
    assert [row["rows"] for row in report["rows"]] == [1, 5]
    for row in report["rows"]:
        assert all(row[f"{name}_milliseconds"] > 0 for name in ("ours", *experts.THEIRS))
        assert row["logit_distance"] < 1e-5
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report


def test_wrong_logits_have_no_speed(monkeypatch):
    apart = {"ours": lambda: torch.ones(2, 3), "eager": lambda: torch.full((2, 3), 1.01)}
    monkeypatch.setattr(experts.Layers, "calls", lambda *args: apart)
    with pytest.raises(SystemExit, match="no speed reported"):
        experts.main(SMALL)
