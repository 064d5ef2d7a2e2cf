"""Result files on a disk that becomes full: an error that names the file, and a file that is resumed without loss."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import pytest

import specdec_fast as sd
from specdec_fast.cli import main
from specdec_fast.commands.prompt_files import BadLineError
from specdec_fast.commands.result_files import ResultFile
from support.commands import PAIR, write_lines

PROMPTS = [{"prompt_ids": [5, 6], "id": "ä"}, {"prompt_ids": [41, 84]}, {"prompt": 5}, {"prompt_ids": [9, 9, 9]}]
REQUESTS = [
    {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
    for i, body in enumerate({"prompt": [5, token], "temperature": 0, "max_tokens": 5} for token in range(4))
]
COMMANDS = {
    "generate": ["generate", *PAIR, "--max-new-tokens", "5", "--prompts", "in.jsonl"],
    "batch": ["batch", *PAIR, "--input", "in.jsonl"],
}


class SmallDisk(io.FileIO):
    """A file on a disk that has room for a number of bytes: what does not fit is not written."""

    room = 0

    def write(self, data):
        fits = bytes(data)[: SmallDisk.room]
        if not fits:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        SmallDisk.room -= len(fits)
        return super().write(fits)


@pytest.fixture
def small_disk(monkeypatch):
    """A function that sets how many bytes the disk of the file ``out.jsonl`` has room for; None: enough."""
    opened, room_set = Path.open, None

    def limited(self, mode="r", *args, **options):
        if room_set is None or self.name != "out.jsonl" or mode not in ("wb", "r+b"):
            return opened(self, mode, *args, **options)
        file = SmallDisk(self, mode)
        return io.BufferedWriter(file) if mode == "wb" else io.BufferedRandom(file)

    def set_room(num_bytes):
        nonlocal room_set
        SmallDisk.room = room_set = num_bytes

    monkeypatch.setattr(Path, "open", limited)
    return set_room


def number_of(record):
    if not isinstance(record, dict) or "line" not in record:
        raise BadLineError("no result")
    return record["line"]


def complete(path, resume):
    """Write the results of three lines that the file does not have yet; the last ones come first."""
    results = ResultFile(path, resume, number_of, b'{"line": ')
    with results:
        for number in sorted({1, 2, 3} - results.done, reverse=True):
            results.add(number, {"line": number, "text": "äö" * number})


def test_a_disk_that_is_full_at_any_byte_loses_and_repeats_nothing(in_folder, small_disk):
    path = Path("out.jsonl")
    complete(path, resume=False)
    whole = path.read_bytes()
    for room in range(len(whole)):
        path.unlink()
        small_disk(room)
        with pytest.raises(sd.OutputError, match=r"cannot write 'out\.jsonl': No space left on device"):
            complete(path, resume=False)
        left = path.read_bytes()
        assert len(left) == room
        small_disk(0)
        with pytest.raises(sd.OutputError, match="cannot write"):
            complete(path, resume=True)
        assert path.read_bytes().count(b"\n") == left.count(b"\n"), "a whole line was lost"
        small_disk(None)
        complete(path, resume=True)
        assert path.read_bytes() == whole, room


def stable(content):
    """Results without what is new in every run."""
    records = [json.loads(line) for line in content.splitlines()]
    for record in records:
        record.pop("id", None)
        if "response" in record:
            record["response"].pop("request_id")
            record["response"]["body"] = record["response"]["body"]["choices"]
    return records


@pytest.mark.parametrize(("command", "lines"), [("generate", PROMPTS), ("batch", REQUESTS)], ids=COMMANDS)
def test_a_command_whose_disk_is_full_is_resumed(in_folder, small_disk, capsys, command, lines):
    write_lines(Path("in.jsonl"), *lines)
    argv, path = [*COMMANDS[command], "--output", "out.jsonl"], Path("out.jsonl")
    status = main(argv)
    whole = path.read_bytes()
    path.unlink()
    sizes = [len(line) for line in whole.splitlines(keepends=True)]
    capsys.readouterr()
    small_disk(max(sizes) + min(sizes) // 2)
    assert main(argv) == 2
    (message,) = [line for line in capsys.readouterr().err.splitlines() if "cannot write" in line]
    assert message.startswith(f"specdec-fast {command}: cannot write 'out.jsonl': No space left on device")
    num_whole = path.read_bytes().count(b"\n")
    assert num_whole >= 1
    assert f"with --resume, which adds the others to the {num_whole} results in it" in message
    assert not path.read_bytes().endswith(b"\n")
    small_disk(None)
    assert main([*argv, "--resume"]) == status
    assert stable(path.read_bytes()) == stable(whole)


def test_results_that_cannot_be_put_in_order_are_kept(in_folder, monkeypatch):
    path = Path("out.jsonl")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(sd.OutputError, match="which adds the others to the 3 results in it"):
            complete(path, resume=False)
    assert [number_of(json.loads(line)) for line in path.read_bytes().splitlines()] == [3, 2, 1]
    assert os.listdir() == ["out.jsonl"], "no temporary file is left"
    complete(path, resume=True)
    assert [number_of(json.loads(line)) for line in path.read_bytes().splitlines()] == [1, 2, 3]


def test_a_device_that_is_full(in_folder, capsys):
    write_lines(Path("in.jsonl"), {"prompt": 5})
    assert main([*COMMANDS["generate"], "--output", "/dev/full"]) == 2
    assert "cannot write '/dev/full': No space left on device" in capsys.readouterr().err
