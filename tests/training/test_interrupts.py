"""Signals, full disks and kills during a training: what is in the folder is whole, and goes on as if undisturbed."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import specdec_fast as sd
from specdec_fast.drafters.medusa.training import new_heads
from specdec_fast.drafters.shared.checkpoint import writing
from specdec_fast.drafters.shared.checkpoint.writing import write_files
from specdec_fast.training import texts as texts_module
from specdec_fast.training.drafter_loss import Teacher
from specdec_fast.training.interrupts import Terminated, deferred, terminable
from specdec_fast.training.texts import Texts
from specdec_fast.training.trainer import Trainer, TrainingSettings
from specdec_fast.whole_files import replaced
from support.grids import each_value_once

SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}


def made(target, texts, folder, matrix_learning_rate=None):
    settings = TrainingSettings(2, 32, learning_rate=1e-2, matrix_learning_rate=matrix_learning_rate, num_steps=2)
    teacher = Teacher(target, (target.config.num_hidden_layers,), None)
    return Trainer(new_heads(target, 2), teacher, texts, settings, folder)


@each_value_once
@pytest.mark.parametrize("place", ["before the first optimizer", "behind the first one", "behind the last one"])
@pytest.mark.parametrize("number", SIGNALS.values(), ids=SIGNALS)
def test_a_signal_within_a_step_waits_for_its_end(target, texts, tmp_path, number, place):
    whole = made(target, texts, tmp_path, 0.02)
    whole.run(1e9)
    part = made(target, texts, tmp_path, 0.02)
    first, last = part.optimizers[0], part.optimizers[-1]
    assert first is not last
    num_calls = 0

    def come(*arguments):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            signal.raise_signal(number)

    if place == "before the first optimizer":
        first.register_step_pre_hook(come)
    else:
        (last if place == "behind the last one" else first).register_step_post_hook(come)
    with terminable(), pytest.raises(KeyboardInterrupt) as interrupt:
        part.run(1e9)
    assert isinstance(interrupt.value, Terminated) is (number == signal.SIGTERM)
    assert part.step == 3 < whole.step
    part.save()
    rest = made(target, texts, tmp_path, 0.02)
    rest.resume()
    rest.run(1e9)
    assert rest.step == whole.step
    for one, other in zip(rest.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_handlers_are_those_from_before():
    before = [signal.getsignal(number) for number in SIGNALS.values()]
    with pytest.raises(ZeroDivisionError), terminable(), deferred():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in SIGNALS.values()] == before
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with deferred():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "there is no handler to call later"
    finally:
        signal.signal(signal.SIGTERM, before[1])


def test_other_threads_train_without_handlers(target, texts, tmp_path):
    trainer = made(target, texts, tmp_path)

    def train():
        with terminable():
            trainer.run(1e9)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert trainer.step == trainer.num_steps


class Full:
    """A file on a full disk."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def __enter__(self):
        return self

    def __exit__(self, *arguments):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)


@pytest.mark.parametrize("room", [0, 1000, 20000])
def test_a_checkpoint_that_finds_no_room_leaves_the_one_before(target, texts, tmp_path, monkeypatch, room):
    trainer = made(target, texts, tmp_path)
    trainer.save()
    before = (tmp_path / "training_state.pt").read_bytes()
    assert len(before) > 20000
    trainer.run(1e9)
    opened = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *arguments: Full(opened(*arguments), room))
        with pytest.raises(sd.OutputError, match=r"training_state\.pt.*No space left on device.*--resume goes on"):
            trainer.save()
    assert (tmp_path / "training_state.pt").read_bytes() == before
    assert os.listdir(tmp_path) == ["training_state.pt"]


def test_texts_that_find_no_room_leave_no_file(tmp_path, monkeypatch):
    def cut_short(tensors, path):
        path.write_bytes(b"half of a file")
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(texts_module, "save_file", cut_short)
    with pytest.raises(sd.OutputError, match=r"cannot write .*texts\.safetensors.*No space left on device"):
        Texts.of([[1, 2, 3, 4]]).save(tmp_path / "texts.safetensors")
    assert os.listdir(tmp_path) == []


def test_an_unfinished_file_of_a_killed_process_is_written_over(tmp_path):
    (tmp_path / "texts.unfinished").write_bytes(b"half of a file")
    texts = Texts.of([[1, 2, 3, 4]])
    texts.save(tmp_path / "texts.safetensors")
    assert torch.equal(Texts.load(tmp_path / "texts.safetensors").token_ids, texts.token_ids)
    assert os.listdir(tmp_path) == ["texts.safetensors"]


def test_an_interrupt_removes_the_unfinished_file(tmp_path):
    path = tmp_path / "state.pt"
    path.write_text("before")

    def interrupted():
        with replaced(path) as unfinished:
            unfinished.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["state.pt"]


class KilledError(BaseException):
    """The process is no more."""


def test_a_kill_while_a_drafter_is_written_leaves_a_whole_one_or_none(tmp_path, monkeypatch):
    """It is killed before each of the operations on files, which all fail from then on."""
    states = []
    for num_operations in range(10):
        with monkeypatch.context() as patch:
            write_files(tmp_path, "model.safetensors", {"w": torch.tensor([1])}, {"number": 1})
            left = num_operations

            def counted(operation):
                def run(*arguments, **options):
                    nonlocal left
                    if left == 0:
                        raise KilledError
                    left -= 1
                    return operation(*arguments, **options)

                return run

            for name in ("write_text", "chmod", "unlink", "replace"):
                patch.setattr(Path, name, counted(getattr(Path, name)))
            patch.setattr(writing, "save_file", counted(writing.save_file))
            with suppress(KilledError):
                write_files(tmp_path, "model.safetensors", {"w": torch.tensor([2])}, {"number": 2})
        config = tmp_path / "config.json"
        number = json.loads(config.read_text())["number"] if config.exists() else None
        states.append((number, load_file(tmp_path / "model.safetensors")["w"].item()))
    assert set(states) == {(1, 1), (None, 1), (None, 2), (2, 2)}
    assert states == sorted(states, key=[(1, 1), (None, 1), (None, 2), (2, 2)].index)
