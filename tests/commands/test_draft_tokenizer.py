"""``--draft-tokenizer`` in the commands that compare drafters or plan, for a draft model without a tokenizer."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_fast.cli import build_parser, main
from specdec_fast.commands import plan as plan_module
from specdec_fast.speculation_length.step_costs import StepCosts
from support.commands import TARGET, options_of, run_verify, write_lines
from support.other_tokenizers import byte_level

NUM_IDS = 300
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
COMPUTED = ["--no-measure", "--bandwidth", "100", "--peak", "1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A draft model with a vocabulary of its own, and in another folder its tokenizer."""
    torch.manual_seed(0)
    model, tokenizer = (str(tmp_path_factory.mktemp(name)) for name in ("model", "tokenizer"))
    LlamaForCausalLM(LlamaConfig(vocab_size=NUM_IDS, **TINY)).save_pretrained(model)
    byte_level(["one two"], NUM_IDS).save_pretrained(tokenizer)
    return model, tokenizer


def test_verify(in_folder, prompt_ids, folders, capsys):
    model, tokenizer = folders
    options = {"draft": f"{model} ngram", "batch-sizes": 2, "num-draft-tokens": 2, "methods": "eqspec"}
    status, report = run_verify(in_folder, prompt_ids[1:3], **options, **{"draft-tokenizer": tokenizer})
    assert status == 0
    assert len(report["comparisons"]) == 2
    Path("report.json").unlink()
    with pytest.raises(FileNotFoundError):  # no report
        run_verify(in_folder, prompt_ids[1:3], **options)
    assert "pass draft_tokenizer=..." in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        run_verify(in_folder, prompt_ids[1:3], **options | {"draft": "ngram", "draft-tokenizer": tokenizer})
    assert "draft_tokenizer has no effect with draft='ngram'" in capsys.readouterr().err


def test_bench(in_folder, prompt_ids, folders):
    model, tokenizer = folders
    path = write_lines(in_folder / "in.jsonl", *({"prompt_ids": ids} for ids in prompt_ids[1:3]))
    values = {"target": TARGET, "draft": f"{model} ngram", "draft-tokenizer": tokenizer, "prompts": path}
    values |= {"repeats": 1, "batch-sizes": 2, "num-draft-tokens": 2, "max-new-tokens": 4, "json": "bench.json"}
    assert main(["bench", *options_of(values)]) == 0
    report = json.loads(Path("bench.json").read_text())
    assert [row["draft"] for row in report["rows"] if "problem" not in row] == ["none", model, "ngram"]
    _, *words = shlex.split(report["command"])
    served = build_parser(words).parse_args(words)
    assert served.draft_tokenizer == (tokenizer if served.draft == model else None)


def planned(capsys, model, *options):
    sizes = {"target": TARGET, "draft": model, "memory": "20MB", "prompt-tokens": 40, "new-tokens": 12, "acceptance": 1}
    assert main(["plan", "--json", *options_of(sizes | {"batch-sizes": 2}), *options]) == 0
    return json.loads(capsys.readouterr().out)["best"]


def test_plan(capsys, folders):
    model, tokenizer = folders
    same = planned(capsys, model, *COMPUTED)  # nothing shows that the tokenizer is another one
    other = planned(capsys, model, *COMPUTED, "--draft-tokenizer", tokenizer)
    of_position = [best["terms"]["drafter KV"] / best["terms"]["target KV"] for best in (same, other)]
    assert of_position[1] == pytest.approx(2 * of_position[0], rel=1e-6)
    assert other["terms"]["drafter steps"] > same["terms"]["drafter steps"]
    assert main(["plan", "--target", TARGET, "--draft", model, "--memory", "1GB", "--draft-tokenizer", model]) == 2
    assert "no tokenizer can be read there" in capsys.readouterr().err


@pytest.mark.grid
def test_a_plan_that_measures_has_the_same_positions(capsys, monkeypatch, folders):
    costs = StepCosts({1: 1.0, 64: 1.1}, {0: 0.0, 1: 0.01, 64: 0.01})  # constants under which drafting pays
    monkeypatch.setattr(plan_module.StepCosts, "measured", lambda *_: costs)
    model, tokenizer = folders
    plans = [planned(capsys, model, *how, "--draft-tokenizer", tokenizer) for how in ([], COMPUTED)]
    assert all(best["num_draft_tokens"] for best in plans)
    of_position = [best["terms"]["drafter KV"] / best["terms"]["target KV"] for best in plans]
    assert of_position[0] == pytest.approx(of_position[1], rel=1e-6)
