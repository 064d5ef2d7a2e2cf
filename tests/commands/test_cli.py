"""The command line, run in this process on the bundled pair: what it prints, writes and returns."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import specdec_fast as sd
from specdec_fast.cli import build_parser, main
from specdec_fast.commands import demo, verify
from specdec_fast.commands.prompt_files import read_prompts
from specdec_fast.engine.engine import Engine
from specdec_fast.equivalence.compare import best_logits, transformers_greedy
from specdec_fast.equivalence.report import Models
from specdec_fast.ops import BACKENDS, all_ops, registry
from support.commands import DRAFT, TARGET, options_of, write_lines


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def generate(path: str, draft: str = DRAFT, **options: object) -> tuple[int, list[dict]]:
    """Run ``generate``; return its exit status and the records it wrote."""
    Path("out.jsonl").unlink(missing_ok=True)
    values = {"target": TARGET, "draft": draft, "prompts": path, "output": "out.jsonl", "max-new-tokens": 5}
    status = main(["generate", *options_of({**values, "dtype": "float32", **options})])
    return status, [json.loads(line) for line in Path("out.jsonl").read_text(encoding="utf-8").splitlines()]


# Both schedulers, with and without drafting, more prompts than a batch holds, each backend of a CPU.
@pytest.mark.parametrize(
    ("method", "batch_size", "k", "backend"),
    [("exspec", 8, 5, "auto"), ("eqspec", 2, 3, "torch"), ("exspec", 1, 0, "auto"), ("exspec", 2, "auto", "auto")],
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


def test_generate(in_folder, capsys, prompts, prompt_ids, target, tokenizer):
    ids = [tokenizer(prompts[0]).input_ids, prompt_ids[1], prompt_ids[2]]
    lines = [{"prompt": prompts[0], "id": 7}, *({"prompt_ids": i} for i in ids[1:]), "", ""]
    path = write_lines(in_folder / "in.jsonl", *lines)  # blank lines at the end do not count
    # one at a time, so that the order of the output does not come from the order of a batch
    status, records = generate(path, **{"batch-size": 1, "method": "exspec"})
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
    _, (plain,) = generate(path)
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
    status, records = generate(write_lines(in_folder / "in.jsonl", *lines))
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
    status, records = generate(path)
    assert status == 1
    assert ["error" in record for record in records] == [False, True, False]


@pytest.mark.parametrize("draft", ["ngram", "none"])
def test_draft_without_a_model(in_folder, target, draft):
    _, records = generate(write_lines(in_folder / "in.jsonl", {"prompt_ids": [41, 84]}), draft)
    assert records[0]["token_ids"] == transformers_greedy(target, [41, 84], 5)


def run_verify(folder: Path, prompts: list[list[int]], **options: object) -> tuple[int, dict]:
    path = write_lines(folder / "in.jsonl", *({"prompt_ids": ids} for ids in prompts))
    values = {"target": TARGET, "draft": DRAFT, "prompts": path, "json": "report.json", "max-new-tokens": 6}
    status = main(["verify", *options_of({**values, **options})])
    return status, json.loads(Path("report.json").read_text())


def test_verify_reports_every_setting_and_what_it_is_worth(in_folder, capsys, prompt_ids):
    options = {"batch-sizes": "1 2", "num-draft-tokens": "0 2", "dtypes": "float32 bfloat16", "seed": 4}
    options |= {"draft": f"{DRAFT} ngram", "sampling": "greedy temperature=0.7,top_p=0.9", "max-new-tokens": 3}
    status, report = run_verify(in_folder, prompt_ids[1:3], **options)
    assert status == 0
    assert {"target": TARGET, "drafts": [DRAFT, "ngram"], "max_new_tokens": 3}.items() <= report.items()
    names = ("dtype", "method", "batch_size", "num_draft_tokens", "drafter", "sampling")
    settings = [tuple(c[name] for name in names) for c in report["comparisons"]]
    ways = [("autoregressive", 1, None, "none"), ("autoregressive", 2, None, "none")]
    for method in ("eqspec", "exspec"):
        ways += [(method, b, k, d) for b in (1, 2) for k, d in ((0, "none"), (2, "draft"), (2, "ngram"))]
    samplings = ("greedy", "temperature=0.7,top_p=0.9")
    assert settings == [(t, *way, s) for t in ("float32", "bfloat16") for way in ways for s in samplings]
    for c in report["comparisons"]:
        assert (c["exact_match"], c["partial_match"], c["equal_logprobs"], c["divergences"]) == (1, 1, 1, [])
        assert c["deterministic"]
    assert [c["dtype"] for c in report["against_transformers"]] == ["float32", "bfloat16"]
    assert [(c["dtype"], c["batch_size"]) for c in report["noise_floor"]] == [("float32", 2), ("bfloat16", 2)]
    control = [(c["dtype"], c["batch_size"], c["sampling"], c["deterministic"]) for c in report["control"]]
    assert control == [(t, b, s, False) for t in ("float32", "bfloat16") for b in (1, 2) for s in samplings]
    printed = capsys.readouterr().out
    assert f"{len(settings)} of {len(settings)} settings give exactly" in printed


@pytest.mark.parametrize(
    ("text", "values"),
    [("temperature=.7", {"temperature": 0.7}), ("temperature=1.,top_k=5", {"temperature": 1.0, "top_k": 5}),
     ("temperature=7e-1", {"temperature": 0.7}), ("ignore_eos=true", {"ignore_eos": True}), ("greedy", {})],
)  # fmt: skip
def test_verify_reads_numbers_as_people_write_them(text, values):
    words = {"target": TARGET, "draft": "none", "prompts": "p.jsonl", "sampling": text, "max-new-tokens": 3}
    matrix = verify.matrix_of(build_parser().parse_args(["verify", *options_of(words)]))
    assert matrix.samplings == {text: sd.SamplingParams(**{"max_new_tokens": 3, "seed": 0, **values})}


def test_what_cannot_be_written_is_known_before_decoding_and_leaves_nothing(in_folder):
    path = write_lines(in_folder / "in.jsonl", {"prompt_ids": [5]})
    words = {"target": "no/such-folder", "draft": "none", "prompts": path, "output": "out.jsonl"}
    assert main(["generate", *options_of(words)]) == 2
    assert not Path("out.jsonl").exists()


def test_verify_takes_auto_for_a_k(in_folder, prompt_ids):
    options = {"batch-sizes": 2, "methods": "eqspec", "num-draft-tokens": "2 auto"}
    status, report = run_verify(in_folder, prompt_ids[1:4], **options)
    assert status == 0
    assert [c["num_draft_tokens"] for c in report["comparisons"]] == [2, "auto"]
    assert [c["num_draft_tokens"] for c in report["control"]] == ["auto"], "the most rows"


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_forwards_can_be_left_to_pytorch(in_folder, monkeypatch, prompt_ids, target, enforce_eager):
    made, programs = [], sd.Engine(target, None).describe()["forward_program"]

    class Recorded(sd.Engine):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self.config.enforce_eager)

    monkeypatch.setattr("specdec_fast.commands.generate.Engine", Recorded)
    monkeypatch.setattr("specdec_fast.equivalence.report.Engine", Recorded)
    flags = {"enforce-eager": ""} if enforce_eager else {}
    generate(write_lines(in_folder / "lines.jsonl", {"prompt_ids": prompt_ids[1]}), **flags, **{"max-new-tokens": 2})
    assert made == [enforce_eager]
    made.clear()
    status, _ = run_verify(in_folder, prompt_ids[1:3], **{"batch-sizes": 2, "methods": "autoregressive"}, **flags)
    assert status == 0
    # the reference, the one setting, and the control: with a reference of its own where the first one is a program's
    of_control = [True, True] if programs and not enforce_eager else [True]
    assert made == [enforce_eager, enforce_eager, *of_control]


def test_misspelt_number_of_draft_tokens_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--num-draft-tokens", "atuo"])
    assert "'atuo' is neither an integer nor 'auto'" in capsys.readouterr().err


def test_verify_draws_its_report(in_folder, prompt_ids):
    pytest.importorskip("matplotlib")
    options = {"batch-sizes": "1 2", "methods": "eqspec", "plot": "report.png"}
    assert run_verify(in_folder, prompt_ids[1:3], **options)[0] == 0
    assert Path("report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", ["token", "logprob"])
def test_verify_fails_and_shows_where_a_token_differs(in_folder, capsys, monkeypatch, prompt_ids, target, wrong):
    class Lying(Engine):
        def generate(self, *args, **kwargs):
            outputs = super().generate(*args, **kwargs)
            if self.config.max_batch_size == 2 and self.config.deterministic:
                if wrong == "token":
                    outputs[1].token_ids[3] ^= 1
                else:
                    outputs[1].logprobs[3] += 1e-7
            return outputs

    monkeypatch.setattr("specdec_fast.equivalence.report.Engine", Lying)
    prompts = prompt_ids[1:4]
    status, report = run_verify(in_folder, prompts, **{"batch-sizes": 2, "methods": "eqspec"})
    assert status == 1
    (comparison,) = report["comparisons"]
    printed = capsys.readouterr().out
    if wrong == "logprob":
        assert (comparison["exact_match"], comparison["equal_logprobs"]) == (1, pytest.approx(17 / 18))
        assert " 94.4%" in printed
        return
    assert comparison["exact_match"] == pytest.approx(2 / 3)
    assert comparison["partial_match"] == pytest.approx(15 / 18)
    (divergence,) = comparison["divergences"]
    best, second = best_logits(target, prompts[1] + transformers_greedy(target, prompts[1], 6)[:3])
    assert divergence == {"index": 1, "position": 3, "best_logits": [pytest.approx(best), pytest.approx(second)]}
    assert f"prompt 1, token 3: {best:.6g}, {second:.6g} (gap {best - second:.1e})" in printed
    assert " 66.7% " in printed


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


# No command, an unknown one, an unknown choice, a missing argument, no number.
@pytest.mark.parametrize(
    "argv",
    [[], ["serve"], ["demo", "--method", "fifo"], ["generate"], ["demo", "--batch-size", "x"]],
    ids=str,
)
def test_wrong_usage_is_explained(capsys, argv):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("usage: specdec-fast")


def test_runs_as_a_module():
    command = [sys.executable, "-m", "specdec_fast", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, f"specdec-fast {sd.__version__}\n"), ended.stderr


def test_request_fields_in_a_line_are_refused_not_dropped(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "temperature": 0.7, "max_new_tokens": 5}\n{"prompt": "b", "task": "story"}\n')
    refused, taken = read_prompts(path)
    assert "max_new_tokens, temperature cannot be set per line" in refused.problem
    assert (taken.prompt, taken.problem) == ("b", None)


def test_a_question_of_spec_bench_is_its_first_turn(in_folder, capsys):
    question = {"question_id": 81, "category": "writing", "turns": ["One day", "Rewrite it."], "reference": ["x"]}
    path = write_lines(in_folder / "question.jsonl", question, {"prompt": "One day", "turns": ["Not this"]})
    assert [line.prompt for line in read_prompts(Path(path))] == ["One day", "One day"]
    status, (first, second) = generate(path)
    assert status == 0
    assert first["token_ids"] == second["token_ids"]
    words = {"target": TARGET, "draft": DRAFT, "prompts": path, "max-new-tokens": 4, "methods": "eqspec"}
    assert main(["verify", *options_of(words | {"batch-sizes": 2, "num-draft-tokens": 2})]) == 0
    assert "1 of 1 settings" in capsys.readouterr().out
