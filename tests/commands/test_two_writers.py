"""Two commands with the same output: the second one is refused until the first one has ended, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

import specdec_fast as sd
from specdec_fast.cli import main
from specdec_fast.commands.only_writer import only_writer
from specdec_fast.commands.result_files import ResultFile
from support.commands import PAIR, write_lines
from support.source_tree import ROOT

COMMANDS = {
    "generate": ["generate", *PAIR, "--max-new-tokens", "5", "--prompts", "in.jsonl"],
    "batch": ["batch", *PAIR, "--input", "in.jsonl"],
}
LINES = {
    "generate": {"prompt_ids": [5, 6]},
    "batch": {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": {"prompt": [5], "max_tokens": 5}},
}
HOLDER = """
import sys
from pathlib import Path
from specdec_fast.commands.only_writer import only_writer
with only_writer(Path(sys.argv[1])):
    print("writes", flush=True)
    sys.stdin.read()
"""
REFUSAL = "another command is writing 'out.jsonl'; wait until it has ended, or choose another output"


def run(command, *options):
    write_lines(Path("in.jsonl"), LINES[command])
    return main([*COMMANDS[command], "--output", "out.jsonl", *options])


@pytest.fixture
def other(in_folder):
    """Another process, which writes the file."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(in_folder / "out.jsonl")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout.readline() == b"writes\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("option", [[], ["--resume"], ["--overwrite"]], ids=str)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_second_command_is_refused_while_the_first_one_writes(in_folder, capsys, command, option):
    Path("out.jsonl").write_text("what the first one has written\n")
    with only_writer(Path("out.jsonl")):
        assert run(command, *option) == 2
    assert REFUSAL in capsys.readouterr().err
    assert Path("out.jsonl").read_text() == "what the first one has written\n"


def test_the_lock_ends_with_its_process(other, capsys):
    assert run("generate") == 2
    assert REFUSAL in capsys.readouterr().err
    other.kill()
    other.wait()
    assert run("generate") == 0
    assert os.path.getsize("out.jsonl")


def test_a_command_holds_the_lock_until_its_results_are_in_order(in_folder, monkeypatch):
    put_in_order, tried = ResultFile._put_in_order, []

    def noted(self):
        with pytest.raises(sd.ConfigError, match="another command is writing"), only_writer(Path("out.jsonl")):
            pass
        put_in_order(self)
        tried.append(True)

    monkeypatch.setattr(ResultFile, "_put_in_order", noted)
    assert run("generate") == 0
    assert tried
    with only_writer(Path("out.jsonl")):
        pass


def test_a_refused_command_leaves_no_file(in_folder):
    write_lines(Path("in.jsonl"), LINES["generate"])
    assert main([*COMMANDS["generate"], "--target", "no/such", "--output", "out.jsonl"]) == 2
    os.symlink("later.jsonl", "link.jsonl")
    assert main([*COMMANDS["generate"], "--target", "no/such", "--output", "link.jsonl"]) == 2
    assert sorted(os.listdir()) == ["in.jsonl", "link.jsonl"]
    Path("mine.jsonl").touch()
    assert main([*COMMANDS["generate"], "--target", "no/such", "--output", "mine.jsonl"]) == 2
    assert Path("mine.jsonl").exists(), "it was there before"


def test_a_file_that_is_replaced_while_its_lock_is_taken(in_folder, monkeypatch):
    """The command that held the lock has removed its empty file, or has put its results in order."""
    flock, replaced = fcntl.flock, []
    Path("out.jsonl").touch()

    def late(file, operation):
        if len(replaced) == 0:
            os.unlink("out.jsonl")
        if len(replaced) == 1:
            Path("other.jsonl").write_text("in order")
            os.replace("other.jsonl", "out.jsonl")
        replaced.append(os.fstat(file.fileno()).st_ino)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with only_writer(Path("out.jsonl")):
        assert len(replaced) == 3
        assert replaced[-1] == os.stat("out.jsonl").st_ino
        with pytest.raises(sd.ConfigError, match="another command"), only_writer(Path("out.jsonl")):
            pass
    assert Path("out.jsonl").read_text() == "in order"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def test_a_file_system_without_locks(in_folder, monkeypatch, capsys, number):
    def without(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", without)
    with only_writer(Path("out.jsonl")):
        Path("out.jsonl").write_text("result")
    assert "'out.jsonl' cannot be locked" in (message := capsys.readouterr().err)
    assert "start no other command that writes it" in message
    assert Path("out.jsonl").read_text() == "result"


def test_what_is_no_file_is_not_locked(in_folder):
    os.mkfifo("pipe")
    with only_writer(Path("pipe")), only_writer(Path("pipe")):
        pass
    with only_writer(Path("/dev/null")), only_writer(Path("/dev/null")):
        pass
