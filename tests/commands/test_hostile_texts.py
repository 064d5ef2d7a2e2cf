"""``train-drafter`` on prompts and texts that nobody should pass: one line that says what is wrong, or right work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import specdec_fast as sd
from specdec_fast.cli import main
from specdec_fast.training import texts as texts_module
from specdec_fast.training.texts import Texts
from support.commands import TARGET

SIZES = {
    "eagle3": ["--hidden-size", "32", "--tap-layers", "1,2,3"],
    "specblock": ["--hidden-size", "32", "--tap-layers", "1,2,3"],
    "medusa": [],
    "clover": [],
    "dflash": ["--tap-layers", "1,3", "--num-layers", "1"],
    "dspark": ["--tap-layers", "1,3", "--num-layers", "1", "--markov-rank", "4"],
}
GOOD = '{"prompt_ids": [5]}\n'


def train(*options, kind="medusa"):
    argv = ["--kind", {"dspark": "dflash"}.get(kind, kind), "--target", TARGET, "--output", "out", *SIZES[kind]]
    argv += ["--text-tokens", "100", "--max-new-tokens", "8", "--held-out", "2", "--epochs", "1"]
    return main(["train-drafter", *argv, *options])


def refusal(capsys):
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("specdec-fast")]
    return line


@pytest.fixture
def unread(monkeypatch):
    """No target is asked for a text."""
    monkeypatch.setattr(texts_module, "_written", None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "in.jsonl has no lines"),
        (b"\n \n\r\n", "in.jsonl has no lines"),
        (b'{"prompt": "a"}\n\n{"prompt": "b"}\n', "in.jsonl, line 2: not JSON"),
        (bytes(1000), "in.jsonl, line 1: not JSON"),
        (bytes(range(256)), "in.jsonl, line 1: not JSON"),
        (b'{"prompt": "a\0b"}\n', "in.jsonl, line 1: not JSON (Invalid control character at column 14)"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "in.jsonl, line 2: not UTF-8 text"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "in.jsonl, line 1: not UTF-8 text"),
        (b"[" * 100_000, "in.jsonl, line 1: not JSON that can be read"),
        (
            GOOD.encode() + b'{"prompt": "a\\ud800"}\n',
            "in.jsonl, line 2: the tokenizer cannot encode the prompt, whose character 1",
        ),
        (GOOD.encode() + b'{"prompt": ""}\n', "in.jsonl, line 2: the prompt is an empty string"),
        (GOOD.encode() + b'{"prompt_ids": []}\n', "in.jsonl, line 2: the prompt has no tokens"),
        (
            GOOD.encode() + b'{"prompt_ids": [1024]}\n',
            "in.jsonl, line 2: token id 1024 is outside the target's vocabulary",
        ),
        (GOOD.encode() + b'{"prompt_ids": [-1]}\n', "in.jsonl, line 2: token id -1 is outside the target's vocabulary"),
        (GOOD.encode() + b'{"prompt_ids": [5' + b", 5" * 512 + b"]}\n", "in.jsonl, line 2: the prompt has 513 tokens"),
        (b'{"prompt_ids": [], "note": "' + b"x" * 5_000_000 + b'"}\n', "in.jsonl, line 1: the prompt has no tokens"),
        (
            GOOD.encode() + b'{"messages": [{"role": "user", "content": "x"}]}\n',
            "in.jsonl, line 2: the prompt is a list of mess",
        ),
    ],
    ids=lambda value: value[10:40] if isinstance(value, str) else "",
)
def test_prompts_are_refused_by_their_line_before_a_text_is_written(in_folder, unread, capsys, content, message):
    Path("in.jsonl").write_bytes(content)
    assert train("--prompts", "in.jsonl") == 2
    assert refusal(capsys).startswith(f"specdec-fast train-drafter: {message}")
    assert not list(Path("out").iterdir())


@pytest.mark.parametrize("name", [".", "missing.jsonl", "locked.jsonl"])
def test_prompts_that_cannot_be_read(in_folder, capsys, monkeypatch, name):
    Path("locked.jsonl").write_text(GOOD)
    read_bytes = Path.read_bytes

    def locked(self):  # a mode would not keep root out
        if self.name == "locked.jsonl":
            raise PermissionError(13, "Permission denied", str(self))
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", locked)
    assert train("--prompts", name) == 2
    assert f"cannot read {name!r}: " in refusal(capsys)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Texts of the shortest prompts there are, in lines that end as on Windows."""
    folder = tmp_path_factory.mktemp("written")
    lines = ['{"prompt": "a\\u0000b"}', '{"prompt_ids": [5]}', '{"prompt_ids": [1]}', '{"prompt": "\\r"}']
    (folder / "in.jsonl").write_bytes("\r\n".join([*lines, ""]).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train("--prompts", "in.jsonl") == 0
    return folder / "out"


def test_the_shortest_prompts_are_continued(written):
    texts = Texts.load(written / "texts.safetensors")
    assert texts.lengths.min() >= 4
    assert {5, 1} & set(texts.token_ids.tolist())
    assert json.loads((written / "report.json").read_text())["texts"]["number"] == len(texts.lengths)


@pytest.mark.parametrize("kind", SIZES)
def test_every_kind_learns_from_the_shortest_texts(in_folder, kind):
    Path("out").mkdir()
    Texts.of([[i, 5, 6, 7] for i in range(5)]).save(Path("out/texts.safetensors"))
    assert train("--resume", kind=kind) == 0


def ids(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("token_ids", "lengths", "message"),
    [
        (ids(1, 2, 3), ids(3), "a text of 3 tokens; expected at least 4"),
        (ids(*range(8)), ids(4, 4, 0), "a text of 0 tokens"),
        (ids(*range(4)), ids(4, 4, -4), "a text of -4 tokens"),
        (ids(*range(4), dtype=torch.float32), ids(4), "damaged"),
        (ids(*range(4)), ids(4, dtype=torch.float32), "damaged"),
        (ids(*range(4)), ids(5), "damaged"),
        (ids(*range(8)).reshape(2, 4), ids(4, 4), "damaged"),
        (ids(*range(4)), torch.tensor(4), "damaged"),
    ],
)
def test_damaged_texts_are_refused(tmp_path, token_ids, lengths, message):
    path = tmp_path / "texts.safetensors"
    save_file({"token_ids": token_ids, "lengths": lengths}, path)
    with pytest.raises(sd.ConfigError, match=message) as found:
        Texts.load(path)
    assert str(path) in str(found.value)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[5, 6, 7, 1024]] * 6, "the texts have the id 1024, but the target has 1024 ids"),
        ([[5, 6, 7, -1]] * 6, "the texts have the id -1, but the target has 1024 ids"),
        ([[5] * 4] * 5 + [[5] * 514], "the texts have one of 514 tokens, but the target has 512 positions"),
        ([], "there are 0 texts"),
    ],
    ids=["too large", "negative", "too long", "none"],
)
def test_texts_of_another_target_are_refused(in_folder, capsys, texts, message):
    Path("out").mkdir()
    Texts.of(texts).save(Path("out/texts.safetensors"))
    assert train("--resume") == 2
    assert message in refusal(capsys)
