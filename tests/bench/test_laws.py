"""bench.laws trains a grid, goes on with what its file has, and reports what the laws predict."""

from __future__ import annotations

import json

import pytest
import torch

from bench import laws
from bench.laws_.points import Grid, beginnings, first_tokens
from bench.laws_.summary import law_rows, print_laws
from bench.laws_.table import GridTable
from specdec_fast.cli import main as command
from specdec_fast.errors import ConfigError
from specdec_fast.planner.law_table import read_laws
from support.laws import point, table


@pytest.mark.grid
def test_an_interrupted_grid_goes_on_with_its_file(tmp_path, capsys, monkeypatch):
    path = tmp_path / "laws.json"
    options = ["--smoke", "--threads", "1", "--work", str(tmp_path / "work"), "--json", str(path)]
    made = []
    trained = Grid.point

    def counted(grid, *key):
        if len(made) == 3:
            made.append(key)
            raise KeyboardInterrupt
        made.append(key)
        return trained(grid, *key)

    monkeypatch.setattr(Grid, "point", counted)
    with pytest.raises(KeyboardInterrupt):
        laws.main(options)
    assert len(json.loads(path.read_text())["points"]) == 3
    laws.main(options)
    assert len(made) == len(set(made)) + 1 == 13, "each drafter is trained once, the interrupted one again"
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["law"] for row in report["laws"]] == ["training"] * 2 + ["batch size"] * 2
    assert report["seed_deviation"] >= 0
    assert [each["layers"] for each in report["costs"]] == [1, 2]
    assert command(["plan", "--fit", str(path), "--training-tokens", "1000"]) == 0
    assert "Batch 1: train" in capsys.readouterr().out


def test_budgets_are_nested_and_exact():
    texts = [torch.arange(n) for n in (9, 4, 30, 50)]
    budgets = {n: first_tokens(texts, n) for n in (9, 13, 40, 44, 93, 1000)}
    assert {n: sum(map(len, chosen)) for n, chosen in budgets.items()} == {
        9: 9,
        13: 13,
        40: 40,
        44: 43,
        93: 93,
        1000: 93,
    }
    for smaller, larger in zip(list(budgets.values()), list(budgets.values())[1:], strict=False):
        flat = [torch.cat(chosen) for chosen in (smaller, larger)]
        assert torch.equal(flat[0], flat[1][: len(flat[0])])


def test_prompts_begin_no_text_of_the_training():
    learnt = [torch.tensor(ids) for ids in ([1, 2, 3, 4], [5, 6])]
    held_out = [torch.tensor(ids) for ids in ([1, 2, 9], [7, 8, 9], [7, 8, 1], [5, 6], [5, 6, 1], [3, 3, 3])]
    assert beginnings(learnt, held_out, 2) == [[7, 8], [3, 3]]


def test_missing_points_and_other_settings(tmp_path):
    path = tmp_path / "laws.json"
    settings = laws.GridSettings("a/target", 100)
    first = GridTable(path, settings, "command", {})
    first.add(point(2, 1000))
    again = GridTable(path, settings, "other", {})
    assert list(again.missing([1, 2], [1000, 2000], [0, 1]))[:4] == [
        (1, 1000, 0),
        (1, 2000, 0),
        (2, 2000, 0),
        (1, 1000, 1),
    ]
    assert again.data["points"][0]["layers"] == 2
    with pytest.raises(ConfigError, match=r"of other settings \(text_tokens\)"):
        GridTable(path, laws.GridSettings("b/target", 99), "command", {})
    path.write_text(path.read_text()[:-30])
    with pytest.raises(ConfigError, match="no table of this command"):
        GridTable(path, settings, "command", {})


def test_the_report_has_every_curve(capsys):
    found = read_laws(table())
    rows = law_rows(found, [1, 2, 4, 8])
    assert [row["law"] for row in rows] == ["training"] * 3 + ["layers"] * 4 + ["batch size"] * 3
    assert [row["held_out"] for row in rows[2:4]] == [(1_000_000,), (4,)]
    assert rows[-1]["held_out"] == (4, 8)
    assert max(row["error"] for row in rows[:7]) == pytest.approx(0, abs=1e-9)
    print_laws(rows, 0.02)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 10 + 2
    assert lines[2].split()[:3] == ["training", "1", "layers"]


@pytest.mark.grid
def test_a_figure(tmp_path):
    pytest.importorskip("matplotlib")
    from bench.laws_.plot import draw

    draw(law_rows(read_laws(table()), [1, 2, 4, 8]), tmp_path / "laws.png")
    assert (tmp_path / "laws.png").stat().st_size > 1000
