"""The command line, run in this process on the bundled pair: what it prints, writes and returns."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import specdec_fast as sd
from specdec_fast.cli import main
from specdec_fast.commands import demo
from specdec_fast.commands.prompt_files import read_prompts
from specdec_fast.equivalence.compare import transformers_greedy
from specdec_fast.equivalence.report import Models
from specdec_fast.ops import BACKENDS, all_ops, registry
from support.commands import DRAFT, TARGET, options_of, run_generate, run_verify, write_lines
from support.grids import grid
from support.other_tokenizers import byte_level


# Both schedulers, with and without drafting, more prompts than a batch holds, each backend of a CPU.
@pytest.mark.parametrize(
    ("method", "batch_size", "k", "backend"),
    grid(
        [("exspec", 8, 5, "auto"), ("eqspec", 2, 3, "torch"), ("exspec", 1, 0, "auto"), ("exspec", 2, "auto", "auto")],
        keep=[("exspec", 8, 5, "auto")],
    ),
)
def test_demo_ends_in_one_json_line(capsys, method, batch_size, k, backend):
    options = {"method": method, "batch-size": batch_size, "num-draft-tokens": k, "backend": backend}
    assert main(["demo", "--json", "--num-prompts", "3", "--max-new-tokens", "6", *options_of(options)]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert report["exact_match"] == 1.0
    asked = {"method": method, "batch_size": batch_size, "num_draft_tokens": k, "prompts": 3}
    assert asked.items() <= report.items()
    assert 3 <= report["tokens"] <= 18
    assert 1 <= report["mean_acceptance_length"] <= (9 if k == "auto" else k + 1)
    assert min(report["tokens_per_second"], report["autoregressive_tokens_per_second"]) > 0
    assert text[-1].endswith("every token: 3 of 3 prompts")


def test_demo_without_json_prints_none(capsys):
    assert main(["demo", "--num-prompts", "1", "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("every token: 1 of 1 prompts")


def test_demo_fails_when_a_token_differs(capsys, monkeypatch):
    def other_last_token(model, prompt_ids, max_new_tokens):
        tokens = transformers_greedy(model, prompt_ids, max_new_tokens)
        return tokens if len(prompt_ids) % 2 else [*tokens[:-1], tokens[-1] ^ 1]

    monkeypatch.setattr(demo, "transformers_greedy", other_last_token)
    assert main(["demo", "--json", "--num-prompts", "4", "--max-new-tokens", "4"]) == 1
    assert 0 < json.loads(capsys.readouterr().out.splitlines()[-1])["exact_match"] < 1


@pytest.mark.parametrize("enforce_eager", grid([False, True], keep=[True]))
def test_forwards_can_be_left_to_pytorch(in_folder, monkeypatch, prompt_ids, target, enforce_eager):
    made, programs = [], sd.Engine(target, None).describe()["forward_program"]

    class Recorded(sd.Engine):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self.config.enforce_eager)

    monkeypatch.setattr("specdec_fast.commands.line_results.Engine", Recorded)
    monkeypatch.setattr("specdec_fast.equivalence.report.Engine", Recorded)
    flags = {"enforce-eager": ""} if enforce_eager else {}
    run_generate(
        write_lines(in_folder / "lines.jsonl", {"prompt_ids": prompt_ids[1]}), **flags, **{"max-new-tokens": 2}
    )
    assert made == [enforce_eager]
    made.clear()
    status, _ = run_verify(in_folder, prompt_ids[1:3], **{"batch-sizes": 2, "methods": "autoregressive"}, **flags)
    assert status == 0
    # the reference, the one setting, and the control: with a reference of its own where the first one is a program's
    of_control = [True, True] if programs and not enforce_eager else [True]
    assert made == [enforce_eager, enforce_eager, *of_control]


class MadeEngineError(Exception):
    """Stands for an engine that need not be made."""


# the commands that decode requests, and where each makes its engine
MAKERS = {
    "generate": "commands.line_results.Engine",
    "chat": "commands.chat.Engine",
    "batch": "commands.batch.Engine",
    "serve": "service.async_engine.Engine",
}


def engine_arguments(in_folder, monkeypatch, command, *options):
    """Run a command as far as its engine; return the engine's configuration and its keywords."""
    made = []

    def make(target, draft, config, **others):
        made.append((config, others))
        raise MadeEngineError

    monkeypatch.setattr(f"specdec_fast.{MAKERS[command]}", make)
    body = {"model": TARGET, "prompt": "Once", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    files = {"generate": ["--prompts", write_lines(in_folder / "in.jsonl", {"prompt": "Once"})]}
    files["batch"] = ["--input", write_lines(in_folder / "batch.jsonl", line), "--served-model-name", TARGET]
    if command in files:
        files[command] += ["--output", str(in_folder / "out.jsonl")]
    if command == "serve":
        files["serve"] = ["--port", "0"]
    with pytest.raises(MadeEngineError):
        main([command, "--target", TARGET, "--draft", DRAFT, *files.get(command, []), *options])
    return made[0]


@pytest.mark.parametrize("option", [None, "--prefix-cache", "--no-prefix-cache"])
@pytest.mark.parametrize("command", MAKERS)
def test_which_commands_keep_prefixes(in_folder, monkeypatch, command, option):
    config, _ = engine_arguments(in_folder, monkeypatch, command, *([option] if option else []))
    is_on = command != "generate"
    assert bool(config.prefix_cache) == (is_on if option is None else option == "--prefix-cache")


@pytest.mark.parametrize("command", MAKERS)
def test_a_draft_model_gets_the_tokenizer_that_is_named(in_folder, monkeypatch, command):
    byte_level(["one two"], 300).save_pretrained("other")
    _, keywords = engine_arguments(in_folder, monkeypatch, command, "--draft-tokenizer", "other")
    assert len(keywords["draft_tokenizer"]) == len(byte_level(["one two"], 300))
    _, keywords = engine_arguments(in_folder, monkeypatch, command)
    assert keywords["draft_tokenizer"] is None


def test_misspelt_number_of_draft_tokens_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--num-draft-tokens", "atuo"])
    assert "'atuo' is neither an integer nor 'auto'" in capsys.readouterr().err


def test_doctor_shows_every_op_on_every_backend(capsys, monkeypatch):
    broken = replace(BACKENDS["cpp"], why_unavailable=lambda: "no compiler here; install one")
    monkeypatch.setitem(registry.BACKENDS, "cpp", broken)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines]
    assert ["op", *BACKENDS] in table
    for op in all_ops().values():
        assert [op.name, *("no" if op.why_unavailable(b) else "yes" for b in BACKENDS)] in table
        assert f"no: {op.name} x cpp: {op.why_unavailable('cpp')}" in lines
    assert "no: verify_chain x cpp: no compiler here; install one" in lines
    assert any(line.startswith("chosen on cpu:") and "verify_chain torch" in line for line in lines)
    assert any(f"specdec-fast {sd.__version__}" in line for line in lines)


# What a user may get wrong, one each: the model, the prompt file, the place of the output, a number, a device.
DEEP = "[" * 100_000
COMMON = {"target": TARGET, "draft": "none", "prompts": "good.jsonl", "max-new-tokens": 2}
OK = {**COMMON, "output": "o.jsonl"}
VERIFY = {**COMMON, "methods": "eqspec", "batch-sizes": 1}
UNUSABLE = {
    "absolute-folder": ("generate", {**OK, "target": "/no/such/folder"}),
    "relative-folder": ("generate", {**OK, "target": "no-such-folder"}),
    "draft-folder": ("generate", {**OK, "draft": "no/such-folder"}),
    "folder-without-model": ("generate", {**OK, "target": "empty"}),
    "no-prompt-file": ("generate", {**OK, "prompts": "none.jsonl"}),
    "verify-not-utf8": ("verify", {**VERIFY, "prompts": "latin1.jsonl"}),
    "output-nowhere": ("generate", {**OK, "output": "no/such/folder/o.jsonl"}),
    "dtype": ("generate", {**OK, "dtype": "int8"}),
    "device-unknown": ("generate", {**OK, "device": "abacus"}),
    "batch-size": ("generate", {**OK, "batch-size": 0}),
    "no-new-tokens": ("generate", {**OK, "max-new-tokens": 0}),
    "deep-brackets": ("generate", {**OK, "chat-template-kwargs": DEEP}),
    "verify-folder": ("verify", {**VERIFY, "target": "no/such-folder"}),
    "verify-bad-line": ("verify", {**VERIFY, "prompts": "bad.jsonl"}),
    "verify-empty-prompt": ("verify", {**VERIFY, "prompts": "empty-prompt.jsonl"}),
    "verify-outside-vocabulary": ("verify", {**VERIFY, "prompts": "outside.jsonl"}),
    "verify-sampling": ("verify", {**VERIFY, "sampling": "heat=2"}),
    "verify-sampling-range": ("verify", {**VERIFY, "sampling": "top_p=2"}),
    "verify-sampling-no-number": ("verify", {**VERIFY, "sampling": "temperature=.7.1"}),
    "verify-json-nowhere": ("verify", {**VERIFY, "json": "no/such/folder/r.json"}),
    "verify-plot-nowhere": ("verify", {**VERIFY, "plot": "no/such/folder/r.png"}),
    "verify-plot-suffix": ("verify", {**VERIFY, "plot": "report.plot"}),
    "verify-later-dtype": ("verify", {**VERIFY, "dtypes": "float32 int8"}),
    "verify-later-batch-size": ("verify", {**VERIFY, "batch-sizes": "1 0"}),
    "verify-no-new-tokens": ("verify", {**VERIFY, "max-new-tokens": 0}),
    "demo-no-prompts": ("demo", {"num-prompts": 0, "max-new-tokens": 2}),
}


@pytest.mark.parametrize(("command", "options"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_unusable_arguments_end_in_one_line(in_folder, capsys, monkeypatch, command, options):
    monkeypatch.setattr(Models, "compare_all", None)  # nothing may be decoded before it is found out
    if "plot" in options:
        pytest.importorskip("matplotlib")
    (in_folder / "empty").mkdir()
    (in_folder / "latin1.jsonl").write_bytes(b'{"prompt": "Gr\xfc\xdfe"}\n')
    write_lines(in_folder / "good.jsonl", {"prompt_ids": [5, 6]})
    write_lines(in_folder / "bad.jsonl", {"prompt_ids": [5, 6]}, "{bad")
    write_lines(in_folder / "empty-prompt.jsonl", {"prompt_ids": []})
    write_lines(in_folder / "outside.jsonl", {"prompt_ids": [5000]})
    assert main([command, *options_of(options)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"specdec-fast {command}: ")
    assert len(captured.err.splitlines()) == 1, captured.err
    assert captured.out == ""


# No command, an unknown one, an unknown choice, a missing argument, no number, no value, a tree that is too deep.
@pytest.mark.parametrize(
    "argv",
    [[], ["serve"], ["demo", "--method", "fifo"], ["generate"], ["demo", "--batch-size", "x"],
     ["demo", "--num-prompts=--"], ["verify", "--draft-tree", DEEP]],
    ids=lambda argv: str(argv)[:30],
)  # fmt: skip
def test_wrong_usage_is_explained(capsys, argv):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("usage: specdec-fast")


def test_runs_as_a_module():
    command = [sys.executable, "-m", "specdec_fast", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, f"specdec-fast {sd.__version__}\n"), ended.stderr


@pytest.mark.grid
def test_a_reader_that_leaves_is_no_error():
    """As ``doctor | head -1`` does. A short output is only written when the command has ended."""
    code = "import sys; sys.stdin.read(); from specdec_fast.cli import main; sys.exit(main(['doctor']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    _, error = process.communicate("")
    assert (process.returncode, error) == (141, "")


@pytest.mark.grid
def test_a_question_of_spec_bench_is_its_first_turn(in_folder, capsys):
    question = {"question_id": 81, "category": "writing", "turns": ["One day", "Rewrite it."], "reference": ["x"]}
    path = write_lines(in_folder / "question.jsonl", question, {"prompt": "One day", "turns": ["Not this"]})
    assert [line.prompt for line in read_prompts(Path(path))] == ["One day", "One day"]
    status, (first, second) = run_generate(path)
    assert status == 0
    assert first["token_ids"] == second["token_ids"]
    words = {"target": TARGET, "draft": DRAFT, "prompts": path, "max-new-tokens": 4, "methods": "eqspec"}
    assert main(["verify", *options_of(words | {"batch-sizes": 2, "num-draft-tokens": 2})]) == 0
    assert "1 of 1 settings" in capsys.readouterr().out
