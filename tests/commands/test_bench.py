"""``specdec-fast bench`` on the bundled pair: its table, its files, its advice, and what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from specdec_fast import SamplingParams
from specdec_fast.cli import build_parser, main
from specdec_fast.commands.speed import PLAIN, Job, Run, Speed, measure, recommended
from specdec_fast.engine.engine import Engine
from specdec_fast.errors import DrafterError
from support.commands import DRAFT, TARGET, options_of, write_lines


def run_bench(folder: Path, prompts: list[list[int]], **options: object) -> tuple[int, dict]:
    """Run ``bench`` in the present folder; return its exit status and its JSON report."""
    path = write_lines(folder / "in.jsonl", *({"prompt_ids": ids} for ids in prompts))
    values = {"target": TARGET, "draft": DRAFT, "prompts": path, "json": "bench.json", "max-new-tokens": 6}
    values |= {"repeats": 1, "batch-sizes": 2, "num-draft-tokens": 2}
    status = main(["bench", *options_of({**values, **options})])
    return status, json.loads(Path("bench.json").read_text())


def test_it_measures_every_drafter_and_names_the_command_to_run(in_folder, prompt_ids, capsys):
    pytest.importorskip("matplotlib")
    options = {"draft": f"{DRAFT} ngram none", "batch-sizes": "1 2", "temperature": 0.7, "plot": "bench.png"}
    status, report = run_bench(in_folder, prompt_ids[1:3], **options, dtype="float32")
    assert status == 0
    settings = [(row["batch_size"], row["draft"], row["num_draft_tokens"]) for row in report["rows"]]
    assert settings == [(size, *way) for size in (1, 2) for way in (PLAIN, (DRAFT, 2), ("ngram", 2))]
    for row in report["rows"]:
        assert row["different_lines"] == []
        assert row["tokens_per_second"] > 0
        assert row["mean_acceptance_length"] >= 1
        assert row["token_milliseconds"] <= row["token_milliseconds_p95"]
    assert [row["speedup"] for row in report["rows"] if row["draft"] == "none"] == [1, 1]
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == report["command"]
    program, *words = shlex.split(report["command"])
    assert program == "specdec-fast"
    served = build_parser(words).parse_args(words)
    assert (served.target, served.batch_size, served.dtype) == (TARGET, 2, "float32")
    assert Path("bench.png").read_bytes().startswith(b"\x89PNG")


def test_other_tokens_than_those_of_plain_decoding_are_an_error(in_folder, prompt_ids, monkeypatch, capsys):
    class Lying(Engine):
        def stream(self, *args, **kwargs):
            for chunk in super().stream(*args, **kwargs):
                if self.config.most_draft_tokens and chunk.index == 1 and chunk.token_ids:
                    chunk.token_ids[-1] ^= 1
                yield chunk

    monkeypatch.setattr("specdec_fast.commands.bench.Engine", Lying)
    status, report = run_bench(in_folder, prompt_ids[1:3], draft="ngram")
    assert status == 1
    assert report["rows"][1]["different_lines"] == [2]
    assert "ngram, K 2, batch 2: other tokens than plain decoding for lines [2]" in capsys.readouterr().err


def speed_of(draft: str, k: int, batch_size: int, *rates: float) -> Speed:
    return Speed(draft, k, batch_size, [Run([[1] * 100], 100 / rate, [1 / rate], 1.0, 0.0) for rate in rates])


def test_ratios_are_taken_within_a_repeat():
    """The machine was twice as fast in the second repeat."""
    plain = speed_of(*PLAIN, 1, 10, 20, 10)
    assert speed_of("ngram", 5, 1, 12, 22, 13).speedup(plain) == pytest.approx(1.2)


def test_the_advice_is_the_best_over_all_batch_sizes():
    plain = [speed_of(*PLAIN, size, 10) for size in (1, 8)]
    small = [speed_of("draft", 5, 1, 20), speed_of("draft", 5, 8, 4)]
    steady = [speed_of("ngram", 3, 1, 12), speed_of("ngram", 3, 8, 11)]
    failed = [speed_of("self", 5, 1, 90), Speed("self", 5, 8, problem="no memory")]
    assert recommended([*plain, *small, *steady, *failed]) == (("ngram", 3), {1: 1.2, 8: pytest.approx(1.1)})
    assert recommended([*plain, *small])[0] == PLAIN


def test_a_drafter_that_cannot_run_is_left_out_and_the_others_are_measured(target, prompt_ids):
    def make(draft, k):
        if draft == "broken":
            raise DrafterError("cannot draft.")
        return Engine(target, None if draft == "none" else draft, num_draft_tokens=k, max_batch_size=1)

    job = Job(prompt_ids[:1], [SamplingParams(max_new_tokens=2)], {})
    *_, speeds = measure([PLAIN, ("broken", 2), ("ngram", 2)], 1, 1, make, job)
    assert [speed.problem for speed in speeds] == [None, "DrafterError: cannot draft.", None]
    assert [len(speed.runs) for speed in speeds] == [1, 0, 1]
    with pytest.raises(DrafterError, match="cannot draft"):
        next(measure([("broken", 0)], 1, 1, make, job))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "none"}, "name a drafter too"),
        ({"repeats": 0}, "--repeats=0: expected an integer >= 1"),
        ({"batch-sizes": 0}, "max_batch_size=0"),
        ({"batch-sizes": "1 3"}, "in.jsonl has 2 prompts; --batch-sizes 3 needs at least as many"),
        ({"num-draft-tokens": -1}, "num_draft_tokens"),
        ({"draft": "ngrams"}, "did you mean 'ngram'"),
        ({"draft": "self", "quantization": "int4"}, "gains nothing beside quantization='int4'"),
    ],
)
def test_bad_options_end_it_before_anything_is_measured(in_folder, prompt_ids, capsys, options, message):
    with pytest.raises(FileNotFoundError):  # no report
        run_bench(in_folder, prompt_ids[1:3], **options)
    assert message in capsys.readouterr().err


def test_a_plot_that_cannot_be_drawn_ends_it_before_anything_is_measured(in_folder, prompt_ids, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(FileNotFoundError):  # no report
        run_bench(in_folder, prompt_ids[1:3], plot="figure.doc")
    assert "--plot figure.doc" in capsys.readouterr().err


def test_an_invalid_line_ends_it(in_folder, capsys):
    path = write_lines(in_folder / "in.jsonl", {"prompt": "a"}, {"text": "b"})
    words = {"target": TARGET, "draft": "ngram", "prompts": path, "batch-sizes": 1}
    assert main(["bench", *options_of(words)]) == 2
    assert "in.jsonl, line 2: expected an object with" in capsys.readouterr().err
