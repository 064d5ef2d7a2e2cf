"""``train-drafter`` that is interrupted, terminated or killed, or whose disk is full; and the run after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdec_fast.cli import main
from specdec_fast.commands.only_writer import only_writer
from specdec_fast.training.drafter_loss import Teacher
from specdec_fast.training.trainer import Trainer
from support.commands import RUN, TARGET
from support.grids import grid
from support.source_tree import ROOT

OPTIONS = ["--text-tokens", "200", "--max-new-tokens", "16", "--held-out", "2", "--epochs", "2", "--num-heads", "1"]
OPTIONS += ["--batch-tokens", "64", "--learning-rate", "0.003"]
SIGNALS = {"interrupted": signal.SIGINT, "terminated": signal.SIGTERM}
STATUS = {"interrupted": 130, "terminated": 143}
WEIGHTS = "medusa_lm_head.safetensors"


def argv_of(folder, *options):
    return ["train-drafter", "--kind", "medusa", "--target", TARGET, "--output", str(folder), *OPTIONS, *options]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(argv_of(folder)) == 0
    return folder


def weights_of(folder):
    return {name: (folder / name).read_bytes() for name in (WEIGHTS, "config.json")}


@pytest.fixture
def signalled(monkeypatch):
    """A function that lets a signal come in the third batch that the target explains."""

    def arrange(number):
        output, num_batches = Teacher.output, 0

        def noted(*arguments):
            nonlocal num_batches
            num_batches += 1
            if num_batches == 3:
                signal.raise_signal(number)
            return output(*arguments)

        monkeypatch.setattr(Teacher, "output", noted)

    return arrange


@pytest.mark.parametrize("name", grid(list(SIGNALS), keep=list(SIGNALS)[:1]))
def test_a_signal_ends_the_training_and_resume_goes_on(whole, tmp_path, capsys, signalled, name):
    before = signal.getsignal(SIGNALS[name])
    signalled(SIGNALS[name])
    assert main(argv_of(tmp_path)) == STATUS[name]
    assert f"specdec-fast train-drafter: {name}; --resume goes on from here." in capsys.readouterr().err
    assert signal.getsignal(SIGNALS[name]) is before
    assert sorted(os.listdir(tmp_path)) == ["texts.json", "texts.safetensors", "training_state.pt"]
    assert torch.load(tmp_path / "training_state.pt", weights_only=True)["step"] == 3, "the step is done"
    assert main(argv_of(tmp_path, "--resume")) == 0
    assert weights_of(tmp_path) == weights_of(whole)


def test_what_a_killed_process_leaves_is_written_over(whole, tmp_path):
    for name in ("texts.safetensors", "texts.json"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    leftovers = ["training_state.unfinished", "texts.unfinished", "config.unfinished", "report.unfinished"]
    for name in [*leftovers, "medusa_lm_head.unfinished", ".lock"]:
        (tmp_path / name).write_bytes(b"" if name == ".lock" else b"half of a file")
    assert main(argv_of(tmp_path, "--resume")) == 0
    assert weights_of(tmp_path) == weights_of(whole)


def test_a_lock_alone_is_an_empty_folder(tmp_path, capsys):
    """A process was killed before it had written anything."""
    (tmp_path / ".lock").touch()
    assert main(argv_of(tmp_path, "--tree-nodes", "65")) == 2
    assert "is not empty" not in capsys.readouterr().err
    (tmp_path / "notes.txt").touch()
    assert main(argv_of(tmp_path)) == 2
    assert "is not empty; pass --resume" in capsys.readouterr().err


def test_a_second_training_in_the_same_folder_is_refused(tmp_path, capsys):
    with only_writer(tmp_path / ".lock"):
        assert main(argv_of(tmp_path, "--resume")) == 2
    assert f"another command is writing {str(tmp_path)!r}; wait" in capsys.readouterr().err


@pytest.mark.parametrize("name", grid(["texts.safetensors", "training_state.pt", WEIGHTS], keep=["training_state.pt"]))
def test_a_disk_that_is_full_when_a_file_takes_its_place(whole, tmp_path, capsys, monkeypatch, name):
    replace = Path.replace

    def full(self, other):
        if Path(other).name == name:
            raise OSError(28, "No space left on device")
        return replace(self, other)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert main(argv_of(tmp_path)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("specdec-fast")]
    assert f"cannot write '{tmp_path / name}': [Errno 28] No space left on device" in line
    assert not (tmp_path / name).exists()
    assert not list(tmp_path.glob("*.unfinished"))
    assert main(argv_of(tmp_path, "--resume")) == 0
    assert weights_of(tmp_path) == weights_of(whole)


def test_a_training_that_diverges_keeps_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    output = Teacher.output

    def broken(self, *arguments):
        computed = output(self, *arguments)
        computed.probabilities.fill_(torch.nan)
        return computed

    saved = []
    monkeypatch.setattr(Trainer, "save", saved.append)
    monkeypatch.setattr(Teacher, "output", broken)
    assert main(argv_of(tmp_path)) == 2
    assert "the loss became nan at step 1" in capsys.readouterr().err
    assert not saved


@pytest.mark.grid
def test_a_process_ends_with_the_status_of_sigterm(tmp_path):
    command = [sys.executable, "-c", RUN, *argv_of(tmp_path, "--epochs", "300", "--checkpoint-minutes", "0")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=ROOT)
    seen = b""
    while b"loss" not in seen:  # the bar of the training
        part = os.read(process.stderr.fileno(), 1000)
        assert part, seen
        seen += part
    process.terminate()
    error = process.communicate()[1]
    assert process.returncode == 143
    assert b"train-drafter: terminated; --resume goes on from here." in error
    assert torch.load(tmp_path / "training_state.pt", weights_only=True)["step"] >= 1
