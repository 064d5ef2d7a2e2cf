"""The benchmark itself: it ends in one JSON line, and reports no speed when an output is wrong."""

from __future__ import annotations

import json

import pytest

from bench import engine as bench
from specdec_fast import Engine

METHODS = ["plain", "oracle-eqspec", "oracle-exspec", "eqspec", "exspec"]


@pytest.fixture
def arguments(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One day"}\n{"prompt_ids": [0, 70, 71]}\n{"prompt": "Sums: 3"}\n')
    return ["--prompts", str(path), "--batch-sizes", "2", "--repeats", "1", "--max-new-tokens", "6"]


def test_last_line_is_the_report(arguments, capsys):
    bench.main(arguments)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["method"] for row in report["rows"]] == ["transformers", *METHODS]
    assert all(row["tokens_per_second"] > 0 for row in report["rows"])
    moved = {row["method"]: row["moved_megabytes"] for row in report["rows"]}
    assert moved["eqspec"] == moved["exspec"] == 0


def test_no_speed_when_an_output_is_wrong(arguments, capsys, monkeypatch):
    original = Engine.generate

    def wrong(self, *args, **kwargs):
        outputs = original(self, *args, **kwargs)
        outputs[1].token_ids[-1] += 1
        return outputs

    monkeypatch.setattr(Engine, "generate", wrong)
    with pytest.raises(SystemExit, match="plain at batch 2: 1 outputs differ"):
        bench.main(arguments)
    assert "tokens/s" not in capsys.readouterr().out
