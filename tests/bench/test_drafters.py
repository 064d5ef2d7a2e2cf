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


@pytest.fixture
def medusa(tmp_path):
    config = json.loads((demo_pair() / "target" / "config.json").read_text())
    write_heads(tmp_path, named(random_heads(config["vocab_size"], config["hidden_size"], num_heads=2), "safetensors"))
    return f"medusa:{tmp_path}"


def options_of(draft):
    short = ["--num-prompts", "1", "--max-new-tokens", "4", "--batch-sizes", "1", "--repeats", "1"]
    return ["--drafts", draft, "ngram", *short]


def test_a_tree_of_medusa_heads(capsys, medusa):
    drafters.main([*options_of(medusa), "--draft-tree", "[[0], [1]]"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["draft_tree"] for row in report["rows"]] == [None, [[0], [1]], None]
    assert report["rows"][1]["num_drafts"] > 0
    with pytest.raises(sd.ConfigError, match="has the node"):
        drafters.main([*options_of(medusa), "--draft-tree", "[[0], [0, 0], [0, 0, 0]]"])


@pytest.mark.grid
def test_several_trees_in_one_run(capsys, medusa):
    """A drafter that reads no trees, and plain decoding, run once."""
    drafters.main([*options_of(medusa), "--draft-tree", "chain", "[[0], [1], [2]]", "2"])
    *table, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["rows"]
    trees = [(row["drafter"], row["draft_tree"]) for row in rows]
    assert trees == [
        ("none", None),
        (medusa, "chain"),
        (medusa, [[0], [1], [2]]),
        (medusa, 2),
        ("ngram", None),
    ]
    assert rows[0]["draft_tokens_per_step"] == 0
    # The last step may draft fewer nodes, because it may emit fewer tokens.
    assert 2 < rows[2]["draft_tokens_per_step"] <= 3
    assert all(rows[i]["draft_tokens_per_step"] <= 2 for i in (1, 3))
    assert all(name in "\n".join(table) for name in ("chain", "3 paths"))
