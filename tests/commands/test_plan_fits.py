"""``plan --fit`` with a table of ``bench.laws``: which drafter to train, and what is refused."""

from __future__ import annotations

import json
import re
from math import nan

import pytest

from specdec_fast.cli import main
from support import laws
from support.source_tree import ROOT


def fitted(tmp_path, data, *flags):
    path = tmp_path / "laws.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return main(["plan", "--fit", str(path), *flags])


def test_a_table_of_laws_says_which_drafter_to_train(capsys, tmp_path):
    flags = ["--training-tokens", "100000", "--batch-sizes", "1,8"]
    assert fitted(tmp_path, laws.table(), *flags, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"]["2 layers"]["slope"] == pytest.approx(0.3)
    assert report["fits"]["10000 tokens"]["slope"] == pytest.approx(0.5)
    one, eight = report["choices"]
    assert [each["layers"] for each in one["candidates"]] == [1, 2, 4]
    assert one["best"] == max(one["candidates"], key=lambda each: each["tokens_per_second"])
    assert one["best"]["num_draft_tokens"] > eight["best"]["num_draft_tokens"]
    assert fitted(tmp_path, laws.table(), *flags) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^Batch 1: train the drafter of {one['best']['layers']} layers?\.$", out, re.M)
    assert "extrapolated" not in out
    assert re.search(r"^10000 tokens +0.5 .* 4 +1\.564 +1\.564 +[+-]0\.000$", out, re.M)


def test_the_table_of_the_repository_gives_what_the_documents_say(capsys):
    path = ROOT / "bench/results/laws.json"
    assert main(["plan", "--fit", str(path), "--training-tokens", "500000", "--batch-sizes", "1,2,8"]) == 0
    out = capsys.readouterr().out
    assert "Batch 1: train the drafter of 1 layer." in out
    assert "Batch 8: train no drafter: none pays." in out
    assert re.search(r"^1 +1 +2\.00 +3 +2\.46 .* 1\.36x +\*$", out, re.M)


def test_without_times_the_most_accepted_tokens_count(capsys, tmp_path):
    data = laws.table() | {"costs": []}
    assert fitted(tmp_path, data, "--training-tokens", "9000000", "--layers", "1,2", "--batch-sizes", "1") == 0
    out = capsys.readouterr().out
    assert "extrapolated from drafters of 1,000 to 1,000,000" in out
    assert "Batch 1: train the drafter of 2 layers." in out


def test_drafters_of_few_tokens_can_be_left_out(capsys, tmp_path):
    data = laws.table(layers=(1,))
    data["points"][0]["accepted_tokens"] = 0.0  # far below the law
    slopes = []
    for flags in ([], ["--from-tokens", "10000"]):
        assert fitted(tmp_path, data, *flags, "--json") == 0
        slopes.append(json.loads(capsys.readouterr().out)["fits"]["1 layers"]["slope"])
    assert slopes[1] == pytest.approx(0.3)
    assert slopes[0] > 0.33


def test_where_no_drafter_pays_none_is_trained(capsys, tmp_path):
    assert fitted(tmp_path, laws.table(), "--training-tokens", "10", "--batch-sizes", "1") == 0
    assert "Batch 1: train no drafter: none pays." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "flags", "message"),
    [(json.dumps(laws.table())[:-40], [], "cannot be read as JSON"),
     (laws.table() | {"points": [laws.point(1, 1000, error=nan)]}, [], "accepted_tokens is nan"),
     ({"num_draft_tokens": 6, "points": [laws.point(1, 1000)]}, [], "a table of 1 points"),
     ({"points": None}, [], "no table of laws"), ('{"points": [NaN]}', [], "no table of laws"),
     (laws.table(), ["--training-tokens", "0"], "--training-tokens=0"),
     (laws.table(), ["--training-tokens", "9", "--batch-sizes", "0"], "--batch-sizes=0"),
     (laws.table(), ["--training-tokens", "9", "--layers", "3"], "drafters of 1, 2, 4 layers, not of 3"),
     (laws.table(), ["--from-tokens", "1000001"], "no drafter of the table has 1000001 training tokens or more"),
     (laws.table(tokens=(1000,)), ["--training-tokens", "9"], "no drafter of the table was trained on two"),
     (laws.table(), ["--layers", "1"], "--layers needs --training-tokens"),
     ({"layers": [[1, 2], [10, 5]]}, ["--training-tokens", "9"], "has curves alone")],
    ids=lambda value: value if isinstance(value, str) and len(value) < 50 else "",
)  # fmt: skip
def test_tables_of_laws_that_cannot_be_used_are_refused(capsys, tmp_path, data, flags, message):
    assert fitted(tmp_path, data, *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("specdec-fast plan: ")
    assert message in error


def test_a_missing_file_is_refused(capsys, tmp_path):
    assert main(["plan", "--fit", str(tmp_path / "none.json"), "--training-tokens", "9"]) == 2
    assert "cannot be read as JSON" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--training-tokens", "--from-tokens", "--layers"])
def test_options_of_a_fit_need_a_fit(capsys, flag):
    assert main(["plan", "--target", "T", "--draft", "ngram", "--memory", "1GB", flag, "1"]) == 2
    assert f"{flag} is read with --fit" in capsys.readouterr().err
