"""``specdec-fast batch``: OpenAI batch files in, OpenAI batch results out, resumable."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import specdec_fast as sd
from specdec_fast.cli import main
from specdec_fast.commands.result_files import ResultFile
from specdec_fast.engine.engine import Engine
from support.chats import HELLO, TEMPLATE
from support.commands import PAIR, read_lines, write_lines

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def request(custom_id, url, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", "max_tokens": 5, **body}}


GOOD = [
    request("chat", CHAT, messages=HELLO, temperature=0, logprobs=True),
    request("sampled", CHAT, messages=HELLO, seed=3, n=2, chat_template_kwargs={"think": 2}),
    request("texts", TEXT, prompt=["One day", "<s>Two"], temperature=0, echo=True),
    request("ids", TEXT, prompt=[5, 6], temperature=0, stop=["e"]),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return tmp_path


def batch(*lines, options=()):
    write_lines(Path("in.jsonl"), *lines)
    argv = ["--input", "in.jsonl", "--output", "out.jsonl", "--chat-template", "template.jinja", "--served-model-name"]
    status = main(["batch", *PAIR, "--num-draft-tokens", "2", *argv, "m", "other", *options])
    return status, read_lines(Path("out.jsonl")) if Path("out.jsonl").exists() else []


def stable(records):
    """Records without what is new in every run."""
    text = json.dumps([{**record, "id": None} for record in records])
    for record in records:
        text = text.replace((record["response"] or {}).get("request_id", "none"), "same")
        text = text.replace(f'"created": {(record["response"] or {"body": {}})["body"].get("created")}', "")
    return text


def test_answers_are_those_of_the_engine_in_the_shape_of_the_api(folder, capsys):
    status, records = batch(*GOOD)
    assert status == 0
    assert [record["custom_id"] for record in records] == [line["custom_id"] for line in GOOD]
    assert len({record["id"] for record in records}) == len(GOOD)
    assert all(record["error"] is None and record["response"]["status_code"] == 200 for record in records)
    bodies = [record["response"]["body"] for record in records]
    from openai.types import Completion  # takes a second, in every process that collects tests
    from openai.types.chat import ChatCompletion

    chat, sampled = (ChatCompletion.model_validate(body) for body in bodies[:2])
    texts, ids = (Completion.model_validate(body) for body in bodies[2:])
    engine = sd.Engine(PAIR[1], None, dtype="float32")

    def decode(prompt, variables=None, **params):
        options = {"chat_template": TEMPLATE, "chat_template_kwargs": variables}
        return engine.generate(prompt, sd.SamplingParams(max_new_tokens=5, **params), **options)[0]

    greedy = decode(HELLO, logprobs=True)
    assert chat.choices[0].message.content == greedy.text
    assert [entry.logprob for entry in chat.choices[0].logprobs.content] == greedy.logprobs
    assert chat.usage.prompt_tokens == len(greedy.prompt_ids)
    each = [decode(HELLO, {"think": 2}, temperature=1.0, seed=3 + i).text for i in range(2)]
    assert [choice.message.content for choice in sampled.choices] == each
    assert [choice.text for choice in texts.choices] == [t + decode(t).text for t in ("One day", "<s>Two")]
    assert ids.choices[0].text == decode([5, 6], stop=["e"]).text
    assert capsys.readouterr().err == ""


WRONG = [
    ("nope", None, "invalid_json_line", "not JSON"),
    ("[1]", None, "invalid_request", "expected an object"),
    ({"custom_id": 5, "method": "POST", "url": TEXT, "body": {}}, None, "invalid_request", "custom_id is 5"),
    ({"custom_id": "m", "method": "GET", "url": TEXT, "body": {}}, "m", "invalid_request", "method is 'GET'"),
    (request("u", "/v1/embeddings"), "u", "invalid_request", "url is '/v1/embeddings'"),
    ({"custom_id": "b", "method": "POST", "url": TEXT}, "b", "invalid_request", "body is a NoneType"),
    (request("ids", TEXT, prompt="x"), "ids", "duplicate_custom_id", "that of an earlier line"),
    (request("s", TEXT, prompt="x", stream=True), "s", 400, "a batch has whole answers only"),
    (request("t", TEXT, prompt="x", max_tokens="5"), "t", 400, "max_tokens: '5': Input should be a valid integer"),
    (request("n", TEXT, prompt="x", model="gpt"), "n", 404, "the model 'gpt' does not exist; expected one of 'm'"),
    (request("r", TEXT, prompt="x", top_p=5), "r", 400, "top_p=5"),
    (request("v", TEXT, prompt=[5000]), "v", 400, "outside the target's vocabulary"),
    (request("e", CHAT, messages=[{"role": "error", "content": ""}]), "e", 400, "no such role"),
    (request("i", CHAT, messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "i", 400, "only texts are"),
    (request("l", TEXT, prompt=[5] * 600), "l", 400, "600 tokens"),
]


def test_wrong_lines_fail_alone(folder, capsys):
    status, records = batch(GOOD[3], *(line for line, *_ in WRONG), GOOD[0])
    assert status == 1
    assert [record["response"]["status_code"] for record in (records[0], records[-1])] == [200, 200]
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == len(WRONG)
    for number, (record, (_, custom_id, code, message)) in enumerate(zip(records[1:-1], WRONG, strict=True), start=2):
        assert record["custom_id"] == custom_id
        if isinstance(code, str):
            assert record["response"] is None
            error = record["error"]
            assert (error["code"], error["line"]) == (code, number)
        else:
            assert record["error"] is None
            assert record["response"]["status_code"] == code
            error = record["response"]["body"]["error"]
        assert message in error["message"]
        assert sum(line.startswith(f"in.jsonl, line {number}: ") and message in line for line in errors) == 1


def test_an_interrupted_batch_is_resumed(folder, monkeypatch, capsys):
    lines = [*GOOD, WRONG[0][0], WRONG[6][0]]
    _, whole = batch(*lines)
    Path("out.jsonl").unlink()
    add = ResultFile.add

    def interrupted(self, number, record):
        add(self, number, record)
        if len(self.done) == 4:
            self._file.write(b'{"id": "batch_req_torn')
            raise KeyboardInterrupt

    monkeypatch.setattr(ResultFile, "add", interrupted)
    write_lines(Path("in.jsonl"), *lines)
    argv = ["--input", "in.jsonl", "--output", "out.jsonl", "--chat-template", "template.jinja", "--served-model-name"]
    assert main(["batch", *PAIR, "--num-draft-tokens", "2", *argv, "m"]) == 130
    assert "interrupted; 4 of 6 results are in out.jsonl" in capsys.readouterr().err
    monkeypatch.setattr(ResultFile, "add", add)
    decoded, as_completed = [], Engine.as_completed

    def noted(self, prompts, params):
        decoded.append(len(prompts))
        return as_completed(self, prompts, params)

    monkeypatch.setattr(Engine, "as_completed", noted)
    status, records = batch(*lines, options=["--resume"])
    assert status == 1
    assert stable(records) == stable(whole)
    assert decoded[0] < 6, "some were answered before"


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"line": 1}\n', ["--resume"], "out.jsonl, line 1: not a result of a batch"),
        ('{"custom_id": "x", "response": null, "error": null}\n', ["--resume"], "no line of the input has the custom"),
        ("x\n", [], "out.jsonl has content; pass --resume"),
        ('{"name": "x"}', ["--resume"], "out.jsonl, line 1: not a result of a batch"),
        ('{"id": "x", "no', ["--resume"], "out.jsonl, line 1: not JSON"),
    ],
)  # fmt: skip
def test_other_files_are_not_touched(folder, capsys, content, options, message):
    Path("out.jsonl").write_text(content)
    write_lines(Path("in.jsonl"), *GOOD)
    assert main(["batch", *PAIR, "--input", "in.jsonl", "--output", "out.jsonl", *options]) == 2
    assert message in capsys.readouterr().err
    assert Path("out.jsonl").read_text() == content


def test_the_name_of_the_model_is_that_of_the_target(folder):
    line = request("a", TEXT, prompt="x")
    del line["body"]["model"]
    write_lines(Path("in.jsonl"), line, request("b", TEXT, prompt="x", model=PAIR[1]))
    assert main(["batch", *PAIR, "--input", "in.jsonl", "--output", "out.jsonl"]) == 0
    assert [record["response"]["body"]["model"] for record in read_lines(Path("out.jsonl"))] == [PAIR[1]] * 2


def test_sampling_parameters_that_a_body_leaves_out_come_from_the_generation_config(folder, capsys):
    shutil.copytree(PAIR[1], "target")
    config = json.loads(Path("target/generation_config.json").read_text())
    sampling = {"temperature": 0.6, "top_k": 5, "repetition_penalty": 1.2}
    Path("target/generation_config.json").write_text(json.dumps({**config, "do_sample": True, **sampling}))
    body = {"prompt": "One day", "max_tokens": 20}
    lines = [request("sampled", TEXT, seed=1, **body), request("greedy", TEXT, temperature=0, **body)]
    engine = sd.Engine("target", None, dtype="float32")

    def texts(*options):
        Path("out.jsonl").unlink(missing_ok=True)
        status, records = batch(*lines, options=["--target", "target", *options])
        assert status == 0
        return [record["response"]["body"]["choices"][0]["text"] for record in records]

    def decode(**params):
        return engine.generate("One day", sd.SamplingParams(20, **params))[0].text

    of_config = texts()
    assert of_config == [decode(seed=1, **sampling), decode(top_k=5, repetition_penalty=1.2)]
    assert "temperature=0.6, top_k=5, repetition_penalty=1.2" in capsys.readouterr().err
    of_openai = texts("--generation-config", "openai")
    assert of_openai == [decode(seed=1, temperature=1.0), decode()]
    assert capsys.readouterr().err == ""
    assert len({*of_config, *of_openai}) == 4

    Path("target/generation_config.json").write_text(json.dumps({**config, "top_p": 1.5}))
    options = ["--target", "target", "--served-model-name", "m", "--input", "in.jsonl", "--output", "other.jsonl"]
    assert main(["batch", *PAIR, *options]) == 2
    assert "the target's generation config: top_p=1.5" in capsys.readouterr().err
