"""The benchmark of structured outputs compares them with plain decoding; forced tokens take fewer steps."""

from __future__ import annotations

import json

import pytest

from bench import structured

pytest.importorskip("xgrammar")


@pytest.mark.grid  # which compiles grammars
def test_structured_end_to_end(tmp_path, capsys):
    file = tmp_path / "structured.json"
    structured.main(["--num-prompts", "2", "--repeats", "1", "--threads", "1", "--json", str(file)])
    found = json.loads(file.read_text())
    steps = {(row["drafter"], row["forced"]): row["steps_per_token"] for row in found["rows"]}
    assert steps["none", False] == 1
    assert steps["ngram", True] < steps["ngram", False]
    assert found["mask_cost"] > 0
    assert "to plain decoding" in capsys.readouterr().out
