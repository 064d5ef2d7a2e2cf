"""``specdec-fast train-drafter``: a drafter, its report, and one line for what is wrong."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec_fast.assets import demo_pair
from specdec_fast.cli import main
from specdec_fast.drafters.clover.checkpoint import is_clover
from specdec_fast.drafters.dflash.checkpoint import is_dflash
from specdec_fast.drafters.eagle3.checkpoint import is_eagle3
from specdec_fast.drafters.eagle3.model import load_eagle3
from specdec_fast.drafters.medusa.checkpoint import is_medusa
from specdec_fast.drafters.specblock.checkpoint import is_specblock, read_config
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel

TARGET = str(demo_pair() / "target")
SMALL = ["--hidden-size", "32", "--tap-layers", "1,2,3", "--text-tokens", "200", "--max-new-tokens", "16"]
SMALL += ["--held-out", "2", "--epochs", "1", "--batch-tokens", "128", "--learning-rate", "0.003"]
RESUMED = ["--draft-vocab-size", "400", "--resume"]


def train(folder, *options):
    return main(["train-drafter", "--kind", "eagle3", "--target", TARGET, "--output", str(folder), *SMALL, *options])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    assert train(folder, "--draft-vocab-size", "400") == 0
    return folder


def test_a_drafter_and_its_report_are_written(folder):
    assert is_eagle3(folder)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    loaded = load_eagle3(folder, RaggedModel(target, resolve(torch.device("cpu"))))
    assert loaded.taps == (1, 2, 3)
    assert len(loaded.target_ids) == 400
    report = json.loads((folder / "report.json").read_text())
    assert len(report["agreement"]) == 7
    assert all(0 <= share <= 1 for share in report["agreement"])
    assert report["texts"]["tokens"] >= 200
    assert report["command"].startswith(f"specdec-fast train-drafter --kind eagle3 --target {TARGET}")
    assert "--tap-layers 1,2,3" in report["command"]
    assert str(folder) not in report["command"], "where it went changes nothing"
    assert report["machine"]["processor"]


def test_resuming_a_finished_run_measures_it_again(folder, capsys):
    before = json.loads((folder / "report.json").read_text())
    assert train(folder, "--draft-vocab-size", "400", "--resume") == 0
    after = json.loads((folder / "report.json").read_text())
    assert after["agreement"] == before["agreement"]
    assert "pass --draft eagle3:" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "is_kind"), [("medusa", is_medusa), ("clover", is_clover)])
def test_heads_and_their_tree(folder, tmp_path, capsys, kind, is_kind):
    (tmp_path / "texts.safetensors").write_bytes((folder / "texts.safetensors").read_bytes())
    options = ["--kind", kind, "--target", TARGET, "--output", str(tmp_path), "--resume", "--held-out", "2"]
    options += ["--epochs", "1", "--num-heads", "2", "--tree-nodes", "5"]
    assert main(["train-drafter", *options]) == 0
    assert f"pass --draft {kind}:{tmp_path}" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["agreement"]) == len(report["hit_rates"]) == 2
    assert all(0 <= rate <= 1 for rates in report["hit_rates"] for rate in rates)
    assert json.loads((tmp_path / "config.json").read_text())[f"{kind}_choices"] == report["choices"]
    assert is_kind(tmp_path)
    assert main(["train-drafter", *options, "--hidden-size", "32"]) == 2
    assert f"--hidden-size is no option of --kind {kind}" in capsys.readouterr().err
    assert main(["train-drafter", *options[:-1], "65"]) == 2
    assert "--tree-nodes 65: expected at most 64" in capsys.readouterr().err


def test_a_specblock_drafter(folder, tmp_path, capsys):
    (tmp_path / "texts.safetensors").write_bytes((folder / "texts.safetensors").read_bytes())
    options = ["--kind", "specblock", "--resume", "--draft-vocab-size", "400", "--tree-nodes", "9"]
    assert train(tmp_path, *options) == 0
    assert f"pass --draft specblock:{tmp_path}" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "report.json").read_text())["agreement"]) == 4
    assert is_specblock(tmp_path)
    config = read_config(tmp_path)
    assert (config.tree_nodes, config.tap_layers, config.draft_vocab_size) == (9, (1, 2, 3), 400)
    assert train(tmp_path, *options, "--num-heads", "3") == 2
    assert "--num-heads is no option of --kind specblock" in capsys.readouterr().err
    options[options.index("400")] = "19"
    assert train(tmp_path, *options) == 2
    assert "drafter of 19 ids: its rank head reads the logits of 20" in capsys.readouterr().err


def test_blocks_of_dspark(folder, tmp_path, capsys):
    (tmp_path / "texts.safetensors").write_bytes((folder / "texts.safetensors").read_bytes())
    options = ["--kind", "dflash", "--target", TARGET, "--output", str(tmp_path), "--resume", "--held-out", "2"]
    options += ["--epochs", "1", "--tap-layers", "1,3", "--num-layers", "1", "--markov-rank", "4", "--block-size"]
    assert main(["train-drafter", *options, "3"]) == 0
    assert f"pass --draft dflash:{tmp_path}" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "report.json").read_text())["agreement"]) == 3
    assert is_dflash(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dflash_config"]["target_layer_ids"] == [0, 2]
    assert main(["train-drafter", *options, "1"]) == 2
    assert "--block-size 1: expected at least 2" in capsys.readouterr().err
    assert main(["train-drafter", *options, "3", "--hidden-size", "32"]) == 2
    assert "--hidden-size is no option of --kind dflash" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["write_texts", "Trainer.run", "Trainer.evaluate"])
def test_an_interrupt_is_one_line(folder, tmp_path, capsys, monkeypatch, place):
    def interrupted(*args):
        raise KeyboardInterrupt

    if place != "write_texts":
        (tmp_path / "texts.safetensors").write_bytes((folder / "texts.safetensors").read_bytes())
    module = "training_texts" if place == "write_texts" else "train_drafter"
    monkeypatch.setattr(f"specdec_fast.commands.{module}.{place}", interrupted)
    assert train(tmp_path, "--resume") == 130
    error = capsys.readouterr().err
    assert ("no texts were kept" if place == "write_texts" else "--resume goes on from here") in error
    kept = ["texts.safetensors", "training_state.pt"] if place != "write_texts" else []
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [("--epochs", "x", "'x' is not a positive integer"), ("--epochs", "0", "'0' is not a positive integer"),
     ("--early-share", "x", "'x' is not a number from 0 to 1"), ("--learning-rate", "nan", "'nan' is not a number bet"),
     ("--checkpoint-minutes", "-1", "'-1' is not a number of min"), ("--checkpoint-minutes", "nan", "'nan' is not a"),
     ("--checkpoint-minutes", "x", "'x' is not a number of minutes"), ("--seed", "-1", "'-1' is not an integer from 0"),
     ("--seed", "1" * 400, "is not an integer from 0"), ("--epochs", "1" * 400, "is not a positive integer below")],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(tmp_path, capsys, option, text, message):
    with pytest.raises(SystemExit):
        train(tmp_path, f"{option}={text}")
    assert message in capsys.readouterr().err


def test_what_is_wrong_is_one_line(folder, tmp_path, capsys):
    def says(*options, into=tmp_path):
        assert train(into, *options) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("specdec-fast")]
        return line

    assert "is not empty; pass --resume" in says(into=folder)
    assert "written with other settings (epochs)" in says(*RESUMED, "--epochs", "2", into=folder)
    assert "written with other settings (tap_layers)" in says(*RESUMED, "--tap-layers", "0,1,2", into=folder)
    assert "--seed: the texts" in says(*RESUMED, "--seed", "9", into=folder)
    assert "--dtype: the texts" in says(*RESUMED, "--dtype", "float32", into=folder)
    assert "--text-tokens: the texts" in says(*RESUMED, "--text-tokens", "300", into=folder)
    assert "tap layers (1, 9)" in says("--tap-layers", "1,9")
    assert "hidden size 256 would have" in says("--hidden-size", "256", "--resume", into=folder)
    assert "raise --text-tokens" in says("--held-out", "5000", "--resume", into=folder)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "One day"}\n{"text": 1}\n')
    assert "prompts.jsonl, line 2" in says("--prompts", str(prompts), "--resume")
    assert "--prompts: the texts" in says(*RESUMED, "--prompts", str(prompts), into=folder)
    assert "cannot read" in says("--prompts", "nowhere.jsonl", "--resume")
    with pytest.raises(SystemExit):
        train(tmp_path, "--tap-layers", "all")
