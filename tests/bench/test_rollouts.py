"""bench.rollouts runs, and reports no time of wrong completions."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("trl", reason="the extra rl is not installed")

from bench import rollouts

pytestmark = [pytest.mark.grid, pytest.mark.filterwarnings("ignore")]  # `make test-rest` installs the extra
SMALL = [
    "--repeats",
    "1",
    "--rows",
    "4",
    "--num-generations",
    "2",
    "--steps",
    "1",
    "--max-completion-length",
    "8",
    "--drafts",
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # put back afterwards


def test_speeds_of_every_drafter(capsys):
    rollouts.main([*SMALL, "self"])
    table, _, result = capsys.readouterr().out.strip().rpartition("\n")
    speeds = json.loads(result)["tokens_per_second"]
    assert set(speeds) == {"plain", "transformers", "self"}
    assert all(speed > 0 for (speed,) in speeds.values())
    assert "to transformers" in table


def test_wrong_completions_are_not_timed(monkeypatch):
    def trained(name, args):
        return rollouts.Rollouts([[[1]], [[2 if name == "ngram" else 1]]], [0.1, 0.1])

    monkeypatch.setattr(rollouts, "trained", trained)
    with pytest.raises(SystemExit, match="ngram: the completions differ from those of plain decoding"):
        rollouts.main([*SMALL, "ngram"])
