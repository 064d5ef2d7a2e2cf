"""Files of ``specdec-fast generate``: results as they come, what a killed process leaves, and what is never lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import specdec_fast as sd
from specdec_fast.cli import main
from specdec_fast.commands.common import expect_writable
from specdec_fast.commands.result_files import ResultFile
from specdec_fast.engine.engine import Engine
from support.chats import HELLO, TEMPLATE
from support.commands import PAIR, child, read_lines, write_lines
from support.grids import grid

OPTIONS = ["--num-draft-tokens", "2", "--batch-size", "2", "--max-new-tokens", "6"]
# Ends of different length, errors before and after decoding, and an id of every kind.
LINES = [
    {"prompt_ids": [5, 6], "id": "a"},
    "{bad",
    {"prompt_ids": [41, 84], "id": 7},
    {"prompt_ids": [5000], "id": None},
    {"prompt_ids": [70], "id": {"x": [1, "é"]}},
    {"prompt": "One day"},
    {"prompt": 5, "id": "b"},
    {"prompt_ids": [9, 9, 9]},
]
NUM_BAD = 3


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", *LINES)
    return tmp_path


def run(*options, output="out.jsonl"):
    return main(["generate", *PAIR, *OPTIONS, "--prompts", "in.jsonl", "--output", output, *options])


@pytest.fixture
def whole(folder):
    """The file of an undisturbed run."""
    assert run(output="whole.jsonl") == 1
    return Path("whole.jsonl").read_bytes()


def decoded(monkeypatch):
    """Note the number of prompts of every call."""
    numbers, as_completed = [], Engine.as_completed

    def noted(self, prompts, *args, **options):
        numbers.append(len(prompts))
        return as_completed(self, prompts, *args, **options)

    monkeypatch.setattr(Engine, "as_completed", noted)
    return numbers


def test_ids_are_copied_and_errors_stay_with_their_lines(folder, whole):
    records = read_lines(Path("whole.jsonl"))
    assert [record["line"] for record in records] == [1, 2, 3, 4, 5, 6, 7, 8]
    given = [line if isinstance(line, dict) else {} for line in LINES]
    assert [record.get("id", "none") for record in records] == [line.get("id", "none") for line in given]
    assert [record["line"] for record in records if "error" in record] == [2, 4, 7]


KILLED = """
import os, signal
from specdec_fast.commands.result_files import ResultFile, _as_line
add, count = ResultFile.add, 0
def killed(self, number, record):
    global count
    if count == 5:
        line = _as_line(record)
        self._file.write(line[: len(line) // 2])
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    count += 1
    add(self, number, record)
ResultFile.add = killed
"""


@pytest.mark.grid
def test_a_killed_process_is_resumed(folder, whole, monkeypatch):
    argv = ["generate", *PAIR, *OPTIONS, "--prompts", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")]
    assert child(KILLED, argv).returncode == -signal.SIGKILL
    left = Path("out.jsonl").read_bytes()
    assert left.count(b"\n") == 5
    assert not left.endswith(b"\n")
    numbers = decoded(monkeypatch)
    assert run() == 2, "nothing is lost by running the same command again"
    assert Path("out.jsonl").read_bytes() == left
    num_good = sum(b'"error"' not in line for line in left.split(b"\n")[:-1])
    assert run("--resume") == 1
    assert Path("out.jsonl").read_bytes() == whole
    assert numbers == [len(LINES) - 2 - num_good], "the good results are not decoded again"


@pytest.mark.parametrize(
    "size",
    grid(["nothing", "half a line", "no newline", "a blank line", "all"], keep=["half a line", "no newline"]),
)
def test_what_a_file_may_have_when_it_is_resumed(folder, whole, size):
    first, second, *_ = whole.splitlines(keepends=True)
    cut = {"nothing": 0, "half a line": len(first) + 9, "no newline": len(first) - 1, "all": len(whole)}.get(size)
    Path("out.jsonl").write_bytes(first + b"\n" + second if cut is None else whole[:cut])
    assert run("--resume") == 1
    assert Path("out.jsonl").read_bytes() == whole


def test_a_missing_file_can_be_resumed_and_a_complete_one_needs_no_model(folder, capsys, monkeypatch):
    write_lines(folder / "in.jsonl", *(line for line in LINES if "prompt_ids" in line and line["prompt_ids"] != [5000]))
    assert run("--resume") == 0
    whole = Path("out.jsonl").read_bytes()
    monkeypatch.setattr(Engine, "__init__", None)
    assert run("--resume") == 0
    assert Path("out.jsonl").read_bytes() == whole


def test_results_are_written_as_they_come_and_put_in_order_at_the_end(folder, monkeypatch):
    write_lines(folder / "in.jsonl", *({"prompt_ids": [i, i]} for i in (3, 4, 5)))
    target = sd.Engine(PAIR[1], None).target.model
    outputs = sd.generate(target, None, [[3, 3], [4, 4], [5, 5]], sd.SamplingParams(max_new_tokens=6))
    seen = []

    def backwards(self, prompts, params):
        for output in reversed(outputs):
            yield output
            seen.append([record["line"] for record in read_lines(Path("out.jsonl"))])

    monkeypatch.setattr(Engine, "as_completed", backwards)
    assert run() == 0
    assert seen == [[3], [3, 2], [3, 2, 1]]
    assert [record["token_ids"] for record in read_lines(Path("out.jsonl"))] == [o.token_ids for o in outputs]
    assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_ctrl_c_keeps_the_results(folder, whole, capsys, monkeypatch):
    add = ResultFile.add

    def interrupted(self, number, record):
        add(self, number, record)
        if len(self.done) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(ResultFile, "add", interrupted)
    assert run() == 130
    assert "interrupted; 4 of 8 results are in out.jsonl, and --resume adds the others" in capsys.readouterr().err
    assert len(read_lines(Path("out.jsonl"))) == 4
    monkeypatch.undo()
    os.chdir(folder)
    assert run("--resume") == 1
    assert Path("out.jsonl").read_bytes() == whole


@pytest.mark.parametrize("link", ["itself", "symlink", "hard link"])
@pytest.mark.parametrize("option", [[], ["--resume"], ["--overwrite"]])
def test_the_output_is_not_the_input(folder, capsys, link, option):
    before = Path("in.jsonl").read_bytes()
    name = {"itself": "./in.jsonl"}.get(link, "link.jsonl")
    if link == "symlink":
        os.symlink("in.jsonl", name)
    if link == "hard link":
        os.link("in.jsonl", name)
    assert run(*option, output=name) == 2
    assert "is the input file in.jsonl; choose another file" in capsys.readouterr().err
    assert Path("in.jsonl").read_bytes() == before


def test_overwrite_replaces_the_file_once_the_models_are_there(folder, whole, monkeypatch):
    Path("out.jsonl").write_text("something else\n")
    assert (
        main(
            [
                "generate",
                "--target",
                "no/such",
                *PAIR[2:],
                "--prompts",
                "in.jsonl",
                "--output",
                "out.jsonl",
                "--overwrite",
            ]
        )
        == 2
    )
    assert Path("out.jsonl").read_text() == "something else\n"
    os.symlink("out.jsonl", "link.jsonl")
    assert run("--overwrite", output="link.jsonl") == 1
    assert Path("out.jsonl").read_bytes() == whole
    assert Path("link.jsonl").is_symlink()


def test_a_link_to_a_file_that_does_not_exist_yet(folder, whole):
    os.symlink("later.jsonl", "link.jsonl")
    assert run(output="link.jsonl") == 1
    assert Path("link.jsonl").is_symlink()
    assert Path("later.jsonl").read_bytes() == whole


def test_the_check_before_a_run_leaves_links_and_no_file(folder):
    os.symlink("later.jsonl", "link.jsonl")
    expect_writable(Path("link.jsonl"))
    assert Path("link.jsonl").is_symlink()
    assert not Path("later.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"line": 1, "id": "a"}\nnot json\n{"line": 3}\n', "out.jsonl, line 2: not JSON"),
        ('{"line": 9}\n', "not a result of one of the 8 prompts"),
        ('{"line": true}\n', "not a result of one of"),
        ('[1]\n', "not a result of one of"),
        ('{"line": 1, "id": "b"}\n', "the result of line 1 has the id 'b', and the prompt another"),
        ('{"line": 6, "id": null}\n', "the result of line 6 has the id None"),
        ('{"title": "notes"}', "out.jsonl, line 1: not a result of one of the 8 prompts"),
        ('{"line": 9}', "out.jsonl, line 1: not a result of one of the 8 prompts"),
        ('my notes', "out.jsonl, line 1: not JSON"),
        ('{"line": 1, "id": "a"}\nmy notes', "out.jsonl, line 2: not JSON"),
    ],
)  # fmt: skip
def test_results_of_another_input_are_not_resumed(folder, capsys, content, message):
    Path("out.jsonl").write_text(content)
    assert run("--resume") == 2
    assert message in capsys.readouterr().err
    assert Path("out.jsonl").read_text() == content


def test_lines_of_messages(folder, capsys):
    Path("chat.jinja").write_text(TEMPLATE)
    write_lines(folder / "in.jsonl", {"messages": HELLO}, {"messages": [{"role": "error", "content": ""}]})
    variables = ["--chat-template-kwargs", '{"think": 1}']
    assert run("--chat-template", "chat.jinja", *variables) == 1
    good, bad = read_lines(Path("out.jsonl"))
    params, options = sd.SamplingParams(max_new_tokens=6), {"chat_template_kwargs": {"think": 1}}
    (output,) = sd.generate(*PAIR[1:4:2], HELLO, params, chat_template=TEMPLATE, dtype="float32", **options)
    assert good["token_ids"] == output.token_ids
    assert "no such role" in bad["error"]


def test_an_id_that_is_no_text(folder):
    write_lines(folder / "in.jsonl", '{"prompt_ids": [5], "id": "\\ud800"}')
    assert run() == 0
    assert json.loads(Path("out.jsonl").read_bytes())["id"] == "\ud800"


@pytest.mark.grid
def test_a_pipe_gets_the_results_too(folder, whole):
    argv = ["generate", *PAIR, *OPTIONS, "--prompts", str(folder / "in.jsonl"), "--output", "/dev/stdout"]
    ended = child("", argv)
    assert ended.returncode == 1
    assert sorted(ended.stdout.splitlines()) == sorted(whole.splitlines())
