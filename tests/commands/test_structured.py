"""Structured outputs and calls of tools on the command line and in batch files."""

from __future__ import annotations

import json

import pytest

import specdec_fast as sd
from specdec_fast.cli import main
from support.chats import HELLO, TEMPLATE
from support.commands import DRAFT, PAIR, TARGET, options_of, read_lines, write_lines

pytest.importorskip("xgrammar")

VOTE = {"type": "object", "properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"]}
TOOL = {"type": "function", "function": {"name": "vote", "parameters": VOTE}}
CALL = "{# <tool_call> #}"  # so that the template shows Hermes' format


def test_generate_and_batch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = write_lines(tmp_path / "in.jsonl", {"prompt": "Yes or no?"})
    (tmp_path / "schema.json").write_text(json.dumps({"enum": ["yes", "no"]}))
    words = {"target": TARGET, "draft": DRAFT, "prompts": path, "output": "out.jsonl", "max-new-tokens": 60}
    argv = ["generate", *options_of(words), "--dtype", "float32"]
    assert main([*argv, "--json-schema", "schema.json"]) == 0
    (record,) = read_lines(tmp_path / "out.jsonl")
    assert record["text"] in ('"yes"', '"no"')
    reasoning = ["--choice", "7", "--reasoning", "think", "--reasoning-tokens", "3"]
    write_lines(tmp_path / "in.jsonl", {"prompt": "Yes or no? <think>"})
    assert main([*argv, "--overwrite", *reasoning]) == 0
    (record,) = read_lines(tmp_path / "out.jsonl")
    assert record["text"].rstrip().endswith("7")
    assert "</think>" in record["text"]
    assert main([*argv, "--overwrite", "--reasoning-tokens", "3"]) == 2
    assert "--reasoning NAME" in capsys.readouterr().err
    assert main([*argv, "--overwrite", "--regex", "a", "--choice", "b"]) == 2
    assert "given: regex, choice" in capsys.readouterr().err

    (tmp_path / "template.jinja").write_text(TEMPLATE.replace("t.name", "t.function.name") + CALL)
    chat = {"model": "m", "messages": HELLO, "temperature": 0, "max_tokens": 200, "thinking_token_budget": 3}
    bodies = [
        {**chat, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {**chat, "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}},
        {**chat, "structured_outputs": {"regex": "(a"}},
        {**chat, "structured_outputs": {"choice": ["7"]}},
    ]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": b} for i, b in enumerate(bodies)
    ]
    write_lines(tmp_path / "batch.jsonl", *lines)
    options = ["--input", "batch.jsonl", "--output", "answers.jsonl", "--chat-template", "template.jinja"]
    options += ["--reasoning-parser", "think"]
    assert main(["batch", *PAIR, *options, "--served-model-name", "m"]) == 1
    found = {line["custom_id"]: line["response"] for line in read_lines(tmp_path / "answers.jsonl")}
    choices = [found[str(i)]["body"]["choices"][0]["message"] for i in (0, 1, 3)]
    (call,) = choices[0]["tool_calls"]
    assert call["function"]["name"] == "vote"
    assert json.loads(call["function"]["arguments"])["answer"] in ("yes", "no")
    assert choices[1]["content"] == choices[2]["content"] == "7"
    assert found["2"]["status_code"] == 400
    assert "parenthesis is not closed" in found["2"]["body"]["error"]["message"]


def test_wrong_options_are_refused_before_models_are_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = write_lines(tmp_path / "in.jsonl", {"prompt": "a"})
    (tmp_path / "schema.json").write_text('{"type": "strnig"}')
    monkeypatch.setattr(sd.Engine, "__init__", lambda *args, **options: pytest.fail("models were loaded"))
    argv = ["generate", *PAIR, "--prompts", str(path), "--output", "out.jsonl", "--json-schema"]
    for file, message in (("schema.json", "#/type: 'strnig' is no type"), ("missing.json", "missing.json")):
        assert main([*argv, file]) == 2
        assert message in capsys.readouterr().err
