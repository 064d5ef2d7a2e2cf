"""The ablation of exspec: all variants run, ratios are to eqspec, and each variant does what its name says."""

from __future__ import annotations

import json
from statistics import fmean, stdev

import pytest

from bench import ablation
from bench.ablation import InTurn, variants
from bench.engine_ import rank_ablation, simulated_ablation
from specdec_fast import SamplingParams
from specdec_fast.config import EngineConfig
from specdec_fast.drafters.shared import ranked
from specdec_fast.request.sequence import Sequence
from specdec_fast.schedulers.exspec import ExspecScheduler

SMALL = ["--pair", "smoke", "--num-prompts", "6", "--max-new-tokens", "10", "--prompt-tokens", "5", "--repeats", "1"]


@pytest.mark.grid
def test_ablation_end_to_end(tmp_path, capsys):
    file = tmp_path / "ablation.json"
    ablation.main([*SMALL, "--batch-sizes", "2,3", "--json", str(file)])
    report = json.loads(file.read_text())
    names = [name for name, _, _ in variants(2)]
    assert [(row["batch_size"], row["variant"]) for row in report["rows"]] == [(b, n) for b in (2, 3) for n in names]
    for row in report["rows"]:
        ratios = [row[key] for key in ("speedup_over_eqspec", "p50_over_eqspec", "p99_over_eqspec")]
        assert all(ratio > 0 for ratio in ratios)
        assert row["variant"] != "eqspec" or ratios == [1, 1, 1]
        assert 1 <= row["sequences_per_step"] <= row["batch_size"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report


@pytest.mark.grid
def test_ablation_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "ablation.png"
    ablation.main([*SMALL, "--batch-sizes", "2", "--plot", str(file)])
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("scheduler", "expected"), [(ExspecScheduler, [0, 2]), (InTurn, [1, 0])])
def test_in_turn_looks_at_no_length(scheduler, expected):
    """Two of three have one length; the third has waited once."""
    sequences = [Sequence(i, [0] * n, n, 99, SamplingParams(), frozenset()) for i, n in enumerate((4, 7, 4))]
    sequences[1].passed_over = 1
    config = EngineConfig(max_batch_size=2, window_size=4)
    assert [s.index for s in scheduler(config).select(sequences)] == expected


@pytest.mark.grid
def test_scored_chains_in_simulated_time(capsys):
    rows = simulated_ablation.confidence_rows([2], 1, is_refilled=False)
    assert [row["pair"] for row in rows] == list(simulated_ablation.COSTS)
    for row in rows:
        assert row["best K"] in range(1, 9)
        assert row["auto over plain"] > 0.9, "never far below plain decoding"
    simulated_ablation.print_confidence_table(rows)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)


def test_texts_of_a_simulated_world_differ_as_stated():
    worlds = [simulated_ablation.world("demo", "0.82 ± 0.08", 32, seed, is_refilled=False) for seed in range(8)]
    found = [world.acceptance(number, 0) for world in worlds for number in range(world.num_sequences)]
    assert fmean(found) == pytest.approx(0.82, abs=0.01)
    assert stdev(found) == pytest.approx(0.08, abs=0.01)
    assert worlds[0].acceptance(3, 0) == worlds[0].acceptance(3, 100), "the same within a text"


def test_ranks_of_every_temperature_and_size(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_ablation, "TEMPERATURES", (10.0, 0.5))
    monkeypatch.setattr(rank_ablation, "NODES", (6,))
    before = ranked.GREEDY_TEMPERATURE
    file = tmp_path / "ranks.json"
    ablation.main(["--part", "ranks", "--num-prompts", "3", "--max-new-tokens", "24", "--json", str(file)])
    flat, chosen = json.loads(file.read_text())["rows"]
    assert (flat["temperature"], chosen["temperature"]) == (10.0, 0.5)
    assert flat["tokens_per_step"] < chosen["tokens_per_step"], "the temperature does not reach the drafter"
    assert before == ranked.GREEDY_TEMPERATURE
