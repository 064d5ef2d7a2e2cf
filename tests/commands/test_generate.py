"""``specdec-fast generate``, run in this process on the bundled pair: the records that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import specdec_fast as sd
from specdec_fast.cli import main
from specdec_fast.commands.prompt_files import read_prompts
from specdec_fast.equivalence.compare import transformers_greedy
from support.commands import DRAFT, TARGET, options_of, run_generate, write_lines


def test_generate(in_folder, capsys, prompts, prompt_ids, target, tokenizer):
    ids = [tokenizer(prompts[0]).input_ids, prompt_ids[1], prompt_ids[2]]
    lines = [{"prompt": prompts[0], "id": 7}, *({"prompt_ids": i} for i in ids[1:]), "", ""]
    path = write_lines(in_folder / "in.jsonl", *lines)  # blank lines at the end do not count
    # one at a time, so that the order of the output does not come from the order of a batch
    status, records = run_generate(path, **{"batch-size": 1, "method": "exspec"})
    assert status == 0
    expected = [transformers_greedy(target, i, 5) for i in ids]
    assert [record["token_ids"] for record in records] == expected
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in expected]
    assert [record["text"] for record in records] == texts
    assert [record["line"] for record in records] == [1, 2, 3]
    assert not any("error" in record for record in records)
    assert {record["finish_reason"] for record in records} <= {"length", "stop"}
    assert capsys.readouterr().err == ""


def test_generate_with_stop_strings_and_logprobs(in_folder):
    path = write_lines(in_folder / "in.jsonl", {"prompt_ids": [41, 84]})
    _, (plain,) = run_generate(path)
    first, last = plain["text"][:2], plain["text"][-2:]
    assert "logprobs" not in plain
    words = {"target": TARGET, "draft": DRAFT, "prompts": path, "output": "other.jsonl", "max-new-tokens": 5}
    options = ["--dtype", "float32", "--stop", last, "--stop", first, "--logprobs"]
    assert main(["generate", *options_of(words), *options]) == 0
    record = json.loads(Path("other.jsonl").read_text(encoding="utf-8"))
    assert (record["text"], record["finish_reason"]) == ("", "stop")
    assert record["token_ids"] == plain["token_ids"][: len(record["token_ids"])]
    assert len(record["logprobs"]) == len(record["token_ids"]) < 5
    params = sd.SamplingParams(max_new_tokens=5, stop=[last, first], logprobs=True)
    (output,) = sd.generate(TARGET, DRAFT, [[41, 84]], params, dtype="float32")
    assert (record["token_ids"], record["logprobs"]) == (output.token_ids, output.logprobs)


def test_seeds_of_lines_after_the_last_seed(in_folder):
    """A file is not refused for a seed that only its last lines would exceed."""
    path = write_lines(in_folder / "in.jsonl", {"prompt_ids": [41, 84]}, {"prompt_ids": [41, 84]})
    words = {"target": TARGET, "draft": "none", "prompts": path, "output": "out.jsonl", "max-new-tokens": 2}
    assert main(["generate", *options_of(words | {"temperature": 1, "seed": 2**63 - 2})]) == 0
    records = [json.loads(line) for line in Path("out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["seed"] for record in records] == [2**63 - 1, -(2**63)]


def test_generate_samples_with_a_seed_per_line(in_folder):
    path = write_lines(in_folder / "in.jsonl", {"prompt_ids": [41, 84]}, {"text": "bad"}, {"prompt_ids": [41, 84]})
    words = {"target": TARGET, "draft": DRAFT, "prompts": path, "output": "out.jsonl", "max-new-tokens": 8}
    words |= {"dtype": "float32", "temperature": 1.2, "top-k": 90, "top-p": 0.95, "min-p": 0.001}
    assert main(["generate", *options_of(words | {"repetition-penalty": 1.1, "seed": 50})]) == 1
    records = [json.loads(line) for line in Path("out.jsonl").read_text(encoding="utf-8").splitlines()]
    rule = {"temperature": 1.2, "top_k": 90, "top_p": 0.95, "min_p": 0.001, "repetition_penalty": 1.1}
    params = [sd.SamplingParams(max_new_tokens=8, seed=seed, **rule) for seed in (51, 53)]
    outputs = sd.generate(TARGET, DRAFT, [[41, 84]] * 2, params, dtype="float32")
    assert [records[i]["token_ids"] for i in (0, 2)] == [o.token_ids for o in outputs]
    assert [records[i]["seed"] for i in (0, 2)] == [51, 53]
    assert records[0]["token_ids"] != records[2]["token_ids"]


def test_generate_with_restrictions(in_folder):
    path = write_lines(in_folder / "in.jsonl", {"prompt_ids": [41, 84]})
    words = {"target": TARGET, "draft": DRAFT, "prompts": path, "output": "out.jsonl", "max-new-tokens": 8}
    words |= {"dtype": "float32", "presence-penalty": 1.5, "frequency-penalty": -0.5, "logit-bias": '{"7":2,"9":-1}'}
    words |= {"allowed-token-ids": ",".join(map(str, range(300))), "bad-word": "the", "min-tokens": 3}
    assert main(["generate", *options_of(words)]) == 0
    (record,) = map(json.loads, Path("out.jsonl").read_text(encoding="utf-8").splitlines())
    params = sd.SamplingParams(
        max_new_tokens=8, presence_penalty=1.5, frequency_penalty=-0.5, logit_bias={7: 2, 9: -1},
        allowed_token_ids=range(300), bad_words=["the"], min_tokens=3,
    )  # fmt: skip
    (output,) = sd.generate(TARGET, DRAFT, [[41, 84]], params, dtype="float32")
    assert record["token_ids"] == output.raise_for_error().token_ids


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("logit-bias", "{", "--logit-bias '{': not JSON"), ("logit-bias", "[1]", "logit_bias=[1]: expected a mapping"),
     ("min-tokens", 9, "min_tokens=9: expected an integer from 0 to max_new_tokens")],
)  # fmt: skip
def test_wrong_restrictions_are_refused_before_models_are_loaded(in_folder, capsys, option, value, message):
    path = write_lines(in_folder / "in.jsonl", {"prompt_ids": [41, 84]})
    words = {"target": "nowhere", "draft": "none", "prompts": path, "output": "out.jsonl", "max-new-tokens": 8}
    assert main(["generate", *options_of(words | {option: value})]) == 2
    assert message in capsys.readouterr().err


def test_allowed_token_ids_are_numbers(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--target", "t", "--prompts", "in.jsonl", "--output", "out", "--allowed-token-ids", "1,x"])
    assert "'1,x': expected token ids, such as 5,6,7" in capsys.readouterr().err


# Every kind of bad line; the good ones around them must come out as if alone.
BAD_LINES = [
    ("{not json", "not JSON"),
    ("[1, 2]", "expected an object"),
    ('"text"', "expected an object"),
    ({"text": "Hi"}, "expected an object"),
    ({"prompt": "Hi", "prompt_ids": [1]}, "expected an object with either"),
    ({"prompt": 5}, '"prompt" is a int'),
    ({"prompt": ["Hi"]}, '"prompt" is a list'),
    ({"prompt": ""}, "empty string"),
    ({"prompt_ids": "5 6"}, '"prompt_ids" is not a list of integers'),
    ({"prompt_ids": [5, 6.0]}, '"prompt_ids" is not a list of integers'),
    ({"prompt_ids": [True]}, '"prompt_ids" is not a list of integers'),
    ({"prompt_ids": []}, "no tokens"),
    ({"messages": "Hi"}, '"messages" is not a list of objects'),
    ({"messages": []}, '"messages" is not a list of objects'),
    ({"messages": [{"role": "user", "content": "Hi"}]}, "the tokenizer has no chat template"),
    (b'{"prompt": "Gr\xfc\xdfe"}', "not UTF-8 text (invalid start byte at byte 14)"),
    ("[" * 100000, "not JSON that can be read"),
    ('{"prompt_ids": [' + "9" * 5000 + "]}", "not JSON that can be read"),
    ({"turns": []}, '"turns" is not a list that begins with a string'),
    ({"turns": "Hi"}, '"turns" is not a list that begins with a string'),
    ({"turns": [["Hi"]]}, '"turns" is not a list that begins with a string'),
    ({"turns": [""]}, "empty string"),
    ({"prompt_ids": [5, 1024]}, "1024 is outside the target's vocabulary; expected 0 to 1023"),
    ({"prompt_ids": [-1]}, "-1 is outside the target's vocabulary"),
    ({"prompt_ids": [5] * 600}, "600 tokens"),
    ("", "not JSON"),
]


def test_generate_reports_bad_lines_and_serves_the_others(in_folder, capsys, target):
    good = {2: [41, 84], 9: [5, 6, 7], len(BAD_LINES) + 3: [70]}  # by line
    lines: list[object] = [line for line, _ in BAD_LINES]
    for number, ids in good.items():
        lines.insert(number - 1, {"prompt_ids": ids})
    status, records = run_generate(write_lines(in_folder / "in.jsonl", *lines))
    errors = capsys.readouterr().err.splitlines()
    assert status == 1
    assert [record["line"] for record in records] == list(range(1, len(lines) + 1))
    for number, ids in good.items():
        assert "error" not in records[number - 1]
        assert records[number - 1]["token_ids"] == transformers_greedy(target, ids, 5)
    bad = [record for record in records if record["line"] not in good]
    assert len(errors) == len(bad) == len(BAD_LINES)
    for record, (_, reason) in zip(bad, BAD_LINES, strict=True):
        assert reason in record["error"]
    assert sorted(errors) == sorted(f"in.jsonl, line {record['line']}: {record['error']}" for record in bad)


def test_generate_survives_text_that_no_tokenizer_takes(in_folder, capsys):
    # half of a surrogate pair is valid JSON, but not a Unicode character
    lines = ({"prompt_ids": [5]}, '{"prompt": "\\ud800"}', {"prompt_ids": [6]})
    path = write_lines(in_folder / "in.jsonl", *lines)
    status, records = run_generate(path)
    assert status == 1
    assert ["error" in record for record in records] == [False, True, False]


@pytest.mark.parametrize("draft", ["ngram", "none"])
def test_draft_without_a_model(in_folder, target, draft):
    _, records = run_generate(write_lines(in_folder / "in.jsonl", {"prompt_ids": [41, 84]}), draft)
    assert records[0]["token_ids"] == transformers_greedy(target, [41, 84], 5)


def test_what_cannot_be_written_is_known_before_decoding_and_leaves_nothing(in_folder):
    path = write_lines(in_folder / "in.jsonl", {"prompt_ids": [5]})
    words = {"target": "no/such-folder", "draft": "none", "prompts": path, "output": "out.jsonl"}
    assert main(["generate", *options_of(words)]) == 2
    assert not Path("out.jsonl").exists()


def test_request_fields_in_a_line_are_refused_not_dropped(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "temperature": 0.7, "max_new_tokens": 5}\n{"prompt": "b", "task": "story"}\n')
    refused, taken = read_prompts(path)
    assert "max_new_tokens, temperature cannot be set per line" in refused.problem
    assert (taken.prompt, taken.problem) == ("b", None)
