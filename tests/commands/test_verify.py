"""``specdec-fast verify``, run in this process on the bundled pair: its report, and what it finds."""

from __future__ import annotations

from pathlib import Path

import pytest

import specdec_fast as sd
from specdec_fast.cli import build_parser
from specdec_fast.commands import verify
from specdec_fast.engine.engine import Engine
from specdec_fast.equivalence.compare import best_logits, transformers_greedy
from support.commands import DRAFT, EAGLE3, TARGET, options_of, run_verify
from support.grids import grid


@pytest.mark.grid
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


QUANTISED = {"batch-sizes": 1, "methods": "exspec", "num-draft-tokens": 1, "dtypes": "bfloat16", "max-new-tokens": 2}
QUANTISED |= {"quantization": "int4", "draft-quantization": "int8-a8"}


@pytest.mark.grid
def test_verify_of_a_quantised_pair_has_its_quality(in_folder, prompt_ids):
    """Both are quantised once, and every engine decodes with them."""
    status, report = run_verify(in_folder, prompt_ids[1:2], **QUANTISED)
    assert status == 0
    (quality,) = report["quality"]
    assert quality["quantization"] == "int4"
    assert 0 < quality["mean_kl"] < 1


def test_verify_refuses_a_draft_quantization_that_no_draft_reads(in_folder, prompt_ids, capsys):
    with pytest.raises(FileNotFoundError):  # no report
        run_verify(in_folder, prompt_ids[1:2], **QUANTISED, draft="ngram")
    assert "draft_quantization='int8-a8' has no effect with draft='ngram'" in capsys.readouterr().err


def test_verify_takes_auto_for_a_k(in_folder, prompt_ids):
    options = {"batch-sizes": 2, "methods": "eqspec", "num-draft-tokens": "2 auto"}
    status, report = run_verify(in_folder, prompt_ids[1:4], **options)
    assert status == 0
    assert [c["num_draft_tokens"] for c in report["comparisons"]] == [2, "auto"]
    assert [c["num_draft_tokens"] for c in report["control"]] == ["auto"], "the most rows"


def test_verify_takes_drafters_that_are_checkpoints(in_folder, prompt_ids):
    options = {"draft": f"{EAGLE3} ngram", "tap-layers": "1,2,3", "batch-sizes": 1, "num-draft-tokens": 2}
    status, report = run_verify(in_folder, prompt_ids[1:2], methods="eqspec", **options)
    assert status == 0
    assert len(report["comparisons"]) == 2, "prompt lookup reads no layers"
    words = {"target": TARGET, "draft": EAGLE3, "prompts": "p.jsonl", "tap-layers": "0,1,2", "draft-tree": "chain"}
    matrix = verify.matrix_of(build_parser().parse_args(["verify", *options_of(words)]))
    assert (matrix.config.tap_layers, matrix.config.draft_tree) == ((0, 1, 2), "chain")


@pytest.mark.grid
def test_verify_draws_its_report(in_folder, prompt_ids):
    pytest.importorskip("matplotlib")
    options = {"batch-sizes": "1 2", "methods": "eqspec", "plot": "report.png"}
    assert run_verify(in_folder, prompt_ids[1:3], **options)[0] == 0
    assert Path("report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", grid(["token", "logprob"], keep=["logprob"]))
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
