"""``bench.drafters``: one row per drafter, and the speed of plain decoding as its measure."""

from __future__ import annotations

import json

import pytest

from bench import drafters


def test_a_row_per_drafter_and_batch_size(capsys):
    drafters.main(
        ["--drafts", "ngram", "--num-prompts", "3", "--max-new-tokens", "6", "--batch-sizes", "2", "--repeats", "1"]
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["drafter"] for row in report["rows"]] == ["none", "ngram"]
    assert report["rows"][0]["tokens_per_step"] == report["rows"][0]["speedup_over_plain"] == 1
    assert report["rows"][1]["speedup_over_plain"] == pytest.approx(
        report["rows"][1]["tokens_per_second"] / report["rows"][0]["tokens_per_second"], rel=1e-2
    )
