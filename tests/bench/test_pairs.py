"""Random pairs: the sizes of published models, texts that vary, and the requested acceptance."""

from __future__ import annotations

import argparse

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.common.pairs import PAIRS, ModelShape, config_of, random_model, random_pair, random_prompts
from bench.common.workload import Workload, add_workload_options, check_workload, load
from bench.engine_.methods import Bench
from specdec_fast.equivalence.compare import transformers_greedy

CPU = torch.device("cpu")
NEW_TOKENS = 60
# Billions of parameters of the published models (Qwen3, Vicuna, GLM-4-9B-0414); that of 42 million is not published.
BILLIONS = {
    "qwen3-0.6b": (0.596, 0.04204),
    "qwen3-1.7b": (1.721, 0.596),
    "qwen3-8b": (8.191, 0.596),
    "vicuna-7b": (6.738, 0.0680),
    "glm-4-9b": (9.400, 0.596),
}


@pytest.mark.parametrize("name", BILLIONS)
def test_pairs_have_the_sizes_of_what_they_are_named_for(name):
    pair = PAIRS[name]
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(config_of(s, pair.vocab_size)) for s in (pair.target, pair.draft)]
    assert [m.num_parameters() / 1e9 for m in models] == pytest.approx(BILLIONS[name], rel=1e-3)
    for model in models:
        assert model.config.vocab_size == pair.vocab_size
        assert model.config.eos_token_id is model.generation_config.eos_token_id is None, "no text may end early"


def test_weights_belong_to_the_seed():
    def weights(seed):
        return [p for model in random_pair(PAIRS["smoke"], torch.float32, CPU, seed) for p in model.parameters()]

    first, again, other = weights(3), weights(3), weights(4)
    assert all(map(torch.equal, first, again))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True) if a.dim() == 2)


@pytest.mark.grid
@pytest.mark.parametrize("tied", [True, False])
def test_texts_vary_and_ties_are_rare(tied):
    """A comparison of outputs needs that: a text that repeats one token is right whatever attention does."""
    model = random_model(ModelShape(128, 384, 12, 4, 2, 32, tied), 2000, torch.float32, CPU, 0)
    for prompt in random_prompts(3, 16, 2000):
        text = transformers_greedy(model, prompt, 40)
        assert len(set(text)) > 10
        with torch.inference_mode():
            best = model(torch.tensor([prompt + text])).logits[0].topk(2).values
        assert float(((best[:, 0] - best[:, 1]) / best[:, 0].abs()).median()) > 0.01


def test_random_prompts_belong_to_the_seed():
    prompts = random_prompts(3, 5, 97, seed=1)
    assert prompts == random_prompts(3, 5, 97, seed=1) != random_prompts(3, 5, 97, seed=2)
    assert [len(prompt) for prompt in prompts] == [5] * 3
    assert all(0 <= token < 97 for prompt in prompts for token in prompt)


@pytest.fixture(scope="module")
def replaying():
    target, draft = random_pair(PAIRS["smoke"], torch.float32, CPU)
    return Bench(Workload("smoke", target, draft, random_prompts(16, 6, 97), NEW_TOKENS))


@pytest.mark.grid
@pytest.mark.parametrize("probability", [0.0, 0.4, 0.8, 1.0])
@pytest.mark.parametrize("method", ["eqspec", "exspec"])
def test_replay_accepts_as_often_as_asked_and_changes_no_token(replaying, method, probability):
    run = replaying.method_setting(method, 4, 3, probability).run()
    assert run.outputs == replaying.transcripts
    drafted, accepted = run.decoding.num_drafts, run.decoding.accepted_per_position
    assert drafted >= 16 * NEW_TOKENS / 4
    tolerance = 4 * (probability * (1 - probability) / drafted) ** 0.5  # four standard deviations
    assert accepted[0] / drafted == pytest.approx(probability, abs=tolerance)


def test_a_replayed_draft_model_really_runs(replaying, monkeypatch):
    setting = replaying.method_setting("eqspec", 2, 3, 0.5)
    model, calls = setting.run.drafter.inner.model, []
    forward = model.hf.forward
    monkeypatch.setattr(model.hf, "forward", lambda *args: calls.append(1) or forward(*args))
    if model.program is not None:  # then several forwards are one call
        draft = model.program.draft
        monkeypatch.setattr(
            model.program, "draft", lambda forwards, *args: calls.extend(forwards) or draft(forwards, *args)
        )
    run = setting.run()
    assert len(calls) >= run.decoding.num_drafts  # K forwards per step of two sequences


def options(*words):
    parser = argparse.ArgumentParser()
    add_workload_options(parser)
    args = parser.parse_args(words)
    check_workload(parser, args)
    return args


def test_a_random_pair_draws_its_prompts():
    workload = load(options("--pair", "smoke", "--prompt-tokens", "7", "--max-new-tokens", "5"), 6)
    assert [len(prompt) for prompt in workload.prompts] == [7] * 6
    assert len(load(options("--pair", "smoke", "--num-prompts", "3"), 6).prompts) == 3


def test_a_random_pair_takes_no_text(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt_ids": [1, 2]}\n{"prompt": "text"}\n')
    with pytest.raises(SystemExit, match="line 2: text, but the pair has no tokenizer"):
        load(options("--pair", "smoke", "--prompts", str(path)), 1)
    args = options("--pair", "smoke", "--prompts", str(path), "--num-prompts", "1")
    assert load(args, 9).prompts == [[1, 2]]


@pytest.mark.parametrize("line", ['{"prompt_ids": []}', '{"prompt_ids": [97]}', '{"prompt_ids": [-1]}', "{}"])
def test_lines_that_hold_no_prompt(tmp_path, line):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt_ids": [96]}\n' + line + "\n")
    with pytest.raises(SystemExit, match="--prompts, line 2: expected"):
        load(options("--pair", "smoke", "--prompts", str(path)), 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "x"], "--target and --draft go together"),
        (["--draft", "x"], "--target and --draft go together"),
        (["--pair", "demo", "--target", "x", "--draft", "y"], "give one of them"),
        (["--pair", "gpt-5"], "--pair gpt-5: expected one of demo, qwen3-0.6b"),
        (["--target", "x", "--draft", "y"], "--target needs --prompts"),
    ],
)
def test_options_that_contradict_each_other(words, message, capsys):
    with pytest.raises(SystemExit):
        options(*words)
    assert message in capsys.readouterr().err


def test_spec_bench_questions_and_what_is_left_out(tmp_path, tokenizer):
    path = tmp_path / "question.jsonl"
    path.write_text(
        '{"question_id": 81, "category": "writing", "turns": ["One day", "Rewrite it."]}\n'
        '{"question_id": 82, "category": "rag", "turns": ["' + "word " * 500 + '"], "reference": ["x"]}\n'
        '{"question_id": 83, "category": "qa", "turns": ["Sums: 3"]}\n'
    )
    workload = load(options("--prompts", str(path), "--max-new-tokens", "20"), 1)
    assert workload.prompts == [tokenizer("One day").input_ids, tokenizer("Sums: 3").input_ids]
    assert (workload.name, workload.num_left_out) == ("demo", 1)
    with pytest.raises(SystemExit, match="no prompt leaves room for 600 new tokens in the target's 512"):
        load(options("--prompts", str(path), "--max-new-tokens", "600"), 1)
