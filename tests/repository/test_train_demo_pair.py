"""The pair trainer: its count of rounds against counts by hand, then one tiny pair from text to report."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pair_corpus import choose_prompts, hold_out, split_documents, token_stream, train_tokenizer
from pair_report import walk_rounds
from train_demo_pair import main
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from support.source_tree import ROOT

TINY = ["--target-size", "32", "2", "2", "1", "64", "--draft-size", "16", "1", "1", "1", "32"]
BRIEF = ["--minutes-target", "0.02", "--minutes-draft", "0.01", "--prompts", "6", "--max-new-tokens", "24"]
MODEL_FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
REPORT_KEYS = {
    "source",
    "vocab_size",
    "megabytes",
    "target",
    "draft",
    "measured",
    "optimizer",
    "threads",
    "seed",
    "versions",
    "seconds",
}
MEASURED_KEYS = {
    "prompts",
    "num_draft_tokens",
    "max_new_tokens",
    "positions",
    "greedy_agreement",
    "rounds",
    "tokens_per_round",
    "accepted_per_round",
    "median_new_tokens",
    "ended_by_eos",
    "eos_after_tokens",
    "positions_with_gap_below",
    "bf16_argmax_differs",
    "sampled_positions",
    "sampled_overlap",
    "target_held_out_cross_entropy",
    "draft_held_out_cross_entropy",
    "seconds",
}


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    return subprocess.run(
        [sys.executable, str(ROOT / "tools/train_demo_pair.py"), *arguments],
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment,
    )


def made_up_text(num_documents: int, separator: str) -> str:
    """Sentences of random words, long enough for 200-token prompts; accents so that bytes are exercised."""
    rng = random.Random(0)
    syllables = [c + v for c in "bdfgklmnprst" for v in "aeiouéü"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(400)]
    documents = []
    for _ in range(num_documents):
        sentences = [" ".join(rng.choices(words, k=rng.randint(4, 9))).capitalize() + "." for _ in range(15)]
        documents.append("\n".join(sentences))
    return separator.join(documents)


@pytest.mark.parametrize(
    ("agreement", "num_draft_tokens", "expected"),
    [
        # Drafts 1 1 0: 2 accepted, token 2 is the target's. Drafts 0 1 1: none. Drafts 1 1 1: 3, token 7 is the
        # bonus. One token left: nothing to draft, it is the next token.
        pytest.param([1, 1, 0, 0, 1, 1, 1, 0, 1], 3, [2, 0, 3, 0], id="mixed"),
        pytest.param([1, 1, 1, 1, 1, 1], 5, [5], id="all-accepted-with-bonus"),
        pytest.param([1, 1, 1], 5, [2], id="text-ends-inside-a-round"),
        pytest.param([0, 0], 5, [0, 0], id="nothing-accepted"),
        pytest.param([1], 5, [0], id="one-token"),
        pytest.param([], 5, [], id="empty"),
    ],
)
def test_walk_rounds(agreement, num_draft_tokens, expected):
    rounds = walk_rounds([bool(agrees) for agrees in agreement], num_draft_tokens)
    assert rounds == expected
    assert sum(rounds) + len(rounds) == len(agreement)  # every token is counted once


def test_corpus_keeps_held_out_text_out():
    documents = split_documents(made_up_text(40, "\n\n\n"), "\n\n\n")
    training, held_out = hold_out([*documents, *documents[:10]], 0.2, seed=1)
    assert not set(training) & set(held_out)
    assert len(held_out) == 10


def test_corpus_windows_begin_at_documents():
    documents = [*split_documents(made_up_text(40, "\n\n\n"), "\n\n\n"), "A </s> in a text does not end it."]
    tokenizer = train_tokenizer(documents, 400)
    stream = token_stream(tokenizer, documents)
    ids = stream.ids[: stream.num_tokens]
    assert int((ids == 1).sum()) == len(documents)
    assert set(torch.nonzero(ids == 0).flatten().tolist()) <= set(stream.starts.tolist())
    generator = torch.Generator().manual_seed(0)
    assert stream.batch(64, 512, generator).shape == (64, 512)
    assert int(stream.starts.max()) + 512 <= len(stream.ids)


def test_prompts_have_unequal_lengths():
    documents = split_documents(made_up_text(40, "\n\n\n"), "\n\n\n")
    prompts = choose_prompts(train_tokenizer(documents, 400), documents[:8], 32, "made-up", seed=0)
    lengths = sorted(row["n_tokens"] for row in prompts)
    assert len(prompts) >= 28
    assert 7 <= lengths[0] <= 9
    assert 180 <= lengths[-1] <= 200
    assert all(any(document.startswith(row["prompt"]) for document in documents[:8]) for row in prompts)


@pytest.fixture(scope="module", params=[pytest.param(None, id="trained", marks=pytest.mark.grid)])
def pair(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("pair")
    text = folder / "made_up.txt"
    text.write_text(made_up_text(80, "\n\n\n"), encoding="utf-8")
    where = ["--text", str(text), "--output", str(folder / "out"), "--separator", r"\n\n\n"]
    result = run_tool(*where, *TINY, *BRIEF)
    assert result.returncode == 0, result.stderr
    return folder / "out", result.stdout


def test_folder_layout_and_size(pair):
    folder, _ = pair
    for name in ("target", "draft"):
        assert {path.name for path in (folder / name).iterdir()} == MODEL_FILES
    others = {"prompts.jsonl", "report.json", "README.md"}
    assert {path.name for path in folder.iterdir()} == {"target", "draft", *others}
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 4_000_000


@pytest.mark.parametrize("name", ["target", "draft"])
def test_loads_like_any_model(pair, name):
    folder, _ = pair
    model = AutoModelForCausalLM.from_pretrained(folder / name)
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert (model.config.max_position_embeddings, model.config.vocab_size) == (512, 1024)
    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert len(tokenizer) == 1024
    ids = tokenizer("Béba dolü.\n\tNever seen: 猫 {}").input_ids
    assert ids[0] == 0
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Béba dolü.\n\tNever seen: 猫 {}"


def test_prompts_file(pair):
    folder, _ = pair
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        assert set(row) == {"prompt", "task", "n_tokens"}
        assert len(tokenizer(row["prompt"]).input_ids) == row["n_tokens"] + 1  # bos


def test_report_is_consistent(pair):
    folder, printed = pair
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    measured = report["measured"]
    assert set(report) == REPORT_KEYS
    assert set(measured) == MEASURED_KEYS
    shares = measured["accepted_per_round"]
    assert len(shares) == measured["num_draft_tokens"] + 1
    assert sum(shares) == pytest.approx(1.0)
    mean_accepted = sum(accepted * share for accepted, share in enumerate(shares))
    assert measured["tokens_per_round"] == pytest.approx(1.0 + mean_accepted)
    assert 0 < measured["sampled_overlap"] <= 1
    gaps = measured["positions_with_gap_below"]
    assert gaps["1e-04"] <= gaps["1e-03"] <= gaps["1e-02"] <= measured["positions"]
    assert f"{measured['tokens_per_round']:.2f}" in printed
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "made_up.txt" in card
    assert str(folder.parent) not in card


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        pytest.param(None, [], "cannot read", id="missing"),
        pytest.param(b"Too little to learn from.", [], "too short", id="short-text"),
        pytest.param(b"\xff\xfe\x00", [], "not UTF-8", id="not-utf-8"),
        pytest.param(b"word " * 9000, [], "--separator", id="one-document"),
        pytest.param(b"any", ["--target-size", "512", "8", "8", "8", "2048"], "smaller sizes", id="too-large"),
        pytest.param(b"any", ["--minutes-target", "0"], "positive", id="no-budget"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, content, arguments, message):
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # other tests keep their threads
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(SystemExit) as leaving:
        main(["--text", str(text), "--output", str(tmp_path / "out"), *arguments])
    assert leaving.value.code == 2
    printed = capsys.readouterr().err
    assert len(printed.strip().splitlines()) == 1
    assert message in printed
    assert not (tmp_path / "out").exists()
