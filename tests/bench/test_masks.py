"""bench.masks runs at a small size: every case is measured, and every text reaches its limit."""

from __future__ import annotations

import json

import pytest

from bench import masks

pytest.importorskip("xgrammar")


@pytest.mark.grid  # which compiles grammars
def test_every_case_is_measured(capsys):
    sizes = ["--pair", "10m", "--dtype", "float32", "--batch-size", "2", "--max-new-tokens", "6"]
    masks.main([*sizes, "--draft", "ngram", "--repeats", "1", "--threads", "1"])
    table, _, result = capsys.readouterr().out.strip().rpartition("\n")
    found = json.loads(result)
    assert [row["case"] for row in found["rows"]] == ["no field", "a bias", "any text", "a JSON string"]
    assert all(0 < row["mask_milliseconds"] < row["step_milliseconds"] for row in found["rows"][2:])
    assert found["rows"][0]["mask_milliseconds"] == found["rows"][1]["mask_milliseconds"] == 0
    assert "a JSON string" in table


def test_the_tokenizer_reads_every_text():
    tokenizer = masks.random_tokenizer(400)
    text = 'some "words",\n\x1b and ß'
    assert len(tokenizer) == 400
    assert tokenizer.decode(tokenizer(text).input_ids) == text
