"""``bench.drafters``: one row per drafter, and the speed of plain decoding as its measure."""

from __future__ import annotations

import json

import pytest

import specdec_fast as sd
from bench import drafters
from bench.common.measurement import Measurement, MethodSetting
from specdec_fast.assets import demo_pair
from specdec_fast.results import DecodingStats
from support.medusa import named, random_heads, write_heads


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


def test_drafting_is_given_per_step():
    decoding = DecodingStats()

    def measured(name, draft_seconds, num_steps):
        own = Measurement([[1]], 1.0, {"draft": draft_seconds}, 0, num_steps, decoding)
        return MethodSetting(name, 1, lambda: own, 0), own

    runs = [measured(drafters.PLAIN, 0.0, 10), measured("ngram", 0.02, 10)]
    rows = drafters.rows_of({setting: [own, own] for setting, own in runs})
    assert [row["draft_ms_per_step"] for row in rows] == [0, 2]


@pytest.mark.parametrize("options", [[], ["--enforce-eager"]])
def test_pytorch_runs_all_forwards_where_that_is_wanted(monkeypatch, options):
    used, run = [], drafters.run

    def recorded(engine, *arguments):
        used.append(engine.config.enforce_eager)
        return run(engine, *arguments)

    monkeypatch.setattr(drafters, "run", recorded)
    short = ["--drafts", "ngram", "--num-prompts", "1", "--max-new-tokens", "2", "--batch-sizes", "1", "--repeats", "1"]
    drafters.main([*short, *options])
    assert set(used) == {bool(options)}


def test_a_tree_of_medusa_heads(capsys, tmp_path):
    config = json.loads((demo_pair() / "target" / "config.json").read_text())
    write_heads(tmp_path, named(random_heads(config["vocab_size"], config["hidden_size"], num_heads=2), "safetensors"))
    options = [
        "--drafts",
        f"medusa:{tmp_path}",
        "ngram",
        "--num-prompts",
        "1",
        "--max-new-tokens",
        "4",
        "--batch-sizes",
        "1",
    ]
    drafters.main([*options, "--repeats", "1", "--draft-tree", "[[0], [1]]"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["draft_tree"] == [[0], [1]]
    assert report["rows"][1]["num_drafts"] > 0
    with pytest.raises(sd.ConfigError, match="has the node"):
        drafters.main([*options, "--draft-tree", "[[0], [0, 0], [0, 0, 0]]"])
