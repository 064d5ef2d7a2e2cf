"""``specdec-fast score``, and the log-probabilities and several texts of ``specdec-fast generate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import specdec_fast as sd
from specdec_fast.cli import main
from support.commands import DRAFT, TARGET, options_of, read_lines, run_generate, write_lines

LINES = [
    {"prompt": "One day", "id": "a"},
    {"prompt_ids": [41, 84, 90]},
    "{bad",
    {"prompt_ids": [5000], "id": 7},
    {"prompt_ids": [5]},
]


def run_score(*options, output="out.jsonl"):
    words = {"target": TARGET, "dtype": "float32", "prompts": "in.jsonl", "output": output, "batch-size": 2}
    return main(["score", *options_of(words), *options]), read_lines(Path(output))


@pytest.fixture
def lines(in_folder):
    return write_lines(in_folder / "in.jsonl", *LINES)


def test_scores_of_the_engine_in_the_order_of_the_file(lines, capsys, target, tokenizer):
    status, records = run_score("--top-logprobs", "2", "--max-prefill-tokens", "2")
    assert status == 1
    assert [record["line"] for record in records] == [1, 2, 3, 4, 5]
    assert ["error" in record for record in records] == [False, False, True, True, False]
    assert (records[0]["id"], records[3]["id"]) == ("a", 7)
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "in.jsonl, line 4: token id 5000 is outside" in errors[1]
    texts = [tokenizer("One day").input_ids, [41, 84, 90], [5]]
    scores = sd.Engine(target, None).score(texts, top_logprobs=2)
    for record, score in zip([records[i] for i in (0, 1, 4)], scores, strict=True):
        assert (record["token_ids"], record["logprobs"]) == (score.token_ids, score.logprobs)
        assert record["ranks"] == score.ranks
        tops = [{int(token): value for token, value in top.items()} for top in record["top_logprobs"]]
        assert tops == score.top_logprobs
    assert records[4]["logprobs"] == []


def test_only_missing_lines_are_scored_again(lines, monkeypatch):
    _, whole = run_score(output="whole.jsonl")
    assert "top_logprobs" not in whole[0]
    content = Path("whole.jsonl").read_bytes().splitlines(keepends=True)
    Path("out.jsonl").write_bytes(content[1] + content[3] + content[4][:20])
    prompts = []
    as_completed = sd.Engine.as_completed

    def noted(self, given, *args, **options):
        prompts.extend(given)
        return as_completed(self, given, *args, **options)

    monkeypatch.setattr(sd.Engine, "as_completed", noted)
    status, records = run_score("--resume")
    assert (status, records) == (1, whole)
    assert prompts == ["One day", [5000], [5]]


@pytest.mark.parametrize("options", [["--top-logprobs", "-1"], ["--batch-size", "0"]], ids=str)
def test_wrong_options_are_refused_before_the_model_is_loaded(lines, capsys, options):
    words = {"target": "no/such-folder", "prompts": "in.jsonl", "output": "out.jsonl"}
    assert main(["score", *options_of(words), *options]) == 2
    assert f"={options[1]}: expected" in capsys.readouterr().err
    assert not Path("out.jsonl").exists()


def test_generate_writes_what_the_outputs_have(in_folder, target, draft):
    path = write_lines(in_folder / "in.jsonl", {"prompt_ids": [41, 84]}, {"prompt_ids": [5], "id": 3})
    given = {"logprobs": 2, "prompt-logprobs": 1, "n": 2, "temperature": 0.9, "seed": 10}
    status, records = run_generate(path, **given)
    assert status == 0
    fields = {"max_new_tokens": 5, "temperature": 0.9, "logprobs": 2, "prompt_logprobs": 1, "n": 2}
    params = [sd.SamplingParams(seed=11, **fields), sd.SamplingParams(seed=13, **fields)]
    outputs = sd.Engine(target, draft).generate([[41, 84], [5]], params)
    places = [(record["line"], record["choice"], record["seed"]) for record in records]
    assert places == [(1, 0, 11), (1, 1, 12), (2, 0, 13), (2, 1, 14)]
    assert [record.get("id") for record in records] == [None, None, 3, 3]
    names = ("text", "token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs", "prompt_ranks")
    for record, output in zip(records, outputs, strict=True):
        expected = json.loads(json.dumps({name: getattr(output, name) for name in names}))
        assert {name: record[name] for name in names} == expected


def test_generate_completes_the_texts_of_a_line(in_folder, capsys):
    path = write_lines(in_folder / "in.jsonl", {"prompt_ids": [41, 84]}, {"prompt": 5}, {"prompt_ids": [5]})
    words = {"target": TARGET, "draft": DRAFT, "dtype": "float32", "prompts": path, "output": "out.jsonl"}
    words |= {"max-new-tokens": 4, "temperature": 1, "seed": 1}
    assert main(["generate", *options_of(words | {"n": 2})]) == 1
    whole = Path("out.jsonl").read_bytes()
    kept = whole.splitlines(keepends=True)
    assert len(kept) == 5
    Path("out.jsonl").write_bytes(kept[1] + kept[4])
    assert main(["generate", *options_of(words | {"n": 2}), "--resume"]) == 1
    assert Path("out.jsonl").read_bytes() == whole
    capsys.readouterr()
    assert main(["generate", *options_of(words), "--resume"]) == 2
    assert "the result of line 1 is not one of 1 per line" in capsys.readouterr().err
    assert Path("out.jsonl").read_bytes() == whole
